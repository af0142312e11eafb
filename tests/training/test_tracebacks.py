"""Tracebacks of errors in a user's code show the call of the trainer and the user's frames, not ours."""

import pdb
import traceback
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import pytorch_accelerated
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import MetricsCallback, TrainerCallback
from pytorch_accelerated.errors import ConfigurationError
from tests.support.reference import regression_data

OURS = str(Path(pytorch_accelerated.__file__).parent)


class Broken(nn.Module):
    """Fails in its own code, or in torch's below it."""

    def __init__(self, *, in_torch: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.in_torch = in_torch

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs[:, :2]
        return self.use(hidden)

    def use(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.in_torch:
            return self.layer(hidden)
        raise ZeroDivisionError("mine")


class BrokenData(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        row = regression_data(1)[0][0]
        empty: dict[int, Any] = {}
        return row, empty[index]


class BrokenCallback(TrainerCallback):
    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        raise ZeroDivisionError("in a callback")


def trainer_of(model: nn.Module | None = None, *callbacks: TrainerCallback) -> Trainer:
    model = model or nn.Linear(3, 2).double()
    return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=callbacks)


def frames(error: BaseException) -> list[str]:
    """The functions of a traceback from the call of the trainer on; ours with a mark."""
    shown = [
        f"{'ours: ' * each.filename.startswith(OURS)}{each.name}" for each in traceback.extract_tb(error.__traceback__)
    ]
    return shown[1:]


def failing(*arguments: Any, **more: Any) -> Any:
    """The error with which training ends."""
    trainer, data = arguments
    with pytest.raises(Exception) as caught:  # noqa: PT011
        trainer.train(data, 1, regression_data(4), 2, **more)
    return caught.value


def test_the_users_frames_follow_the_call_of_the_trainer() -> None:
    error = failing(trainer_of(Broken(in_torch=False)), regression_data(8))
    assert frames(error) == ["ours: train", "forward", "use"]
    assert "Your code" not in error.__notes__[0]  # the traceback ends with it


def test_if_torch_fails_below_the_users_frame_the_note_ends_with_that_frame() -> None:
    error = failing(trainer_of(Broken(in_torch=True)), regression_data(8))
    assert frames(error)[:3] == ["ours: train", "forward", "use"]
    assert not any(name.startswith("ours") for name in frames(error)[1:])
    last = error.__notes__[0].splitlines()[-1]
    assert last.startswith(f'Your code: File "{__file__}", line ')
    assert last.endswith(", in use: return self.layer(hidden)")


def test_a_debugger_reaches_the_users_frame() -> None:
    error = failing(trainer_of(Broken(in_torch=False)), regression_data(8))
    output = StringIO()
    debugger = pdb.Pdb(stdin=StringIO("p hidden.shape\nup\np inputs.shape\nup\np num_epochs\nq\n"), stdout=output)
    debugger.reset()
    debugger.interaction(None, error.__traceback__)
    assert "torch.Size([2, 2])" in output.getvalue()
    assert "torch.Size([2, 3])" in output.getvalue()
    assert "1" in output.getvalue().splitlines()[-2]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_dataset_says_that_a_batch_was_being_fetched(workers: int) -> None:
    error = failing(trainer_of(), BrokenData(), train_dataloader_kwargs={"num_workers": workers, "shuffle": False})
    assert isinstance(error, KeyError)
    notes = error.__notes__  # type: ignore[attr-defined]
    sample, place = notes if not workers else ("", *notes)
    assert sample == ("" if workers else "Raised for sample 0 of the BrokenData.")
    assert place == "This happened in fetching a batch: epoch 1, after 0 updates of the run."
    assert not any(name.startswith("ours") for name in frames(error)[1:])
    if not workers:
        assert frames(error) == ["ours: train", "__getitem__"]


def test_an_error_of_a_callback_names_callback_and_event() -> None:
    error = failing(trainer_of(None, BrokenCallback()), regression_data(8))
    assert frames(error) == ["ours: train", "on_train_step_end"]
    place = "the callback BrokenCallback, at `on_train_step_end`"
    assert error.__notes__ == [f"This happened in {place}: epoch 1, after 0 updates of the run."]


def test_an_error_of_a_metric_function_shows_the_function() -> None:
    def accuracy(predictions: torch.Tensor, targets: torch.Tensor) -> float:
        raise ZeroDivisionError("in a metric")

    error = failing(trainer_of(None, MetricsCallback({"accuracy": accuracy})), regression_data(8))
    text = "".join(traceback.format_exception(error))
    assert "in accuracy" in text
    assert "MetricsCallback" in text or "accuracy" in str(error)


def test_evaluations_and_predictions_are_folded_too() -> None:
    trainer = trainer_of(Broken(in_torch=False))
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(ZeroDivisionError) as caught:
            call(regression_data(8))
        assert frames(caught.value) == [f"ours: {call.__name__}", "forward", "use"]


def test_our_own_errors_keep_their_frames() -> None:
    with pytest.raises(ConfigurationError) as caught:
        trainer_of().train(regression_data(8), 1, per_device_batch_size=-1)
    assert len(frames(caught.value)) > 1
    assert not getattr(caught.value, "__notes__", [])


def test_a_cause_of_the_users_is_kept() -> None:
    class Chains(Broken):
        def use(self, hidden: torch.Tensor) -> torch.Tensor:
            try:
                return super().use(hidden)
            except ZeroDivisionError as error:
                raise RuntimeError("wrapped") from error

    error = failing(trainer_of(Chains(in_torch=False)), regression_data(8))
    assert frames(error) == ["ours: train", "forward", "use"]
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert [each.name for each in traceback.extract_tb(error.__cause__.__traceback__)] == ["use", "use"]
