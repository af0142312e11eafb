"""An update of a run is gone back to, and is the very update of the run, to the bit."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import SequentialLR

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.extras.proving import Replay
from tests.chaos.size import size
from tests.looking.worlds import everything
from tests.proving import faults
from tests.proving.runs import BadOnce, ByBatches, Interrupt, Log, make, train
from tests.support.processes import run_on_ranks
from tests.support.reference import tiny_model
from tests.support.resuming import assert_same


def check(found: Replay, log: Log) -> None:
    """A replay is what the log of the run has."""
    update = found.update
    for name in ("gradients", "weights", "weights_after"):
        assert_same(getattr(found, name), getattr(log, name)[update], f"{name} of update {update}")
    losses = log.losses[update]
    assert found.rows == log.rows[update]
    assert len(found.batches) == len(losses)
    assert found.recorded_loss is not None
    assert found.loss == found.recorded_loss
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-14)
    assert found.gradient_norm == pytest.approx(
        math.sqrt(sum(each.square().sum() for each in found.gradients.values()))
    )
    assert found.row_losses is not None
    assert len(found.row_losses) == len(found.rows)


def test_each_update_is_replayed(tmp_path: Path) -> None:
    num_epochs = size(3, 17)
    changes: dict[str, Any] = {"num_epochs": num_epochs, "per_device_batch_size": 4, "is_evaluated": False}
    changes |= {"dataset": {"noise": 0.1}}
    log = Log()
    trainer, _ = train(tmp_path, log, every=5, **changes)
    assert trainer.run_state.updates == 12 * num_epochs
    for update in range(1, 12 * num_epochs + 1):
        if update <= 5:  # reached from the first weights only
            new, arguments = make(**changes)
            found = new.replay(tmp_path, update, **arguments)
        else:
            found = trainer.replay(tmp_path, update)
        check(found, log)
        assert found.row_losses is not None
        assert sum(found.row_losses) / 4 == pytest.approx(found.loss, rel=1e-12)
        assert found.epoch == (update - 1) // 12 + 1
        # States are from after each fifth update, and from the end of each epoch: no more is trained than since then.
        assert found.updates_before == min((update - 1) % 5, 4)
        assert (found.state is None) == (update <= 5)


def warm_up(optimizer: Any) -> Any:
    growing = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=7)
    return SequentialLR(optimizer, [growing, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [7])


KINDS: dict[str, dict[str, Any]] = {
    "augmentation": {"dataset": {"noise": 0.1}},
    "two workers": {"dataset": {"noise": 0.1}, "train_dataloader_kwargs": {"num_workers": 2}},
    "accumulation": {"per_device_batch_size": 4, "gradient_accumulation_steps": 2},
    "warm-up": {"create_scheduler_fn": warm_up},
    "dicts": {"is_of_dicts": True, "is_evaluated": False},
    "clipping": {"gradient_clip_norm": 0.5},
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_updates_of_every_kind_of_run_are_replayed(kind: str, tmp_path: Path) -> None:
    log = Log()
    train(tmp_path, log, every=6, **KINDS[kind])
    for update in (1, 7, 15, 24):
        new, arguments = make(**KINDS[kind])
        check(new.replay(tmp_path, update, **arguments), log)


def test_updates_of_a_resumed_run_are_replayed(tmp_path: Path) -> None:
    train(tmp_path, log := Log(), Interrupt(), every=4)
    train(tmp_path, rest := Log(), every=4, resume=True)
    for name in ("rows", "losses", "gradients", "weights", "weights_after"):
        getattr(log, name).update(getattr(rest, name))
    for update in (3, 13, 16, 17, 24):
        trainer, arguments = make()
        check(trainer.replay(tmp_path, update, **arguments), log)


@pytest.mark.processes
def test_two_ranks_replay_an_update_together(tmp_path: Path) -> None:
    run_on_ranks(Path(__file__).parents[1] / "ranks" / "replay.py", 2, tmp_path)


def test_the_debugger_stops_before_the_forward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = train(tmp_path, log := Log(), per_device_batch_size=4, gradient_accumulation_steps=2)
    seen = []

    def look() -> None:
        names = sys._getframe(1).f_locals
        assert names["trainer"].run_state.updates == 9
        seen.append((names["rows"], names["batch"][1].clone()))

    monkeypatch.setattr(sys, "breakpointhook", look)
    found = trainer.replay(tmp_path, 10, debug=True)
    check(found, log)
    assert [row for rows, _ in seen for row in rows] == log.rows[10]
    assert len(seen) == 2
    assert_same([targets for _, targets in seen], [batch[1] for batch in found.batches])


def test_bad_rows_stand_first(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"dataset": {"changed_label": 11}, "dropout": 0.0}
    trainer, arguments = train(tmp_path, **changes)
    arguments["train_dataset"].targets[11] *= 100
    replays = (trainer.replay(tmp_path, update) for update in range(7, 13))
    found = next(each for each in replays if 11 in (each.rows or []))
    assert found.worst_rows[0][0] == 11
    assert f"{found.worst_rows[0][1]:.4g}" in str(found)
    assert found.recorded_loss != found.loss
    assert "but the run recorded" in str(found)


# ------------------------------------------------------------------------------------------ afterwards all is as before


class Breaks(TrainerCallback):
    is_broken = False

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if self.is_broken:
            raise ValueError("broken in the replay")


def test_everything_is_as_it_was(tmp_path: Path) -> None:
    breaks = Breaks()
    trainer, arguments = train(tmp_path, breaks, dataset={"noise": 0.1})
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    before = everything(trainer)
    trainer.replay(tmp_path, 9)
    assert_same(everything(trainer), before)
    breaks.is_broken = True
    with pytest.raises(ValueError, match="broken in the replay"):
        trainer.replay(tmp_path, 9)
    breaks.is_broken = False
    assert_same(everything(trainer), before)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    # Training goes on as if there had been no replay.
    again = trainer.train(**{**arguments, "num_epochs": 2}).step_records[-1].train_loss
    other, arguments = train(tmp_path / "other", dataset={"noise": 0.1})
    assert other.train(**{**arguments, "num_epochs": 2}).step_records[-1].train_loss == again


class Adding(nn.Module):
    """Adds a running mean, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(values.detach().mean())
        return values * (1 + self.calls / 100) + self.mean


