"""An update that is not finite leaves no trace: the run is the one that never saw it."""

import functools
import math
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    ModelEmaCallback,
    SaveTrainingStateCallback,
    TerminateOnNaNCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import NonFiniteLossError, StopTrainingError
from pytorch_accelerated.utils import ModelEma
from tests.support.histories import state_without_times
from tests.support.reference import regression_data, windows_of_epoch
from tests.support.resuming import assert_same
from tests.support.states import list_states

SEED = 3
SIZE, BATCH_SIZE, EPOCHS, DECAY = 24, 2, 2, 0.8
BATCHES = SIZE // BATCH_SIZE
DATA = regression_data(SIZE)
PLACES = ("nan in the loss", "inf in the loss", "one gradient", "an input")


class FaultyTrainer(Trainer):
    """A trainer whose batches with the numbers in `faults`, counted through the run from 0, fail at `place`.

    Attributes:
        seen: the first input of each computed batch.
    """

    faults: Collection[int] = ()
    place = PLACES[0]

    def training_run_start(self) -> None:
        self.seen: list[float] = []
        if self.run_state.updates == 0:
            torch.manual_seed(7)  # for dropout

    @property
    def is_faulty(self) -> bool:
        return self.run_state.epochs * BATCHES + self.run_state.batches_in_epoch in self.faults

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.seen.append(batch[0][0, 0].item())
        if self.is_faulty and self.place == "an input":
            inputs = batch[0].clone()
            inputs[0, 1] = math.nan
            batch = (inputs, batch[1])
        output = super().calculate_train_batch_loss(batch)
        if self.is_faulty and self.place == "nan in the loss":
            output["loss"] = output["loss"] * math.nan
        if self.is_faulty and self.place == "inf in the loss":
            output["loss"] = output["loss"] + math.inf  # its gradients are finite
        return output

    def backward_step(self, loss: torch.Tensor) -> None:
        super().backward_step(loss)
        if self.is_faulty and self.place == "one gradient":
            self.get_model()[-1].weight.grad[0, 0] = math.nan


def noisy_model(*, dropout: float) -> nn.Module:
    """A model with every kind of layer in which a batch leaves traces."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(dropout), nn.Tanh(), nn.Linear(4, 2))
        return nn.Sequential(*layers).double()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


schedule = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.95)


def train_without(
    updates: Collection[int], *, accumulation: int, dropout: float, stop_before: int = 99
) -> dict[str, Any]:
    """The result of a plain loop that leaves out `updates`, counted from 0."""
    model = noisy_model(dropout=dropout)
    optimizer = momentum(model)
    scheduler = schedule(optimizer)
    average = ModelEma(model, decay=DECAY)
    losses: list[list[float]] = []
    torch.manual_seed(7)
    number = 0
    for epoch in range(EPOCHS):
        losses.append([])
        for window in windows_of_epoch(SIZE, BATCH_SIZE * accumulation, seed=SEED, epoch=epoch):
            number += 1
            if number - 1 in updates or number > stop_before:
                continue
            for rows in window.split(BATCH_SIZE):
                loss = nn.functional.mse_loss(model(DATA[0][rows]), DATA[1][rows])
                losses[-1].append(loss.item())
                (loss if accumulation == 1 else loss * (len(rows) / len(window))).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.update(model)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "average": average.module.state_dict(),
        "losses": losses,
    }


NOT_APPLIED = "cannot be applied"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(
    *callbacks: Any, faults: Any = (), place: str = PLACES[0], dropout: float = 0.0, base: Any = FaultyTrainer
) -> Any:
    model = noisy_model(dropout=dropout)
    average = ModelEmaCallback(decay=DECAY, evaluate_during_training=False)
    callbacks = (TerminateOnNaNCallback, average, *callbacks)
    trainer = base(model, nn.MSELoss(), momentum(model), callbacks=callbacks, seed=SEED)
    trainer.faults, trainer.place, trainer.average = faults, place, average
    return trainer


def train(trainer: Any, policy: str | None, *, accumulation: int = 1, **arguments: Any) -> Any:
    return trainer.train(
        DATA,
        EPOCHS,
        per_device_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=accumulation,
        create_scheduler_fn=schedule,
        nonfinite_policy=policy,
        **arguments,
    )


def assert_is(trainer: Any, expected: dict[str, Any]) -> None:
    """Weights, buffers, optimizer, scheduler and average, to the bit."""
    assert_same(dict(trainer.model.state_dict()), dict(expected["model"]), "model")
    assert_same(trainer.optimizer.state_dict(), expected["optimizer"], "optimizer")
    assert_same(trainer.scheduler.state_dict(), expected["scheduler"], "scheduler")
    assert_same(dict(trainer.average.ema_model.module.state_dict()), dict(expected["average"]), "average")


class Losses(TrainerCallback):
    """The losses of batches as callbacks see them, and the moments of updates."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.losses: list[list[float]] = []

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.losses.append([])

    def on_train_step_end(self, trainer: Trainer, batch_output: Any, **kwargs: Any) -> None:
        self.losses[-1].append(batch_output["loss"].item())

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.events.append("start")

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        self.events.append("end")


