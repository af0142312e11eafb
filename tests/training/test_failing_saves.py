"""A save that fails: a warning, again at the next save, an error at the end; before the first one an error at once."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.huggingface import TrainerCallback as FaceCallback
from pytorch_accelerated.states import disk
from tests.callbacks.runs import Score, a_trainer, fit
from tests.huggingface.runs import make_trainer

RUNS: dict[str, Callable[[Path], Any]] = {
    "states": lambda folder: SaveTrainingStateCallback(folder, save_every_n_epochs=1, save_at_end=False),
    "in the background": lambda folder: SaveTrainingStateCallback(
        folder, save_every_n_epochs=1, save_at_end=False, background=True
    ),
    "best model": lambda folder: SaveBestModelCallback(folder / "model.pt", watch_metric="score"),
    "average": lambda folder: ModelEmaCallback(save_path=folder / "model.pt", watch_metric="score"),
}


class FullInEpoch:
    """A disk that is full in one epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.now = 1

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        def create(*args: Any) -> Any:
            if self.now == self.epoch:
                raise OSError(errno.ENOSPC, "No space left on device")
            return really_create(*args)

        really_create = disk.create_file
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk, "create_file", create)
            yield


class Watch(TrainerCallback):
    """Tells the disk the epoch, and notes the end of the run."""

    def __init__(self, disk: FullInEpoch) -> None:
        self.disk = disk
        self.has_ended = False

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_context.control.saves.finish()  # so that the epoch in which something is written is known
        self.disk.now = trainer.run_history.current_epoch

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.has_ended = True


def train_and_fail(kind: str, folder: Path, full: FullInEpoch) -> int:
    """The number of epochs that were trained. Raises what the run raised, if it came before its end."""
    watch = Watch(full)
    if kind != "checkpoints":
        trainer = a_trainer(Score([3, 2, 1]), watch, RUNS[kind](folder))
        with pytest.raises(CheckpointError, match="The run is over") if full.epoch == 3 else contextlib.nullcontext():
            fit(trainer)
        assert watch.has_ended
        return trainer.run_state.epochs

    class Epoch(FaceCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            full.now = round(state.epoch) + 1

    choices: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    face = make_trainer(folder, Epoch(), num_train_epochs=3, learning_rate=0.01, **choices)
    with pytest.raises(CheckpointError, match="The run is over") if full.epoch == 3 else contextlib.nullcontext():
        face.train()
    assert face.state.best_global_step == (10 if full.epoch == 3 else 15)
    values = {log["step"]: log["eval_loss"] for log in face.state.log_history if "eval_loss" in log}
    assert face.state.best_metric == values[face.state.best_global_step]
    return round(face.state.epoch)


@pytest.mark.parametrize("kind", [*RUNS, "checkpoints"])
@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_disk_that_is_full_for_an_epoch(kind: str, epoch: int, tmp_path: Path) -> None:
    full = FullInEpoch(epoch)
    with full.installed():
        if epoch == 1:
            with pytest.raises(CheckpointError, match="No space left on device"):
                train_and_fail(kind, tmp_path, full)
            assert full.now == 1
            return
        with pytest.warns(UserWarning, match="No space left on device.* The run continues, and the next save tries"):
            assert train_and_fail(kind, tmp_path, full) == 3
    left = {path.name for path in tmp_path.iterdir()}
    names = {"model.pt"}
    if kind not in ("best model", "average"):
        names = {f"checkpoint-{5 * number}" if kind == "checkpoints" else f"epoch_{number}" for number in (1, 2, 3)}
        names -= {f"checkpoint-{5 * epoch}", f"epoch_{epoch}"}
    assert left == names
