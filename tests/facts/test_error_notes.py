"""Errors in a user's forward, loss or optimizer step tell where in the run they happened, with which batch, and why."""

import contextlib
import traceback
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.facts import error_notes
from tests.support.reference import regression_data, sgd, tiny_model

INPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(12) % 2
IN_ORDER = {"shuffle": False}


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def note_of(run: Any, error: type[Exception] = Exception, match: str = "") -> str:
    """The one note of the error that `run` ends with."""
    with pytest.raises(error) as caught:
        run()
    assert match in str(caught.value)
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    return str(note)


def trainer_of(model: nn.Module, loss_func: Any, base: type[Trainer] = Trainer, **more: Any) -> Trainer:
    return base(model, loss_func, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=(), **more)


def test_the_note_of_a_training_batch_tells_where_in_the_run_it_was_and_what_was_in_it() -> None:
    labels = CLASSES.clone()
    labels[7] = 2
    trainer = trainer_of(classifier(), nn.CrossEntropyLoss())
    arguments: dict[str, Any] = {"gradient_accumulation_steps": 2, "train_dataloader_kwargs": IN_ORDER}
    note = note_of(lambda: trainer.train((INPUTS, labels), 2, None, 2, **arguments), IndexError, "is out of bounds.")
    assert note.splitlines() == [
        "This happened in the forward pass or the loss of training: epoch 1, update 2 of the run, batch 4 "
        "of the epoch.",
        "The usual cause: A label is out of range: class labels go from 0 to the number of outputs minus 1. On a GPU "
        "it may also be an input of an embedding.",
        "The batch: list of 2 with (float32 [2, 3] on cpu; int64 [2] on cpu, values from 0 to 2).",
    ]


def test_evaluations_and_predictions_tell_which_samples() -> None:
    labels = CLASSES.clone()
    labels[7] = 2
    trainer = trainer_of(classifier(), nn.CrossEntropyLoss())
    held_out = (INPUTS, labels)
    expected = "the forward pass or the loss of an evaluation: epoch 1, after {} updates of the run, the batch that "
    expected += "begins with row 6 (from 0)."
    note = note_of(lambda: trainer.evaluate(held_out, 2), IndexError)
    assert note.splitlines()[0] == f"This happened in {expected.format(0)}"
    note = note_of(lambda: trainer.train((INPUTS, CLASSES), 2, held_out, 4, eval_per_device_batch_size=2), IndexError)
    assert note.splitlines()[0] == f"This happened in {expected.format(3)}"

    class FailsLate(nn.Linear):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(inputs if self.calls < 3 else inputs[:, :2])

    trainer = trainer_of(FailsLate(3, 2), None)
    note = note_of(lambda: trainer.predict(INPUTS, 5), RuntimeError, "shapes cannot be multiplied")
    assert "the forward pass of a prediction or evaluation: epoch 1, after 0 updates of the run, the batch" in note
    assert "begins with row 10 (from 0)" in note
    assert "float32 [2, 3] on cpu" in note


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ZeroDivisionError("in backward")


class BadStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ZeroDivisionError("in the step")


