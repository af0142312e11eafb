"""How long a save delays the run."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from benchmarks.data import CLASSES, ReadyBatches
from benchmarks.measuring import Result, Setting, Target, take_turns
from benchmarks.ways import RawLoop, unseen
from benchmarks.work import Feed, Parts
from pytorch_accelerated.callbacks.saving import SaveTrainingStateCallback
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.trainer import Trainer

STEPS_BETWEEN_SAVES = 20
DISK = "the disk alone"
FLUSHED = "torch.save, flushed to the disk"


class TorchSaver(TrainerCallback):
    """Saves as often as the others with `torch.save`, flushed, and keeps one file."""

    def __init__(self, parts: Parts, path: Path) -> None:
        self._parts, self._path = parts, path

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates % STEPS_BETWEEN_SAVES == 0:
            _seconds_of_torch_save(self._parts, self._path, is_flushed=True)


class BorderClock(TrainerCallback):
    """Times the gap between the end of the second saved update and the next step, when memory for it is already
    allocated.

    Attributes:
        seconds: how long the run stood still.
        seconds_with_updates: the same and the next updates, up to the end of the last one before the next save.
        quiet_steps: seconds of steps while nothing was being written.
        disturbed_steps: seconds of steps while a state was being written in the background.
    """

    def __init__(self) -> None:
        self.seconds = self.seconds_with_updates = self._saved = 0.0
        self.quiet_steps: list[float] = []
        self.disturbed_steps: list[float] = []

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self._end = time.perf_counter()
        if trainer.run_state.updates == 2 * STEPS_BETWEEN_SAVES:
            self._saved = self._end
        self.seconds_with_updates = self._end - self._saved
        if trainer.run_state.updates > 2:
            steps = self.disturbed_steps if trainer.current_run.control.saves.writer.is_busy else self.quiet_steps
            steps.append(self._end - self._start)

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self._start = time.perf_counter()
        if trainer.run_state.updates == 2 * STEPS_BETWEEN_SAVES:
            self.seconds = self._start - self._end


def run(setting: Setting) -> list[Result]:
    features = setting.size(2900, quick=64)
    parts = _parts(features)
    batches = _batches(features)
    state_megabytes = 3 * sum(parameter.numel() for parameter in parts.model.parameters()) * 4 / 2**20
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        path = Path(folder)
        clock_of = partial(_clock_of_run, parts, batches)
        ours, in_background = partial(_saver, path / "states"), partial(_saver, path / "states", background=True)
        slowdowns: list[float] = []

        def stall_in_background() -> float:
            clock = clock_of(in_background())
            quiet = statistics.median(clock.quiet_steps)
            # A small state may be on the disk before the first step beside it has ended.
            disturbed = statistics.median(clock.disturbed_steps or [quiet])
            slowdowns.append(100 * (disturbed / quiet - 1))
            return clock.seconds

        measures: dict[str, Callable[[], float]] = {
            "torch.save": partial(_seconds_of_torch_save, parts, path / "state.pt", is_flushed=False),
            FLUSHED: partial(_seconds_of_torch_save, parts, path / "state.pt", is_flushed=True),
            DISK: partial(_seconds_of_disk, parts, path / "state.bin"),
            "ours": lambda: clock_of(ours()).seconds,
            "ours, in the background": stall_in_background,
        }
        in_a_run: dict[str, Callable[[], float]] = {
            "no save": lambda: clock_of().seconds_with_updates,
            FLUSHED: lambda: clock_of(TorchSaver(parts, path / "state.pt")).seconds_with_updates,
            "ours": lambda: clock_of(ours()).seconds_with_updates,
            "ours, in the background": lambda: clock_of(in_background()).seconds_with_updates,
        }
        RawLoop().train(parts, Feed(batches, 1, len(batches)))  # Adam's state exists from here on
        take_turns(measures, 1)  # warms up
        slowdowns.clear()
        stalls = take_turns(measures, setting.repeats)
        with_updates = take_turns(in_a_run, setting.repeats)
    return [
        Result(
            title=f"A save between two steps ({state_megabytes:.0f} MB of state)",
            unit="s that the run stands still",
            rounds={way: seconds for way, seconds in stalls.items() if way != DISK},
            baseline="torch.save",
            targets=[Target("ours, in the background", at_most=0.3)],
            note=(
                "Ours writes checksums and flushes to the disk; a torch.save that does not can be lost. The second "
                "save of a run: the first in the background also gets the memory."
            ),
        ),
        Result(
            title=f"The same save, flushed to the disk everywhere ({state_megabytes:.0f} MB of state)",
            unit="s that the run stands still",
            rounds={way: stalls[way] for way in (DISK, FLUSHED, "ours")},
            baseline=FLUSHED,
            targets=[Target("ours", at_most=1.25)],
            note="The disk alone: the same bytes are written to one file, which is flushed.",
        ),
        Result(
            title=f"A save and the {STEPS_BETWEEN_SAVES} updates after it ({state_megabytes:.0f} MB of state)",
            unit="s",
            rounds=with_updates,
            baseline="no save",
            compared_as="difference",
            note="A save in the background takes time from these updates, which its pause doesn't show.",
        ),
        Result(
            title="Steps while a state is being written in the background",
            unit="% slower",
            rounds={"ours, in the background": slowdowns},
            targets=[Target("ours, in the background", at_most=5)],
        ),
    ]


def _parts(features: int) -> Parts:
    model = nn.Sequential(nn.Linear(features, features), nn.Linear(features, CLASSES))
    return Parts(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))


def _batches(features: int) -> ReadyBatches:
    steps = 3 * STEPS_BETWEEN_SAVES
    return ReadyBatches(torch.randn(steps, features), torch.zeros(steps, dtype=torch.int64), 1)


def _seconds_of_torch_save(parts: Parts, path: Path, *, is_flushed: bool) -> float:
    state = {"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}
    return _seconds_of_replacing(path, lambda file: torch.save(state, file), is_flushed=is_flushed)


def _seconds_of_disk(parts: Parts, path: Path) -> float:
    moments = (value for state in parts.optimizer.state.values() for value in state.values())
    tensors = [tensor.detach().numpy() for tensor in (*parts.model.parameters(), *moments)]
    return _seconds_of_replacing(path, lambda file: file.writelines(tensors), is_flushed=True)


def _seconds_of_replacing(path: Path, write: Callable[[IO[bytes]], object], *, is_flushed: bool) -> float:
    # The file before stays until the new one is written, as our states do: deleting it first risks both,
    # and gets the memory of its pages back, into which a virtual machine writes several times as fast.
    start, new = time.perf_counter(), path.with_suffix(".new")
    with new.open("wb") as file:
        write(file)
        if is_flushed:
            file.flush()
            os.fsync(file.fileno())
    new.replace(path)
    return time.perf_counter() - start


def _saver(folder: Path, **kwargs: Any) -> SaveTrainingStateCallback:
    shutil.rmtree(folder, ignore_errors=True)
    return SaveTrainingStateCallback(
        folder, save_every_n_steps=STEPS_BETWEEN_SAVES, save_at_end=False, max_checkpoints=1, **kwargs
    )


def _clock_of_run(parts: Parts, batches: ReadyBatches, *savers: TrainerCallback) -> BorderClock:
    clock = BorderClock()
    with unseen():
        Trainer(*parts, callbacks=[clock, *savers]).train(batches, num_epochs=1, per_device_batch_size=1)
    return clock
