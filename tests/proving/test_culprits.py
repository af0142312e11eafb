"""Faults that `prove` once named wrongly or vaguely: each is named now, or the report says that it does not know."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.extras.proving import Check, Proof
from tests.proving.faults import INPUTS, TARGETS, Rows, Run, run
from tests.support.reference import tiny_model

AGAIN, RESUMED, HALVES = "again", "resumed at each update", "half batches, twice as many"
WORKERS, KILLED, RANKS = "two workers", "killed and resumed", "two ranks, half batches"


class Unfreeze(TrainerCallback):
    """Trains only the head for one epoch."""

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        epoch = trainer.run_history.current_epoch
        if epoch <= 2:
            trainer.get_model()[0].requires_grad_(epoch == 2)


class LateUnfreeze(TrainerCallback):
    """The same, but frozen from the start, so that a run which is resumed later stays frozen."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.get_model()[0].requires_grad_(False)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.get_model()[0].requires_grad_(True)


class Distil(TrainerCallback):
    """Every second update the teacher becomes a copy of the model."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.teacher = copy.deepcopy(trainer.get_model())

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            target = self.teacher(batch[0])
        batch_output["loss"] = batch_output["loss"] + (batch_output["model_outputs"] - target).square().mean()

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates % 2 == 0:
            self.teacher.load_state_dict(trainer.get_model().state_dict())


class MadeBefore(Distil):
    """Its teacher exists before the run, and must be as before after it."""

    def __init__(self) -> None:
        self.teacher = tiny_model()

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        pass


class SwitchLoss(TrainerCallback):
    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.loss_func = nn.L1Loss()


def plain(row: torch.Tensor) -> torch.Tensor:
    return row


def flip(row: torch.Tensor) -> torch.Tensor:
    return -row


class Transformed(Rows):
    transform = staticmethod(plain)

    def changed(self, row: torch.Tensor) -> torch.Tensor:
        return self.transform(row)


class SwitchTransform(TrainerCallback):
    def __init__(self, dataset: Transformed) -> None:
        self.dataset = dataset

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.dataset.transform = flip  # type: ignore[method-assign]


def transformed() -> Run:
    dataset = Transformed()
    return run(dataset, SwitchTransform(dataset))


def sum_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().sum()


class Squashed(torch.autograd.Function):
    """Its gradient is no linear function of the one that it gets."""

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient / gradient.abs().max()


class WithSquashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Squashed.apply(self.inner(inputs))  # type: ignore[no-any-return, no-untyped-call]


class Dropped(nn.Module):
    """Two parts of one class, and only the first one changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()
        self.first, self.second = Scale(), Scale()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.first.factor *= 0.9
        return self.inner(inputs) * self.first.factor * self.second.factor


class Scale(nn.Module):
    factor = 1.0


PLANTED: dict[str, tuple[Callable[[], Run], str, int | None, str]] = {
    "a part that stays frozen after a resume": (
        lambda: run(None, LateUnfreeze()),
        RESUMED,
        5,
        "^the gradients: the list of frozen parameters was .* in the uninterrupted run and .*weight.* after "
        "the resume: choose it by the number of the epoch",
    ),
    "a teacher": (
        lambda: run(None, Distil()),
        RESUMED,
        2,
        "^the loss: `teacher` of the callback Distil was another one after the resume: give the callback `state_dict` "
        "and `load_state_dict` with it$",
    ),
    "a teacher that is made before": (lambda: run(None, MadeBefore()), RESUMED, 3, "^the loss: `teacher` of the call"),
    "another loss": (
        lambda: run(None, SwitchLoss()),
        RESUMED,
        5,
        "^the loss: `loss_func` of the trainer was L1Loss in the uninterrupted run and MSELoss after the resume: ",
    ),
    "an attribute over one of the class": (
        transformed,
        RESUMED,
        5,
        "^the contents of the batch: `transform` of the dataset Transformed was another one after the resume: ",
    ),
    "the first of two parts": (
        lambda: run(model=Dropped()),
        RESUMED,
        2,
        "^the loss: `factor` of the model Scale was another one after the resume: register it as a buffer$",
    ),
    "a sum": (
        lambda: run(loss_func=sum_loss),
        HALVES,
        1,
        "^the gradients, by 0.5 of their norm: the loss is not a mean over the rows .*: it is .* of its halves",
    ),
    "a gradient that is no mean, of a loss that is one": (
        lambda: run(model=WithSquashed()),
        HALVES,
        1,
        "^the gradients, by .* of their norm: the loss is the mean of those of its halves; not found: look at the back",
    ),
}


