"""What a step leaves out because nobody needs it, and that nobody who needs it goes without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pytorch_accelerated.huggingface import Trainer, TrainerCallback, TrainingArguments
from pytorch_accelerated.huggingface.engine.training import Training
from tests.huggingface.runs import Regression, Rows, make_trainer


class CountingNorms(TorchFunctionMode):
    """Counts how often gradients are measured; what is put together from numbers does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.norms += getattr(function, "__name__", "") == "_foreach_norm" and all(tensor.dim() for tensor in args[0])
        return function(*args, **(kwargs or {}))


def entries_by_step(trainer: Any) -> dict[int, dict[str, Any]]:
    return {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}


@pytest.mark.parametrize(
    ("arguments", "steps_logged", "norms"),
    [
        ({"logging_steps": 3}, [3, 6, 9], 3),
        ({"logging_steps": 4, "logging_first_step": True}, [1, 4, 8], 3),
        ({"logging_strategy": "epoch"}, [5, 10], 10),  # which update is an epoch's last one is not known before
        ({"logging_strategy": "no"}, [], 0),
        ({"logging_strategy": "no", "logging_first_step": True}, [1], 1),
    ],
)
def test_the_norm_is_computed_if_it_may_be_logged(
    arguments: dict[str, Any], steps_logged: list[int], norms: int, tmp_path: Path
) -> None:
    everywhere = make_trainer(tmp_path, logging_steps=1, max_grad_norm=0)
    everywhere.train()
    trainer = make_trainer(tmp_path, max_grad_norm=0, **arguments)
    with CountingNorms() as counting:
        trainer.train()
    entries, expected = entries_by_step(trainer), entries_by_step(everywhere)
    assert list(entries) == steps_logged
    assert all(entries[step]["grad_norm"] == expected[step]["grad_norm"] for step in steps_logged)
    assert counting.norms == norms


def test_custom_callbacks_may_request_a_log_at_any_step(tmp_path: Path) -> None:
    class Asking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_log = state.global_step == 2

    trainer = make_trainer(tmp_path, Asking(), max_grad_norm=0, logging_strategy="no")
    trainer.train()
    everywhere = make_trainer(tmp_path, logging_steps=1, max_grad_norm=0)
    everywhere.train()
    assert list(entries_by_step(trainer)) == [2]
    assert entries_by_step(trainer)[2]["grad_norm"] == entries_by_step(everywhere)[2]["grad_norm"]


def test_overridden_methods_may_request_a_log(tmp_path: Path) -> None:
    class AskingTrainer(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.control.should_log = self.state.global_step == 2
            return super().training_step(*args, **kwargs)

    args = TrainingArguments(
        str(tmp_path), max_grad_norm=0, logging_strategy="no", save_strategy="no", disable_tqdm=True
    )
    trainer = AskingTrainer(Regression(), args, train_dataset=Rows(40))
    trainer.train()
    assert list(entries_by_step(trainer)) == [3]
    assert entries_by_step(trainer)[3]["grad_norm"] > 0


def test_an_unexpected_log_has_no_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_step = Training.end_step

    def late(training: Training) -> None:
        """As if a signal's handler requested a log, between the update and its end."""
        trainer.control.should_log = trainer.state.global_step == 2
        end_step(training)

    monkeypatch.setattr(Training, "end_step", late)
    args = TrainingArguments(
        str(tmp_path), max_grad_norm=0, logging_strategy="no", save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(Regression(), args, train_dataset=Rows(40))
    trainer.train()
    (entry,) = entries_by_step(trainer).values()
    assert set(entry) == {"loss", "learning_rate", "epoch", "step"}


def test_callbacks_may_be_exchanged_within_an_update(tmp_path: Path) -> None:
    class Late(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.steps.append(state.global_step)

    late = Late()

    class Exchanging(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step == 3:  # the fourth is at work
                trainer.callback_handler.callbacks.append(late)
            if state.global_step == 6:
                trainer.remove_callback(late)

    trainer = make_trainer(tmp_path, Exchanging())
    trainer.train()
    assert late.steps == [4, 5, 6]


def test_a_method_that_is_exchanged_counts_from_the_next_epoch_on(tmp_path: Path) -> None:
    seen: list[int] = []

    class Exchanging(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            vars(self)["on_step_begin"] = note

    def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seen.append(state.global_step)

    make_trainer(tmp_path, Exchanging()).train()
    assert seen == [5, 6, 7, 8, 9]
