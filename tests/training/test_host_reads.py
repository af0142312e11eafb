"""The steady loop never waits for the device: it reads no value that the raw loop does not read."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    DEFAULT_CALLBACKS,
    ModelEmaCallback,
    StepBasedEvaluationCallback,
    TrainerCallback,
)
from pytorch_accelerated.loop.training import UPDATES_BETWEEN_READINGS
from pytorch_accelerated.schedulers import CosineLrScheduler
from tests.support.reference import regression_data

UPDATES = 2 * UPDATES_BETWEEN_READINGS + 8
DATA = regression_data(UPDATES)
BETWEEN_READINGS = range(5, UPDATES_BETWEEN_READINGS - 1)
TWO_READINGS = range(5, UPDATES)


class HostReads(TorchDispatchMode):
    """Counts how often a tensor's values are handed to Python or copied to the host.

    ``item``, ``float``, ``bool``, ``if tensor`` and indexing by a tensor all end in one operation, which is counted.
    What bypasses the dispatcher on the CPU is counted where it is called: on an accelerator it would wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        elif func is torch.ops.aten._to_copy.default and _is_on_host(kwargs.get("device")):
            self.count += not _is_on_host(args[0].device)
        elif func is torch.ops.aten.copy_.default and _is_on_host(args[0].device):
            self.count += not _is_on_host(args[1].device)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("tolist", "numpy", "cpu", "__array__"):
                patch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))
            with self:
                yield

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return method(tensor, *args, **kwargs)

        return counted


def _is_on_host(device: torch.device | None) -> bool:
    return device is not None and device.type == "cpu"


class CountAfterUpdates(TrainerCallback):
    """How many reads there had been after each update, and after each evaluated batch."""

    def __init__(self, reads: HostReads) -> None:
        self.reads = reads
        self.after_updates: list[int] = [0]
        self.after_evaluated_batches: list[int] = []

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.after_updates.append(self.reads.count)

    def on_eval_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.after_evaluated_batches.append(self.reads.count)


def model_and_optimizer(kind: type[torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2)).double()
    return model, kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]


def counts_of_ours(kind: Any, *callbacks: Any, base: type[Trainer] = Trainer, **arguments: Any) -> CountAfterUpdates:
    """The run has `UPDATES` updates of two samples or more."""
    reads = HostReads()
    model, optimizer = model_and_optimizer(kind)
    counts = CountAfterUpdates(reads)
    trainer = base(model, nn.MSELoss(), optimizer, callbacks=[*DEFAULT_CALLBACKS, *callbacks, counts])
    data = regression_data(2 * UPDATES * arguments.get("gradient_accumulation_steps", 1))
    with reads.watching():
        trainer.train(data, 1, **{"per_device_batch_size": 2, **arguments})
    return counts


@functools.cache
def counts_of_raw_loop(kind: Any) -> list[int]:
    reads = HostReads()
    model, optimizer = model_and_optimizer(kind)
    after_updates = [0]
    inputs, targets = regression_data(2 * UPDATES)
    with reads.watching():
        for rows in range(0, 2 * UPDATES, 2):
            nn.functional.mse_loss(model(inputs[rows : rows + 2]), targets[rows : rows + 2]).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_updates.append(reads.count)
    return after_updates


def reads_within(updates: range, after_updates: list[int]) -> int:
    """From the end of the update before the range to the end of its last one."""
    return after_updates[updates[-1]] - after_updates[updates[0] - 1]


CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "default callbacks": ([], {}),
    "clipping by norm": ([], {"gradient_clip_norm": 0.1}),
    "clipping by value": ([], {"gradient_clip_value": 0.1}),
    "EMA": ([functools.partial(ModelEmaCallback, evaluate_during_training=False)], {}),
    "accumulation": ([], {"gradient_accumulation_steps": 3}),
    "our scheduler": ([], {"create_scheduler_fn": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=0.1)}),
    "torch's scheduler": (
        [],
        {
            "create_scheduler_fn": functools.partial(
                torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=UPDATES
            )
        },
    ),
    "evaluation sets": ([functools.partial(StepBasedEvaluationCallback, UPDATES)], {"eval_dataset": DATA}),
    "everything": (
        [functools.partial(ModelEmaCallback, evaluate_during_training=False)],
        {
            "gradient_clip_norm": 0.1,
            "gradient_accumulation_steps": 2,
            "create_scheduler_fn": CosineLrScheduler.create_scheduler_fn(),
            "max_duration": 1000,
            "eval_dataset": DATA,
        },
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for the file that the average is saved to


@pytest.mark.parametrize(
    ("case", "kind"), [*((case, torch.optim.SGD) for case in CASES), ("everything", torch.optim.AdamW)]
)
def test_the_steady_loop_reads_nothing_that_the_raw_loop_does_not_read(case: str, kind: Any):
    factories, arguments = CASES[case]
    ours = counts_of_ours(kind, *(factory() for factory in factories), **arguments).after_updates
    raw = counts_of_raw_loop(kind)
    assert len(ours) == len(raw) == UPDATES + 1
    assert reads_within(BETWEEN_READINGS, ours) - reads_within(BETWEEN_READINGS, raw) == 0
    # One transfer of the losses per interval, and one of the gradient norms where there are any.
    allowed = 2 * (2 if "gradient_clip_norm" in arguments else 1)
    assert 2 <= reads_within(TWO_READINGS, ours) - reads_within(TWO_READINGS, raw) <= allowed


def test_an_evaluation_reads_its_losses_in_bulk():
    counts = counts_of_ours(torch.optim.SGD, eval_dataset=DATA).after_evaluated_batches
    batches = UPDATES // 2
    assert len(counts) == batches
    assert counts[-1] - counts[0] <= (batches - 1) // UPDATES_BETWEEN_READINGS


class CountsLate(Trainer):
    """Counts items once the loss is there, in a tensor."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        return {**output, "num_items_in_batch": batch[0].isfinite().sum()}


def test_items_that_are_counted_late_in_tensors_are_read_once_an_update():
    # An update without items must not be applied, so the host has to know.
    raw = counts_of_raw_loop(torch.optim.SGD)
    for steps in (1, 3):
        ours = counts_of_ours(torch.optim.SGD, base=CountsLate, gradient_accumulation_steps=steps).after_updates
        reads = reads_within(BETWEEN_READINGS, ours) - reads_within(BETWEEN_READINGS, raw)
        assert reads == len(BETWEEN_READINGS)
