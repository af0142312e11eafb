"""Runs on two ranks: cases that need two, and little else."""

import functools
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TerminateOnNaNCallback, TrainerCallback
from pytorch_accelerated.errors import NonFiniteLossError, StopTrainingError
from tests.support.recording import Rates
from tests.support.reference import (
    assert_same_parameters,
    regression_data,
    sgd,
    tiny_model,
    train_reference,
    windows_of_epoch,
)
from tests.training.test_evaluation_sets import (
    check_a_resumed_run_has_no_gap_and_no_double,
    check_each_set_is_measured_as_if_it_were_alone,
)
from tests.training.test_overfit_batches import FIRST_TWO, ROWS, Recording

folder = Path(sys.argv[1])


def trainer_of(*callbacks: Any, base: Any = Trainer) -> Any:
    trainer = base(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=callbacks, seed=5)
    assert trainer._ranks.count == int(os.environ["WORLD_SIZE"]) == 2
    return trainer


RANK = trainer_of()._ranks.index


@contextmanager
def warnings_with(words: str) -> Iterator[list[str]]:
    """The warnings that have these words."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught if words in str(warning.message)]


# ------------------------------------------------ an update that is not finite on one of them is left out on both

SIZE, BAD = 24, (3, 4)


class BadOnOneRank(Trainer):
    """On the second rank alone, in its first batch of an update; the gradients are finite."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        is_first = self.run_state.batches_in_epoch % 2 == 0
        if RANK == 1 and self.run_state.updates in BAD and is_first:
            output["loss"] = output["loss"] + math.inf
        return output


def train(policy: str, states: Path, **arguments: Any) -> Any:
    saver = SaveTrainingStateCallback(states, save_every_n_steps=2)
    trainer = trainer_of(TerminateOnNaNCallback, saver, base=BadOnOneRank)
    arguments |= {"per_device_batch_size": 1, "gradient_accumulation_steps": 2, "nonfinite_policy": policy}
    trainer.train(regression_data(SIZE), 1, **arguments)
    return trainer


windows = [window for index, window in enumerate(windows_of_epoch(SIZE, 4, seed=5, epoch=0)) if index not in BAD]
expected = train_reference(regression_data(SIZE), windows)[0]
for policy in ("skip", "rollback"):
    with warnings_with("cannot be applied") as messages:
        trainer = train(policy, folder / policy)
    assert_same_parameters(trainer.model, expected)
    assert (trainer.run_state.updates, trainer.run_state.skipped_updates) == (6, 2)
    assert math.isfinite(trainer.run_history.get_latest_metric("train_loss_epoch"))
    # Said on one process, with the rank that has it.
    assert len(messages) == (0 if RANK else 2), messages
    assert all("the loss of batch" in message and "on rank 1 is" in message for message in messages)
with warnings_with(""), pytest.raises(NonFiniteLossError, match=r"on rank 1 .* updates 4 to 5 could"):
    train("skip", folder / "limit", max_skipped_updates=1)


# ------------------------------ gradients are exchanged where the model is called as a whole; else the run says so once


class OfParts(Trainer):
    whole = False

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        outputs = (self.model if self.whole else self.get_model())(batch[0])
        return {"loss": nn.functional.mse_loss(outputs, batch[1]), "model_outputs": outputs, "batch_size": len(outputs)}


for whole in (False, True):
    trainer = trainer_of(base=OfParts)
    trainer.whole = whole
    with warnings_with("each process trains a model of its own") as messages:
        trainer.train(regression_data(20), 2, regression_data(6), per_device_batch_size=2)
    sums = trainer.gather(sum(parameter.detach().double().sum() for parameter in trainer.model.parameters()))
    assert bool(sums[0] == sums[1]) == whole
    assert len(messages) == (0 if whole or RANK else 1), messages
    assert not trainer.model._forward_pre_hooks


# -------------------------------------------- the schedule is as long as a run of both that ends within an epoch


one_cycle = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.8)
length: Any = TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
arguments: dict[str, Any] = {"create_scheduler_fn": functools.partial(one_cycle, total_steps=length)}
# 20 rows are five updates of two ranks with two rows each.
trainer_of(rates := Rates()).train(regression_data(20), 1, None, 2, max_num_train_steps=7, **arguments)
alone = sgd(tiny_model())
scheduler = one_cycle(alone, total_steps=7)
expected_rates = []
for _ in range(7):
    expected_rates.append(float(alone.param_groups[0]["lr"]))
    alone.step()
    scheduler.step()
assert rates.used == pytest.approx(expected_rates, rel=1e-12)


# ---------------------------------------------------- if one stops, both stop at the same place and for the same reason


class OneStops(TrainerCallback):
    """The second rank alone, at the n-th time of an event."""

    def __init__(self, event: str, times: int) -> None:
        self.times = times
        self.reasons: list[str] = []
        setattr(self, event, self.act)

    def act(self, trainer: Trainer, **kwargs: Any) -> None:
        self.times -= RANK
        if self.times == 0 and RANK:
            raise StopTrainingError("enough")

    def on_stop_training_error(self, trainer: Trainer, reason: str = "", **kwargs: Any) -> None:
        self.reasons.append(reason)


class BothStop(TrainerCallback):
    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        raise StopTrainingError(f"rank {RANK} has had enough")


def train_two_epochs(*callbacks: Any, **arguments: Any) -> Any:
    trainer = trainer_of(*callbacks)
    trainer.train(regression_data(24), 2, regression_data(9), 2, gradient_accumulation_steps=2, **arguments)
    return trainer


for event, times, updates in (
    ("on_training_run_start", 1, 0),
    ("on_train_step_end", 3, 2),
    ("on_eval_epoch_start", 1, 3),
    ("on_eval_step_end", 1, 3),
):
    trainer = train_two_epochs(stops := OneStops(event, times))
    assert trainer.run_state.updates == updates, (event, trainer.run_state)
    assert stops.reasons == ["enough"]
assert_same_parameters(trainer.model, train_two_epochs(max_num_train_steps=3).model, tolerance=0)
train_two_epochs(BothStop(), stops := OneStops("on_training_run_end", 0))
assert stops.reasons == ["rank 0 has had enough"]


class GivesUp(torch.optim.SGD):
    """Not a hook of the trainer, so nobody expects it to stop anything."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.steps += 1
        if self.steps == 3 and RANK:
            raise StopTrainingError("the optimizer gave up")


trainer = trainer_of()
trainer.optimizer = GivesUp(trainer.model.parameters(), lr=0.01)
trainer.train(regression_data(4000), 50, per_device_batch_size=2)
updates = trainer.run_state.updates
assert trainer._ranks.exchange_numbers([updates]) == [[updates]] * 2
assert 3 <= updates < 50_000, updates  # about a second later

# ------------------------------------------------------------------ `overfit_batches`, and several sets to evaluate on

recording = Recording()
recording.train((ROWS, ROWS), 2, per_device_batch_size=3, overfit_batches=1)
assert recording.trained == recording.evaluated == [FIRST_TWO[RANK]] * 2
check_each_set_is_measured_as_if_it_were_alone(folder)
for intermediate in (False, True):
    check_a_resumed_run_has_no_gap_and_no_double("clean", folder / f"{intermediate}", intermediate=intermediate)
