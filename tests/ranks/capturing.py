"""Runs under torchrun on two ranks: captured and ordinary runs agree to the bit, and ranks capture together.

The stand-in for a CUDA graph calls the step again, since what DDP does within it is not made of torch operations alone.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.steps.capturing import CapturedStepReport
from tests.support.capturing import CapturableSGD, CapturesTape, pairs_of_tensors
from tests.support.reference import regression_data
from tests.support.resuming import assert_same

RANK = int(os.environ["RANK"])


class CallsAgain:
    trainer: Trainer

    def __init__(self, *, fails_on: int | None = None, differs_on: int | None = None) -> None:
        self.fails, self.differs = fails_on == RANK, differs_on == RANK

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        yield []

    def capture(self, function: Callable[[], Any], generators: Any) -> tuple[Any, Callable[[], None]]:
        wrapper = self.trainer.model
        copies_buffers = wrapper.require_forward_param_sync
        captured = function()  # a CUDA graph would not exchange anything yet; this does, on both ranks
        if self.fails:
            raise RuntimeError("no capture here")

        def replay() -> None:
            # In a graph it is fixed whether DDP copies buffers, and DDP hears nothing of it.
            flag, wrapper.require_forward_param_sync = wrapper.require_forward_param_sync, copies_buffers
            for recorded, computed in pairs_of_tensors(captured, function()):
                if recorded is not computed:
                    recorded.copy_(computed + 1 if self.differs else computed)
            wrapper.require_forward_param_sync = flag

        return captured, replay


def run(
    samples: int, steps: int, capturer: CallsAgain | None = None, *, batch_size: int = 2
) -> tuple[dict[str, Any], CapturedStepReport | None]:
    torch.manual_seed(0)
    # DDP copies buffers from rank to rank in some forward passes. A batch of one row has no statistics.
    norm = nn.BatchNorm1d(6) if samples % 4 == 0 or batch_size == 4 else nn.LayerNorm(6)
    module = nn.Sequential(nn.Linear(3, 6), norm, nn.Dropout(0.3), nn.Linear(6, 2)).double()
    kind: Any = Trainer if capturer is None else type("Captured", (CapturesTape, Trainer), {"capturer": capturer})
    options = {} if capturer is None else {"compile_step": "graph"}
    optimizer = CapturableSGD(module.parameters())
    trainer = kind(module, nn.MSELoss(), optimizer, callbacks=(), seed=3, **options)
    if capturer is not None:
        capturer.trainer = trainer
    assert trainer._ranks.count == int(os.environ["WORLD_SIZE"]) == 2
    trainer.train(
        regression_data(samples),
        4,
        per_device_batch_size=batch_size,
        gradient_accumulation_steps=steps,
        gradient_clip_norm=1.0,
    )
    result = {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "losses": trainer.run_history.get_metric_values("train_loss_epoch"),
        "torch": torch.default_generator.get_state(),
    }
    return result, trainer.captured_step_report


# 40 and 60 samples: all batches are full. 110: the last batches of an epoch are shorter. 39: rows are dealt unevenly.
# 41 and 45: a rank has nothing left.
for samples, steps, batch_size in ((40, 1, 2), (40, 2, 2), (60, 3, 2), (110, 2, 4), (39, 2, 2), (41, 1, 2), (45, 2, 2)):
    case = f"{samples} samples, {steps} steps"
    expected, _ = run(samples, steps, batch_size=batch_size)
    captured, report = run(samples, steps, CallsAgain(), batch_size=batch_size)
    assert_same(captured, expected, case)
    assert report is not None
    assert report.fallback is None, f"{case}: {report.fallback}"
    assert report.captured_steps > 10, f"{case}: {report}"
    assert report.shadow_steps == steps, f"{case}: {report}"
    assert report.shadow_updates == 1
    assert report.eager_updates >= 12

for capturer, words in (
    (CallsAgain(fails_on=1), ("something was in the way on another rank", "no capture here")),
    (CallsAgain(differs_on=0), ("a replay computed", "something was in the way on another rank")),
):
    expected, _ = run(40, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured, report = run(40, 2, capturer)
    assert_same(captured, expected)
    assert report is not None
    assert report.fallback is not None
    assert words[RANK] in report.fallback, report.fallback
    assert report.captured_steps == 0
    assert len([each for each in caught if "compile_step" in str(each.message)]) == (RANK == 0)
torch.distributed.destroy_process_group()
