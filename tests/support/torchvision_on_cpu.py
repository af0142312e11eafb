"""Lets torchvision be imported where its compiled operators do not fit the installed torch.

The usual torchvision wheel is built for CUDA. Beside a CPU build of torch its operators cannot be loaded, and then the
import fails, because it describes two operators that nobody has declared. Declaring them is enough for everything that
does not call them.
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
    """Import hook: the declarations are made when torchvision is looked for, so that nobody else pays for torch."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare_missing_operators()
        return None  # the usual finders go on from here


_HOOK = _DeclareBeforeImport()


def install() -> None:
    """Make ``import torchvision`` work in this process, whoever does it. Doing it again changes nothing."""
    if _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)


@lru_cache(maxsize=1)  # a Library takes its declarations with it when it is collected, so it is kept here
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
