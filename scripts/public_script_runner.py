"""Runs an unmodified script and records the run history after each of its runs.

    python scripts/public_script_runner.py OUTPUT.json SCRIPT ARGUMENTS...

The data comes in the order of the dataset, so that two packages can be compared: the default arguments of the training
loader don't shuffle. Nothing else is changed.
"""

from __future__ import annotations

import functools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.support import torchvision_on_cpu


def main(output: str, script: str, *arguments: str) -> None:
    """Run `script` and write its histories to `output`."""
    torchvision_on_cpu.install()
    import torch
    from accelerate.utils import set_seed

    import pytorch_accelerated

    torch.set_num_threads(1)
    histories: list[dict[str, Any]] = []
    trainer_class = pytorch_accelerated.Trainer
    for name in ("train", "evaluate"):
        setattr(trainer_class, name, _recording(getattr(trainer_class, name), histories, Path(output)))
    trainer_class.get_default_train_dl_kwargs = _in_order(  # type: ignore[method-assign]
        trainer_class.get_default_train_dl_kwargs
    )
    trainer_class.get_default_eval_dl_kwargs = _in_this_process(  # type: ignore[method-assign]
        trainer_class.get_default_eval_dl_kwargs
    )
    if "rcnn" in script:
        _compute_boxes_in_python()
    set_seed(42)  # the reference does this on import
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _recording(method: Any, histories: list[dict[str, Any]], output: Path) -> Any:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        names = sorted(self.run_history.get_metric_names())
        histories.append({name: _plain(list(self.run_history.get_metric_values(name))) for name in names})
        output.write_text(json.dumps(histories), encoding="utf-8")
        return result

    return call


def _plain(values: list[Any]) -> list[Any]:
    return [value if isinstance(value, (dict, str)) else float(value) for value in values]


def _in_order(method: Any) -> Any:
    @functools.wraps(method)
    def call(self: Any, batch_size: int) -> dict[str, Any]:
        return {**method(self, batch_size), "shuffle": False, "num_workers": 0}

    return call


def _in_this_process(method: Any) -> Any:
    @functools.wraps(method)
    def call(self: Any, batch_size: int) -> dict[str, Any]:
        return {**method(self, batch_size), "num_workers": 0}

    return call


def _compute_boxes_in_python() -> None:
    """Provide torchvision's detection operators in Python where its compiled ones can't be loaded."""
    import torch
    import torchvision

    try:
        torchvision.extension._assert_has_ops()
        return
    except RuntimeError:
        torchvision.extension._has_ops = lambda: True

    def nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
        left = scores.argsort(descending=True)
        kept = []
        while len(left):
            kept.append(left[0])
            overlap = torchvision.ops.box_iou(boxes[left[:1]], boxes[left])[0]
            left = left[1:][overlap[1:] <= iou_threshold]
        return torch.stack(kept) if kept else left

    global _operators  # an operator disappears with its library
    definition = torch.library.Library("torchvision", "FRAGMENT")
    definition.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    definition.impl("roi_align", sys.modules["torchvision.ops.roi_align"]._roi_align, "CompositeImplicitAutograd")
    definition.impl("nms", nms, "CPU")
    _operators = definition


if __name__ == "__main__":
    main(*sys.argv[1:])
