"""Makes torchvision importable where its compiled operators do not match the installed torch.

The usual torchvision wheel is built for CUDA. With a CPU build of torch its operators cannot be loaded, and the import
fails because it describes two operators that have not been declared. Declaring them is enough for everything that does
not call them.
"""

import importlib.util
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _DeclareBeforeImport:
    """Import hook that makes the declarations when torchvision is looked for, so that nothing else pays for importing
    torch.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare_missing_operators()
        return None  # the usual finders go on from here


_HOOK = _DeclareBeforeImport()


def install() -> None:
    """Make ``import torchvision`` work in this process. Calling it again changes nothing."""
    if _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)


@lru_cache(maxsize=1)  # a Library loses its declarations when it is collected, so it is kept here
def declare_missing_operators() -> Any:
    """Declare the operators that importing torchvision needs, unless its own can be loaded."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    for library_file in Path(spec.origin).parent.glob("_C.*"):
        try:
            torch.ops.load_library(library_file)
        except OSError:
            continue  # built for another torch
        return None
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
