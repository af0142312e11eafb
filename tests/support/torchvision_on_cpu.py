"""Makes torchvision importable where its compiled operators do not match the installed torch.

The usual torchvision wheel is built for CUDA. With a CPU build of torch its operators cannot be loaded, and the import
fails because it describes two operators that have not been declared. Declaring them is enough for everything that does
not call them.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What describes the operators, imported after torchvision has tried to load them.
_DESCRIPTIONS = ("torchvision._autograd_registrations", "torchvision._meta_registrations")


class _DeclareBeforeDescribed:
    """Import hook that declares the operators if torchvision could not, so that nothing else pays for importing torch.

    Attributes:
        library: the declarations, which go with it.
    """

    library: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in _DESCRIPTIONS:
            import torch

            if not hasattr(torch.ops.torchvision, "nms"):
                self.library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None  # the usual finders go on from here


_HOOK = _DeclareBeforeDescribed()


def install() -> None:
    """Make ``import torchvision`` work in this process. Calling it again changes nothing."""
    if _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)