# Skipping


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_a_skipped_update_leaves_everything_as_it_was_and_finite_losses_count(place: str, accumulation: int):
    trainer = make(events := Losses(), faults=[7], place=place)  # with accumulation the middle one of its update
    bad_update = 7 // accumulation
    with pytest.warns(UserWarning, match=NOT_APPLIED) as caught:
        history = train(trainer, "skip", accumulation=accumulation)
    (warning,) = caught
    batches = "batch 7" if accumulation == 1 else "batches 6 to 8"
    message = str(warning.message)
    assert f"In epoch 1, update {bad_update + 1} of the run ({batches} of the epoch" in message
    assert ("the loss of batch 7 is" in message) == (place != "one gradient")
    assert ("the gradient of '4.weight'." in message) == (place == "one gradient")
    assert warning.filename == __file__
    assert_is(trainer, train_without([bad_update], accumulation=accumulation, dropout=0.0))
    assert trainer.run_state.skipped_updates == 1
    assert trainer.run_state.updates == 24 // accumulation
    assert history.get_metric_values("skipped_updates") == [1, 1]
    assert events.events == ["start", "end"] * trainer.run_state.updates
    finite = [list(filter(math.isfinite, losses)) for losses in events.losses]
    assert [len(losses) for losses in finite] == [12 if place == "one gradient" else 11, 12]
    means = [sum(losses) / len(losses) for losses in finite]
    assert history.get_metric_values("train_loss_epoch") == pytest.approx(means, rel=1e-14)


def test_without_a_bad_update_a_run_is_the_loop_written_by_hand_and_the_policy_changes_nothing():
    plain, guarded = make(dropout=0.3), make(dropout=0.3)
    expected, found = train(plain, None), train(guarded, "skip", max_skipped_updates=1)
    for trainer in (plain, guarded):
        assert_is(trainer, train_without([], accumulation=1, dropout=0.3))
    assert state_without_times(found) == state_without_times(expected)
    assert "skipped_updates" not in found.get_metric_names()


def test_clipping_sees_finite_gradients_only():
    trainer = make(faults=[7], place="one gradient")
    with pytest.warns(UserWarning, match=NOT_APPLIED):
        history = train(trainer, "skip", gradient_clip_norm=0.5)
    assert all(map(math.isfinite, history.get_metric_values("gradient_norm")))


