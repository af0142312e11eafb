"""Faults that `prove` once named wrongly or vaguely: each is named now, or the report says that it does not know."""

import contextvars
import copy
import functools
import itertools
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
from tests.chaos.size import in_release
from tests.proving.faults import INPUTS, TARGETS, Rows, Run, run
from tests.support.reference import tiny_model

AGAIN, RESUMED, HALVES = "again", "resumed at each update", "half batches, twice as many"
WORKERS, KILLED, RANKS = "two workers", "killed and resumed", "two ranks, half batches"


@functools.cache
def noisy(index: int) -> torch.Tensor:
    return INPUTS[index] + torch.rand(())


class Remembered(Rows):
    def __getitem__(self, index: int) -> Any:
        return noisy(int(index)), TARGETS[index]


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


scales = itertools.cycle([1.0, 0.9, 0.8, 0.7, 0.6])


class Rescale(TrainerCallback):
    def on_train_step_end(self, trainer: Trainer, batch_output: Any, **kwargs: Any) -> None:
        batch_output["loss"] = batch_output["loss"] * next(scales)


class CountsBatches(TrainerCallback):
    def __init__(self) -> None:
        self.batches = 0

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class CountedModel(nn.Module):
    """Counts its forward passes, which has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()
        self.passes: torch.Tensor
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.inner(inputs)


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


fading = contextvars.ContextVar("fading", default=1.0)


class Fades(TrainerCallback):
    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        fading.set(fading.get() * 0.9)


def faded_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return fading.get() * nn.functional.mse_loss(outputs, targets)


PLANTED: dict[str, tuple[Callable[[], Run], str, int | None, str]] = {
    "a cache of rows, resumed": (
        lambda: run(Remembered()),
        RESUMED,
        4,
        r"^the contents of the batch: `noisy`, a variable of the module tests.proving.test_culprits, was a cache of 18 "
        r"results in the uninterrupted run and a cache of 9 results after the resume: make the row a function of its ",
    ),
    "a cache of rows, in workers": (lambda: run(Remembered()), WORKERS, 1, "^the contents of the batch: `noisy`, a va"),
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
    "a context variable": (
        lambda: run(None, Fades(), loss_func=faded_loss),
        RESUMED,
        2,
        "^the loss: `fading`, a variable of the module .*, was 0.81 in the uninterrupted run and 0.9 after the "
        "resume: ",
    ),
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
        lambda: run(None, CountsBatches(), loss_func=sum_loss, model=CountedModel()),
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


def test_a_cache_and_a_teacher_are_given_back() -> None:
    noisy.cache_clear()
    rows_of(run(Remembered()))
    assert noisy.cache_info().currsize == 0

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


def test_what_each_batch_changes_is_blamed_if_putting_it_back_mends_it() -> None:
    row = rows_of(run(None, CountsBatches(), Rescale(), model=CountedModel()))[HALVES]
    assert row.verdict == "known difference"
    assert re.search("^each batch changes `scales`, a variable of the module .*, and there are twice", row.culprit)
    assert "passes" not in row.culprit
    assert "batches`" not in row.culprit

    row = rows_of(run(None, Fades(), loss_func=faded_loss))[HALVES]
    assert re.search("^each batch changes `fading`, a variable of the module .*, and there are twice", row.culprit)
    assert fading.get() == 1.0

    row = rows_of(run(model=Dropped()))[HALVES]
    assert row[1:] == (
        "known difference",
        1,
        "each batch changes `factor` of the model Scale, and there are twice as many",
    )


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


_drawn = torch.rand(1, generator=torch.Generator().manual_seed(torch.seed() % 2**30)).double()


class Unseeded(Rows):
    def changed(self, row: torch.Tensor) -> torch.Tensor:
        return row + _drawn


def unseeded() -> Run:
    return _anew(run(Unseeded(), per_device_batch_size=3))


def frozen() -> Run:
    return _anew(run(None, Unfreeze()))


def counted() -> Run:
    return _anew(run(None, CountsBatches()))


def healthy() -> Run:
    return _anew(run(Rows()))


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
        "^the contents of the batch: it depends on `hash` of a text, or on the order of a set", row.culprit
    )


@in_release
@pytest.mark.processes
def test_rows_that_nothing_has_seeded_are_told_from_those() -> None:
    row = proof_in_processes(unseeded(), unseeded, 2)[KILLED]
    assert (row.verdict, row.update) == ("difference", 1)
    assert re.search(
        "^the contents of the batch: `_drawn`, a variable of the module .*: it is another one in each process; call "
        "`set_seed` before what is random",
        row.culprit,
    )


@in_release
@pytest.mark.processes
def test_another_run_of_the_factory_is_told_from_what_differs_by_process() -> None:
    row = proof_in_processes(_anew(run(Hashed())), healthy, 2)[KILLED]
    assert (row.verdict, row.update) == ("difference", 1)
    assert re.search("^the contents of the batch: .*new processes agree with each other.*factory", row.culprit)


@pytest.mark.processes
def test_parameters_that_are_frozen_after_the_start_are_named_on_two_ranks() -> None:
    rows = proof_in_processes(frozen(), frozen, 2)
    assert rows[HALVES].verdict == "equal to rounding"
    assert (rows[RANKS].verdict, rows[RANKS].update) == ("difference", 1)
    assert re.search("^the gradients, by .*: 0.weight, 0.bias have no gradient", rows[RANKS].culprit)