def test_the_backward_pass_and_the_step_of_the_optimizer_are_distinguished() -> None:
    def loss_func(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return FailsInBackward.apply(F.mse_loss(outputs, targets))  # type: ignore[no-untyped-call]

    data = regression_data(6)
    note = note_of(lambda: trainer_of(tiny_model(), loss_func).train(data, 1, None, 2), ZeroDivisionError)
    assert note.startswith("This happened in the backward pass: epoch 1, update 1 of the run, batch 1 of the epoch")
    trainer = Trainer(model := tiny_model(), nn.MSELoss(), BadStep(model.parameters(), lr=0.1), callbacks=())
    note = note_of(
        lambda: trainer.train(data, 1, None, 2, gradient_accumulation_steps=3), ZeroDivisionError, "in the step"
    )
    assert note.startswith("This happened in the optimizer's step: epoch 1, update 1 of the run, batch 3 of the epoch")
    assert "float64 [2, 3] on cpu" in note


CROSS_ENTROPY = nn.CrossEntropyLoss()
DATA = (INPUTS, CLASSES)
Case = tuple[Any, Any, Any, str]
CAUSES: dict[str, Case] = {
    "labels from 1": (classifier, CROSS_ENTROPY, (INPUTS, CLASSES + 1), "A label is out of range"),
    "labels as floats": (classifier, CROSS_ENTROPY, (INPUTS, CLASSES.float()), "must be int64"),
    "labels as int32": (classifier, CROSS_ENTROPY, (INPUTS, CLASSES.int()), "must be int64"),
    "whole numbers for BCE": (classifier, nn.BCEWithLogitsLoss(), (INPUTS, F.one_hot(CLASSES)), "floating-point"),
    "a column of labels": (classifier, CROSS_ENTROPY, (INPUTS, CLASSES[:, None]), "`labels.squeeze(1)` of a column"),
    "one-hot labels": (classifier, CROSS_ENTROPY, (INPUTS, F.one_hot(CLASSES)), "`labels.argmax(1)` of one-hot rows"),
    "no column for BCE": (classifier, nn.BCEWithLogitsLoss(), DATA, "`targets.float().unsqueeze(1)`"),
    "scores for BCELoss": (classifier, nn.BCELoss(), (INPUTS, F.one_hot(CLASSES).float()), "`nn.BCEWithLogitsLoss()`"),
    "bytes for a linear layer": (classifier, CROSS_ENTROPY, (INPUTS.byte(), CLASSES), "with `.float()`, pictures"),
    "bytes for a convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()),
        CROSS_ENTROPY,
        (torch.ones(4, 1, 3, 3).byte(), CLASSES[:4]),
        "pictures with `.float() / 255`",
    ),
    "outputs of a recurrent layer": (lambda: nn.GRU(3, 2), CROSS_ENTROPY, DATA, "The model returns a tuple"),
    "a batch norm and one row": (
        lambda: nn.Sequential(classifier(), nn.BatchNorm1d(2)),
        CROSS_ENTROPY,
        (INPUTS[:1], CLASSES[:1]),
        "'drop_last': True",
    ),
    "float64 of NumPy": (classifier, CROSS_ENTROPY, (INPUTS.numpy().astype("float64"), CLASSES), "float64"),
    "float64 images": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()),
        CROSS_ENTROPY,
        (torch.ones(4, 1, 3, 3).double(), CLASSES[:4]),
        "A tensor is float64",
    ),
    "a constant on another device": (
        classifier,
        lambda outputs, targets: F.cross_entropy(outputs + torch.ones(2, device="meta"), targets),
        DATA,
        "A tensor is on another device",
    ),
    "labels as text": (classifier, CROSS_ENTROPY, [(row, "cat") for row in INPUTS], "because its rows are text"),
    "backward in the loss": (
        classifier,
        lambda outputs, targets: (loss := F.cross_entropy(outputs, targets), loss.backward())[0],
        DATA,
        "calls `backward()` itself",
    ),
    "a frozen model": (lambda: classifier().requires_grad_(False), CROSS_ENTROPY, DATA, "have `requires_grad=True`"),
    "no tensor": (classifier, lambda *args: F.cross_entropy(*args).item(), DATA, "without `.item()`"),
    "no room": (
        classifier,
        lambda outputs, _: outputs.sum() + torch.empty(10**15).sum(),
        DATA,
        "twice the `gradient_accumulation_steps`",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_common_mistakes_are_explained(name: str) -> None:
    make, loss_func, data, cause = CAUSES[name]
    note = note_of(lambda: trainer_of(make(), loss_func).train(data, 1, None, 4))
    assert cause in next(line for line in note.splitlines() if line.startswith("The usual cause")), note


@pytest.mark.parametrize("evaluates", [lambda trainer, data: trainer.evaluate(data), Trainer.predict])
def test_a_gradient_in_an_evaluation_names_the_evaluation_and_how_to_have_one(evaluates: Any) -> None:
    class Physical(nn.Module):
        def forward(self, inputs: torch.Tensor) -> Any:
            with torch.enable_grad() if self.allows else contextlib.nullcontext():
                inputs = inputs.detach().requires_grad_()
                return torch.autograd.grad(inputs.square().sum(), inputs)[0]

        allows = False

    model, data = Physical(), regression_data(4)[:1]
    trainer = Trainer(model, lambda *_: torch.zeros(()), None, callbacks=())  # type: ignore[arg-type]
    note = note_of(lambda: evaluates(trainer, (*data, *data)), RuntimeError)
    assert "of an evaluation" in note.splitlines()[0] or "prediction" in note.splitlines()[0]
    assert "The usual cause: Evaluations and predictions compute no gradients." in note
    assert "torch.enable_grad()" in note
    model.allows = True
    evaluates(trainer, (*data, *data))


def test_an_optimizer_with_a_closure_says_how() -> None:
    trainer = Trainer(model := tiny_model(), nn.MSELoss(), torch.optim.LBFGS(model.parameters()), callbacks=())
    note = note_of(lambda: trainer.train(regression_data(4), 1), TypeError)
    assert note.startswith("This happened in the optimizer's step")
    assert "`self.optimizer.step(closure)`" in note


class FailsInACallback(TrainerCallback):
    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        raise ZeroDivisionError("mine")


class FailsInADataset(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise ZeroDivisionError("mine")


def fails_in_a_loss(outputs: Any, targets: Any) -> Any:
    raise ZeroDivisionError("mine")


@pytest.mark.parametrize("broken", [FailsInACallback(), FailsInADataset(), fails_in_a_loss])
def test_an_error_of_a_user_has_its_own_traceback_and_a_note_of_the_place_without_a_cause(broken: Any) -> None:
    is_loss, is_callback = broken is fails_in_a_loss, isinstance(broken, TrainerCallback)
    loss_func = fails_in_a_loss if is_loss else nn.MSELoss()
    trainer = Trainer(model := tiny_model(), loss_func, sgd(model), callbacks=[broken] if is_callback else ())
    data = broken if isinstance(broken, Dataset) else regression_data(4)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        trainer.train(data, 1, train_dataloader_kwargs={"num_workers": 0})
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "train" in names[:3]
    assert names[-1] in ("on_train_step_end", "__getitem__", "fails_in_a_loss")
    *_, note = caught.value.__notes__  # type: ignore[attr-defined]
    if is_loss:
        assert len(note.splitlines()) == 2
    else:
        assert note == "This happened in epoch 1, after 0 updates of the run."


def test_an_error_of_ours_keeps_its_words_and_is_not_explained_twice() -> None:
    trainer = trainer_of(tiny_model(), None)
    note = note_of(lambda: trainer.train(regression_data(4), 1), DataError, "The trainer has no loss function")
    assert note.startswith("This happened in the forward pass")
    assert "The usual cause" not in note


class Odd:
    """Neither a tensor nor a container."""


def test_batches_of_all_kinds_are_described() -> None:
    many = {f"column {number}": torch.ones(2) for number in range(20)}
    text = error_notes.described([many, (Odd(), "text", None), torch.ones(2).bool(), [[[torch.ones(1)]]]])
    assert text.startswith("list of 4 with (dict with ('column 0': float32 [2] on cpu;")
    assert "and 12 more" in text
    assert "tuple of 3 with (Odd; str; NoneType)" in text
    assert "bool [2] on cpu;" in text
    assert error_notes.described(torch.ones(2, dtype=torch.int64, device="meta")) == "int64 [2] on meta"
    assert error_notes.described(INPUTS.numpy()) == "ndarray of float32 [12, 3]"


def test_where_python_shows_no_notes_they_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(error_notes, "sys", types.SimpleNamespace(version_info=(3, 10)))
    note = note_of(lambda: trainer_of(classifier(), nn.CrossEntropyLoss()).train((INPUTS, CLASSES + 1), 1), IndexError)
    (record,) = caplog.records
    assert record.getMessage() == f"IndexError: Target 2 is out of bounds.\n{note}"


def test_the_note_tells_which_rank_it_was() -> None:
    error = ValueError("no")
    for rank in (1, 0):  # only the first note stays
        error_notes.note_failure(error, hook="backward_step", batch=INPUTS, position="epoch 1", rank=rank, ranks=2)
    (note,) = error.__notes__  # type: ignore[attr-defined]
    assert note.startswith("This happened in the backward pass on rank 1 of 2: epoch 1.")