class RunningLoss(faults.RunningLoss):
    """A loss with a mean of its own, and a module that is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [Adding()]

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().__call__(self.parts[0](outputs), targets)


class Growing(faults.TorchNoise):
    """Rows with a generator of their own, a counter, and a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.served, self.seen = 0, [0.0]

    def changed(self, row: torch.Tensor) -> torch.Tensor:
        self.served += 1
        self.seen.append(self.seen[-1] + 0.01)
        return super().changed(row) * (1 + self.served / 100) + self.seen[-1]


def weights_after_two_runs(folder: Path, *replayed: int) -> dict[str, torch.Tensor]:
    """The weights of a trainer that trains, replays updates, and trains again."""
    model = nn.Sequential(tiny_model(), Adding(), nn.Linear(2, 2).double())
    saver = SaveTrainingStateCallback(folder, save_every_n_steps=2)
    trainer, arguments = faults.run(
        Growing(), faults.RandomRates(), saver, model=model, loss_func=RunningLoss(), base=faults.Curriculum
    )
    arguments = {**arguments, "num_epochs": 2}
    del arguments["updates"]
    trainer.train(**arguments)
    for update in replayed:
        trainer.replay(folder, update)
    trainer.train(**arguments)
    return trainer.get_model().state_dict()


@pytest.mark.filterwarnings("ignore:The optimizer resumes with the settings")
def test_training_after_a_replay_gives_the_weights_that_it_gives_without_one(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = weights_after_two_runs(tmp_path / "without")
        torch.manual_seed(0)
        assert_same(weights_after_two_runs(tmp_path / "with", 4, 6), expected)


# ----------------------------------------------------------------------------------- behind an update that was left out


@pytest.mark.filterwarnings("ignore:In epoch 1, update 6", "ignore:The optimizer resumes with the settings")
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_updates_behind_one_that_was_left_out_are_replayed(policy: str, tmp_path: Path) -> None:
    def made(*callbacks: Any) -> tuple[Trainer, dict[str, Any]]:
        return make(ByBatches(), *callbacks, base=BadOnce, nonfinite_policy=policy, per_device_batch_size=4)

    log = Log()
    trainer, arguments = made(log, SaveTrainingStateCallback(tmp_path, save_every_n_steps=4))
    trainer.train(**arguments)
    new, arguments = made()
    for update in (5, 7, 8, 9, 13):
        for each in (trainer, new):
            found = each.replay(tmp_path, update, **arguments)
            for name in ("gradients", "weights", "weights_after"):
                assert_same(getattr(found, name), getattr(log, name)[update], f"{name} of update {update}")
            assert (found.rows, found.loss) == (log.rows[update][-4:], found.recorded_loss)
        new, _ = made()
    left_out = trainer.replay(tmp_path, 6)
    assert math.isnan(left_out.loss)
    assert all(gradient.isnan().any() for gradient in left_out.gradients.values())
    assert_same(left_out.weights_after, left_out.weights, "an update that was left out")
    assert_same(left_out.weights, log.weights_after[5], "the weights before it")
    assert left_out.rows == log.rows[6]


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (0, "counted from 1"),
        (-1, "counted from 1"),
        (True, "counted from 1"),
        ("3", "counted from 1"),
        (10**6, "There is no update 1000000: with these arguments the run ends after 24"),
        (2, "this trainer has trained"),
    ],
)
def test_an_update_that_cannot_be_reached_is_an_error(update: Any, words: str, tmp_path: Path) -> None:
    trainer, _ = train(tmp_path)
    before = everything(trainer)
    with pytest.raises(ConfigurationError, match=words):
        trainer.replay(tmp_path, update)
    assert_same(everything(trainer), before)


def test_a_replay_needs_states_and_arguments(tmp_path: Path) -> None:
    trainer, arguments = make()
    with pytest.raises(ConfigurationError, match="There is no training state in .*Check the path"):
        trainer.replay(tmp_path, 3, **arguments)
    with pytest.raises(ConfigurationError, match="has not trained.*Pass the arguments of `train`"):
        trainer.replay(tmp_path, 3)
    with pytest.raises(ArgumentTypeError, match="`replay` got `resume_from`"):
        trainer.replay(tmp_path, 3, **arguments, resume_from=tmp_path)