def rows_of(made: Run) -> dict[str, Check]:
    trainer, arguments = made
    return {row.check: row for row in trainer.prove(**arguments).rows}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str) -> None:
    make, check, update, culprit = PLANTED[name]
    row = rows_of(make())[check]
    assert (row.verdict, row.update) == ("difference", update), row
    assert re.search(culprit, row.culprit), row.culprit


def test_a_teacher_is_given_back() -> None:
    callback = MadeBefore()
    before = copy.deepcopy(callback.teacher.state_dict())
    rows_of(run(None, callback))
    torch.testing.assert_close(callback.teacher.state_dict(), before, rtol=0, atol=0)


def factor(index: int) -> float:
    return index / 10


class Weighted(Rows):
    factor = staticmethod(functools.lru_cache(factor))

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index] * self.factor(int(index)), TARGETS[index]


def test_the_cache_of_a_function_is_no_fault() -> None:
    rows = rows_of(run(Weighted()))
    assert {row.verdict for row in rows.values()} == {"same bits", "equal to rounding", "not checked"}
    assert rows[RESUMED].culprit == ""


def test_halves_are_not_compared_where_each_batch_changes_something() -> None:
    row = rows_of(run(model=Dropped()))[HALVES]
    assert (row.verdict, row.update) == ("not checked", None)
    assert row.culprit == "each batch changes `factor` of the model Scale, and there are twice as many"


def test_an_error_of_many_lines_has_one_line_in_the_table() -> None:
    text = "it failed with Empty: Caught Empty in DataLoader worker process 0.\nOriginal Traceback:\n  File x\nEmpty"
    proof = Proof(2, (Check("two workers", "not checked", None, text), Check("no workers", "same bits")))
    lines = str(proof).splitlines()
    assert lines[2].endswith("it failed with Empty: Caught Empty in DataLoader worker process 0. (see below)")
    assert lines[3].split() == ["no", "workers", "same", "bits"]
    assert lines[4:] == ["  two workers:", "    Original Traceback:", "      File x", "    Empty"]
    assert proof.to_json()["rows"][0]["culprit"] == text


# ------------------------------------------------------------------------------------------------- new processes


class Hashed(Rows):
    def changed(self, row: torch.Tensor) -> torch.Tensor:
        return row + np.random.default_rng(abs(hash(f"image {row[0]}.png"))).normal()


def hashed() -> Run:
    return _anew(run(Hashed(), per_device_batch_size=3))  # that cannot be halved, which spares two processes


def frozen() -> Run:
    return _anew(run(None, Unfreeze()))


def _anew(made: Run) -> Run:
    trainer, arguments = made
    return trainer, {name: value for name, value in arguments.items() if name != "updates"}


def proof_in_processes(made: Run, factory: Callable[[], Run], updates: int) -> dict[str, Check]:
    trainer, arguments = made
    proof = trainer.prove(**arguments, updates=updates, factory=f"{__name__}:{factory.__name__}")
    return {row.check: row for row in proof.rows}


@pytest.mark.processes
def test_rows_that_depend_on_the_hash_of_a_text_are_named() -> None:
    row = proof_in_processes(hashed(), hashed, 2)[KILLED]
    assert (row.verdict, row.update) == ("difference", 1)
    assert re.search(
        "^the contents of the batch: it is another one in each process: .*use `hashlib` in place of `hash`", row.culprit
    )


@pytest.mark.processes
def test_parameters_that_are_frozen_after_the_start_are_named_on_two_ranks() -> None:
    rows = proof_in_processes(frozen(), frozen, 2)
    assert rows[HALVES].verdict == "equal to rounding"
    assert (rows[RANKS].verdict, rows[RANKS].update) == ("difference", 1)
    assert re.search("^the gradients, by .*: 0.weight, 0.bias have no gradient", rows[RANKS].culprit)