class CountedLate(FaultyTrainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        return {**output, "num_items_in_batch": torch.tensor(float(len(batch[0])))}


def test_items_that_are_counted_late_are_forgotten_with_their_update():
    trainer, expected = make(faults=[7], base=CountedLate), train_without([2], accumulation=3, dropout=0.0)
    with pytest.warns(UserWarning, match=NOT_APPLIED):
        train(trainer, "skip", accumulation=3)
    for name, tensor in expected["model"].items():
        torch.testing.assert_close(trainer.model.state_dict()[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_too_many_in_a_row_end_the_run_with_the_last_good_weights(policy: str, folder: Path):
    trainer = make(SaveTrainingStateCallback("states", save_every_n_steps=2), faults=range(5, 24))
    with (
        pytest.warns(UserWarning, match=NOT_APPLIED) as caught,
        pytest.raises(
            NonFiniteLossError, match=r"the updates 6 to 8 could.*max_skipped_updates` \(2\).*after update 5\."
        ),
    ):
        train(trainer, policy, max_skipped_updates=2)
    assert len(caught) == 2
    assert_is_model_after(trainer, 5)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not (folder / "states" / "final").exists()


def assert_is_model_after(trainer: Any, updates: int) -> None:
    expected = train_without([], accumulation=1, dropout=0.0, stop_before=updates)
    assert_same(dict(trainer.model.state_dict()), dict(expected["model"]))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_bad_updates_that_are_not_in_a_row_may_be_many(policy: str):
    faults = [3, 5, 7, 12, 14, 23]
    trainer = make(SaveTrainingStateCallback("states", save_every_n_steps=2), faults=faults)
    with pytest.warns(UserWarning, match=NOT_APPLIED) as caught:
        history = train(trainer, policy, max_skipped_updates=1)
    assert len(caught) == len(faults)
    assert_is(trainer, train_without(faults, accumulation=1, dropout=0.0))
    assert history.get_metric_values("skipped_updates") == [3, 6]


def test_an_epoch_without_any_finite_loss_has_none():
    trainer = make(faults=range(12))
    with pytest.warns(UserWarning, match=NOT_APPLIED):
        first, second = train(trainer, "skip", max_skipped_updates=12).get_metric_values("train_loss_epoch")
    assert math.isnan(first)
    assert math.isfinite(second)
    trainer = make(SaveTrainingStateCallback("states", save_every_n_epochs=1), faults=range(12, 24))
    with pytest.warns(UserWarning, match="goes back to"):
        first, second = train(trainer, "rollback", max_skipped_updates=12).get_metric_values("train_loss_epoch")
    assert math.isfinite(first)
    assert math.isnan(second)  # its updates were passed over, and 0 would be the best loss


def test_an_evaluation_that_is_not_finite_ends_the_run_all_the_same():
    class BadEvaluation(FaultyTrainer):
        def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
            return {**super().calculate_eval_batch_loss(batch), "loss": torch.tensor(math.nan)}

    with pytest.raises(NonFiniteLossError, match="eval_loss_epoch"):
        train(make(base=BadEvaluation), "skip", eval_dataset=DATA)


def test_a_stop_inside_a_skipped_update_is_heard():
    def stop(trainer: Any, batch_output: Any, **kwargs: Any) -> None:
        if trainer.is_faulty:
            raise StopTrainingError("enough")

    trainer = make(callback := Losses(), faults=[7])
    callback.on_train_step_end = stop  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=NOT_APPLIED):
        train(trainer, "skip")
    assert (trainer.run_state.updates, trainer.run_state.skipped_updates) == (8, 1)
    assert_is_model_after(trainer, 7)


def test_sparse_gradients_are_checked_too():
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True).double()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.table((inputs[:, 0] > 0).long())  # type: ignore[no-any-return]

    class Spoils(Trainer):
        def backward_step(self, loss: torch.Tensor) -> None:
            super().backward_step(loss)
            self.model.table.weight.grad._values()[0, 0] = math.inf

    model = Embeds()
    before = model.table.weight.detach().clone()
    trainer = Spoils(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    with pytest.warns(UserWarning, match="'table.weight'"):
        trainer.train(DATA, 1, per_device_batch_size=8, nonfinite_policy="skip")
    assert trainer.run_state.skipped_updates == 3
    assert torch.equal(model.table.weight, before)


# Rolling back


@pytest.fixture
def saving() -> Iterator[SaveTrainingStateCallback]:
    return SaveTrainingStateCallback("states", save_every_n_steps=2, save_at_end=False)  # type: ignore[return-value]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_went_back_is_the_one_that_never_saw_the_update(place: str, accumulation: int, saving: Any):
    trainer = make(saving, faults=[10], place=place, dropout=0.3)
    bad_update = 10 // accumulation
    with pytest.warns(UserWarning, match=f"{NOT_APPLIED}.*goes back to .*step_{bad_update // 2 * 2},"):
        history = train(trainer, "rollback", accumulation=accumulation, record_every_n_steps=3)
    of_epoch = 12 // accumulation  # updates; records go back with the run, also within one
    ends = [*range(3, of_epoch, 3), of_epoch]
    records = history.step_records
    assert [record.update for record in records] == [*ends, *(of_epoch + end for end in ends)]
    assert all(record.samples == 2 * accumulation * record.update for record in records)
    expected = train_without([bad_update], accumulation=accumulation, dropout=0.3)
    assert_is(trainer, expected)
    means = [sum(losses) / len(losses) for losses in expected["losses"]]
    assert history.get_metric_values("train_loss_epoch") == pytest.approx(means, rel=1e-14)
    assert trainer.run_state.skipped_updates == 1
    assert trainer.run_state.updates == 24 // accumulation
    assert history.get_metric_values("skipped_updates") == [1, 1]


@pytest.mark.parametrize("background", [False, True])
def test_the_run_resumes_with_the_sample_right_after_the_state(background: bool):
    whole = make()
    train(whole, None)
    saving = SaveTrainingStateCallback("states", save_every_n_steps=5, save_at_end=False, background=background)
    trainer = make(saving, faults=[7])
    with pytest.warns(UserWarning, match="step_5"):
        train(trainer, "rollback")
    repeat = whole.seen[7]  # to find the module whose outputs were the first to be so
    assert trainer.seen == [*whole.seen[:8], repeat, *whole.seen[5:7], *whole.seen[8:]]


@pytest.mark.parametrize(
    ("every", "fault", "words"),
    [
        (9, 12, "goes back to .*step_9,"),  # over the border of an epoch
        (9, 13, "goes back to .*step_9,"),
        (5, 3, "no training state of this run to go back to"),  # so the update is skipped
        (20, 9, "no training state of this run to go back to"),
    ],
)
def test_the_run_goes_back_to_its_own_newest_state_if_there_is_one(every: int, fault: int, words: str, saving: Any):
    train(make(saving), None)  # another run in the same folder, whose states are left alone
    trainer = make(SaveTrainingStateCallback("states", save_every_n_steps=every, save_at_end=False), faults=[fault])
    with pytest.warns(UserWarning, match=words):
        history = train(trainer, "rollback", eval_dataset=DATA)
    assert_is(trainer, train_without([fault], accumulation=1, dropout=0.0))
    assert len(history.get_metric_values("train_loss_epoch")) == len(history.get_metric_values("eval_loss_epoch")) == 2


def test_a_resumed_run_goes_back_to_the_state_that_it_was_resumed_from(saving: Any, folder: Path):
    train(make(saving, dropout=0.3), None)
    for state, manifest in list_states(folder / "states"):
        if manifest.facts["updates"] != 4:
            shutil.rmtree(state)
    trainer = make(SaveTrainingStateCallback("others", save_every_n_steps=20), faults=[9], dropout=0.3)
    with pytest.warns(UserWarning, match="step_4"):
        train(trainer, "rollback", resume_from="states")
    assert_is(trainer, train_without([9], accumulation=1, dropout=0.3))


def test_a_damaged_state_is_passed_by(saving: Any, folder: Path):
    class Damages(TrainerCallback):
        def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
            file = folder / "states" / "step_6" / "model.safetensors"
            if trainer.run_state.updates == 7 and file.exists():
                file.write_bytes(file.read_bytes()[:-1])

    trainer = make(saving, Damages(), faults=[7], dropout=0.3)
    with pytest.warns(UserWarning, match="step_4"):
        train(trainer, "rollback")
    assert_is(trainer, train_without([7], accumulation=1, dropout=0.3))


def test_requests_made_within_the_update_are_forgotten(saving: Any, folder: Path):
    class Asks(TrainerCallback):
        def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
            if trainer.is_faulty:
                trainer.request_evaluation()
                trainer.save_training_state(folder / "bad")

    with pytest.warns(UserWarning, match="step_6"):
        history = train(make(saving, Asks(), faults=[7]), "rollback", eval_dataset=DATA)
    assert not (folder / "bad").exists()
    assert "intermediate_eval_loss" not in history.get_metric_names()


def test_workers_begin_again_where_the_state_is(saving: Any):
    trainer = make(saving, faults=[7], dropout=0.3)
    with pytest.warns(UserWarning, match="step_6"):
        trainer.train(
            list(zip(*DATA, strict=True)),
            EPOCHS,
            per_device_batch_size=BATCH_SIZE,
            create_scheduler_fn=schedule,
            train_dataloader_kwargs={"num_workers": 2},
            nonfinite_policy="rollback",
        )
    assert_is(trainer, train_without([7], accumulation=1, dropout=0.3))
