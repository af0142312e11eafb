"""Subclasses with a loop of their own over the epochs, or over the passes of an epoch."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from tests.support.reference import assert_same_parameters, regression_data, sgd, tiny_model

DATA = regression_data(11)
ARGUMENTS: dict[str, Any] = {
    "per_device_batch_size": 2,
    "create_scheduler_fn": partial(torch.optim.lr_scheduler.StepLR, step_size=4),
}


class OwnLoop(Trainer):
    """Calls the parts of a run itself, as subclasses of earlier versions do."""

    counts_epochs = True

    def _run_training(self) -> None:
        self.training_run_start()
        self.callback_handler.call_event("on_training_run_start", self)
        for _ in range(self.run_config.num_epochs or 0):
            self._run_train_epoch(self._train_dataloader)
            self._run_eval_epoch(self._eval_dataloader)
            if self.counts_epochs:
                self.run_history._increment_epoch()
        self.callback_handler.call_event("on_training_run_end", self)


class Positions(TrainerCallback):
    """Collects the rows of each pass, and what the trainer knows about its position."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []
        self.epochs: list[tuple[int, bool]] = []

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        assert trainer.run_state.updates_in_epoch == trainer.run_state.samples_in_epoch == 0
        self.rows.append([])
        self.epochs.append((trainer.run_state.epochs, trainer.is_last_epoch))

    def on_train_step_end(self, trainer: Trainer, batch: Any, **kwargs: Any) -> None:
        self.rows[-1].extend(batch[0][:, 0].tolist())


def trained(kind: type[Trainer], num_epochs: int = 3, **kwargs: Any) -> tuple[Trainer, Positions]:
    model, positions = tiny_model(), Positions()
    trainer = kind(model, nn.MSELoss(), sgd(model), callbacks=[positions], seed=3)
    trainer.train(DATA, num_epochs, DATA, **ARGUMENTS, **kwargs)
    return trainer, positions


def assert_same_run(one: Trainer, other: Trainer) -> None:
    assert_same_parameters(one.model, other.model, tolerance=0)
    assert one.run_history.get_metric_names() == other.run_history.get_metric_names()
    for name in one.run_history.get_metric_names():
        assert one.run_history.get_metric_values(name) == other.run_history.get_metric_values(name)
    assert one.scheduler.state_dict() == other.scheduler.state_dict()
    assert one.run_state.updates == other.run_state.updates


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_own_loop_over_the_epochs_trains_as_the_usual_one(accumulation: int):
    usual, expected = trained(Trainer, gradient_accumulation_steps=accumulation)
    own, positions = trained(OwnLoop, gradient_accumulation_steps=accumulation)
    assert_same_run(own, usual)
    assert positions.rows == expected.rows
    assert positions.epochs == expected.epochs == [(0, False), (1, False), (2, True)]
    assert own.run_history.current_epoch == usual.run_history.current_epoch == 4


def test_an_own_loop_that_counts_no_epochs_has_another_order_of_samples_in_each_pass():
    class CountsNothing(OwnLoop):
        counts_epochs = False

    _, expected = trained(Trainer)
    own, positions = trained(CountsNothing)
    assert positions.rows == expected.rows
    assert own.run_history.current_epoch == 1


class TwoPasses(Trainer):
    """Trains twice in an epoch."""

    def _run_train_epoch(self, train_dl: Any) -> None:
        super()._run_train_epoch(train_dl)
        super()._run_train_epoch(train_dl)


def test_a_second_pass_within_an_epoch_trains_too():
    trainer, positions = trained(TwoPasses, 2)
    assert trainer.run_state.epochs == 2
    assert trainer.run_state.updates == 4 * 6
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 4
    assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == 2
    assert len({tuple(rows) for rows in positions.rows}) == 4
    assert {tuple(sorted(rows)) for rows in positions.rows} == {tuple(sorted(DATA[0][:, 0].tolist()))}


def test_an_own_loop_saves_between_updates_and_continues_with_what_is_left(tmp_path: Path):
    """Also right after the last update of an epoch: the next pass is that of the next epoch."""

    class Saves(TrainerCallback):
        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.save_training_state(tmp_path / str(trainer.run_state.updates))

    class Continues(OwnLoop):
        def _run_training(self) -> None:
            for _ in range(self.run_state.epochs, 3):
                self._run_train_epoch(self._train_dataloader)
                self._run_eval_epoch(self._eval_dataloader)
                self.run_history._increment_epoch()

    def make(*callbacks: TrainerCallback) -> Trainer:
        model = tiny_model()
        return Continues(model, nn.MSELoss(), sgd(model), callbacks=callbacks, seed=3)

    whole = make(Saves())
    whole.train(DATA, 3, DATA, **ARGUMENTS)
    assert {folder.name for folder in tmp_path.iterdir()} == {str(number) for number in range(1, 19)}
    for updates in (1, 6, 7, 12, 17):
        resumed = make()
        resumed.train(DATA, 3, DATA, resume_from=tmp_path / str(updates), **ARGUMENTS)
        assert_same_run(resumed, whole)
