"""Makes torchvision importable where its compiled operators do not match the installed torch.

The usual torchvision wheel is built for CUDA. With a CPU build of torch its operators cannot be loaded, and the import
fails because it describes two operators that have not been declared. Declaring them is enough for everything that does
not call them; `nms`, which detection models call, is written in Python here.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What describes the operators, imported after torchvision has tried to load them.
_DESCRIPTIONS = ("torchvision._autograd_registrations", "torchvision._meta_registrations")
_LAST = "torchvision.version"  # what torchvision imports last


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
                self.library.impl("nms", _nms, "CPU")
        elif name == _LAST and self.library is not None:
            sys.modules["torchvision.ops.boxes"]._assert_has_ops = lambda: None  # type: ignore[attr-defined]
        return None  # the usual finders go on from here


def _nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """The boxes to keep, best first: each removes those of lower scores that overlap with it by more."""
    from torchvision.ops import box_iou

    kept, left = [], scores.argsort(descending=True, stable=True)
    overlaps = box_iou(boxes, boxes) > iou_threshold
    while len(left):
        kept.append(int(left[0]))
        left = left[1:][~overlaps[left[0], left[1:]]]
    return left.new_tensor(kept)


_HOOK = _DeclareBeforeDescribed()


def install() -> None:
    """Make ``import torchvision`` work in this process. Calling it again changes nothing."""
    if _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)
