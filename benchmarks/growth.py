"""Does anything get slower as a run gets longer? Writes a graph and its figures.

    python -m benchmarks.growth            # ten minutes; writes benchmarks/results/growth.md, .json and .png
    python -m benchmarks.growth --quick    # some seconds, with a thousandth of the sizes

Each line is one process. What counts is whether a line is flat; the time of an update is that
of the processor, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import Dataset

from benchmarks.plotting import OURS_COLOUR
from benchmarks.processes import in_new_process, resident_megabytes
from benchmarks.reporting import facts_of_run
from benchmarks.ways import unseen
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, StopTrainingError, TrainerCallback

RESULTS = Path(__file__).parent / "results"
COMMAND = "python -m benchmarks.growth"
FEATURES, CLASSES, BATCH_SIZE = 16, 4, 32

Points = list[tuple[float, float]]


class ManyRows(Dataset[Any]):
    """Rows that are computed from their numbers, so that any number of them takes no memory."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.full((FEATURES,), float(row % 7)), row % CLASSES


class Watch(TrainerCallback):
    """Measures `parts` equal parts of a run: the processor time of their updates, and the memory at their ends."""

    def __init__(self, updates: int, parts: int) -> None:
        self._every = updates // parts
        self._began = 0.0
        self.microseconds: Points = []
        self.megabytes: Points = []

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self._began = time.thread_time()

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        updates = trainer.run_state.updates
        if updates % self._every == 0:
            now = time.thread_time()
            self.microseconds.append((updates, 1e6 * (now - self._began) / self._every))
            self.megabytes.append((updates, resident_megabytes()))
            self._began = time.thread_time()


class StopAtOnce(TrainerCallback):
    """Notes when the first update of a run is done, and ends the run."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.time = time.perf_counter()
        raise StopTrainingError("The first update is done.")


class StateAt(TrainerCallback):
    """Saves a state after the update with this number, and stops."""

    def __init__(self, update: int, folder: Path) -> None:
        self._update, self._folder = update, folder

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self._update:
            trainer.save_training_state(self._folder)
            raise StopTrainingError("The state is asked for.")


class TimedSaves(SaveTrainingStateCallback):
    """Saves the newest states and the best, and measures how long the run stands still for each."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, save_every_n_steps=every, max_checkpoints=2, keep_best=2, watch_metric="updates")
        self._every, self._asked = every, 0.0
        self.seconds: Points = []

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates % self._every == 0:
            trainer.run_history.update_metric("updates", trainer.run_state.updates)
        super().on_optimizer_step_end(trainer, **kwargs)
        self._asked = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("updates", trainer.run_state.updates)

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        updates = trainer.run_state.updates
        if updates and updates % self._every == 0:
            self.seconds.append((updates, time.perf_counter() - self._asked))


def new_trainer(*callbacks: Any) -> Trainer:
    model = nn.Linear(FEATURES, CLASSES)
    return Trainer(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.01), callbacks=callbacks, seed=0)


def updates_of_a_long_run(updates: int, parts: int = 50) -> tuple[Points, Points]:
    """The processor time of an update and the memory, by the number of updates; with default callbacks."""
    watch = Watch(updates, parts)
    rows = torch.randn(64 * BATCH_SIZE * 8, FEATURES), torch.randint(0, CLASSES, (64 * BATCH_SIZE * 8,))
    with unseen():
        new_trainer(..., watch).train(
            rows, None, max_num_train_steps=updates, per_device_batch_size=BATCH_SIZE, record_every_n_steps=100
        )
    return watch.microseconds, watch.megabytes


def resumes_in_many_rows(rows: int) -> Points:
    """The seconds from `train` to the end of the first update, by the share of the epoch that was done before."""
    size = max(1, rows // 10_000)
    data, updates = ManyRows(rows), rows // size
    sizes: dict[str, Any] = {"num_epochs": 1, "per_device_batch_size": size}
    points: Points = []
    with tempfile.TemporaryDirectory() as folder, unseen():
        stop = StopAtOnce()
        began = time.perf_counter()
        new_trainer(stop).train(data, **sizes)
        points.append((0.0, stop.time - began))
        state: Path | None = None
        for share in (0.25, 0.5, 0.75, 0.99):
            reached = Path(folder) / f"{share}"
            new_trainer(StateAt(int(share * updates), reached)).train(data, **sizes, resume_from=state)
            state = reached
            stop = StopAtOnce()
            began = time.perf_counter()
            new_trainer(stop).train(data, **sizes, resume_from=state)
            points.append((share, stop.time - began))
    return points


def saves_of_a_long_history(updates: int, saves: int = 10) -> Points:
    """The seconds that a run stands still for a save, by the number of records in its history: one for each update."""
    rows = torch.randn(8192, FEATURES), torch.randint(0, CLASSES, (8192,))
    with tempfile.TemporaryDirectory() as folder, unseen():
        saver = TimedSaves(Path(folder) / "states", updates // saves)
        new_trainer(saver).train(
            rows, None, max_num_train_steps=updates, per_device_batch_size=BATCH_SIZE, record_every_n_steps=1
        )
    return saver.seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Measure whether long runs get slower.")
    parser.add_argument("--quick", action="store_true", help="a thousandth of the sizes, to check that all runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
    less = 1000 if options.quick else 1
    microseconds, megabytes = in_new_process(updates_of_a_long_run, 1_000_000 // less)
    lines: dict[str, dict[str, Any]] = {
        "Processor time of an update": {"x": "updates", "y": "µs", "points": microseconds},
        "Memory of the process": {"x": "updates", "y": "MB", "points": megabytes},
        "From `train` to the first update, 10,000,000 rows": {
            "x": "share of the epoch before the resume",
            "y": "s",
            "points": in_new_process(resumes_in_many_rows, 10_000_000 // less),
        },
        "Pause for a state with the best kept": {
            "x": "records in the history",
            "y": "s",
            "points": in_new_process(saves_of_a_long_history, 240_000 // less),
        },
    }
    facts = facts_of_run(command=COMMAND, repeats=1, left_out=())
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "growth.json").write_text(json.dumps({**facts, "lines": lines}, indent=1) + "\n", "utf-8")
    (options.output / "growth.md").write_text(_as_markdown(lines, facts), "utf-8")
    _plot(lines, options.output / "growth.png")
    print((options.output / "growth.md").read_text("utf-8"))


def _as_markdown(lines: dict[str, dict[str, Any]], facts: dict[str, Any]) -> str:
    rows = ["| what | at the beginning | in the middle | at the end |", "| --- | --- | --- | --- |"]
    for title, line in lines.items():
        shown = [line["points"][index] for index in (0, len(line["points"]) // 2, -1)]
        cells = [f"{value:.3g} {line['y']} at {position:,.10g}" for position, value in shown]
        rows.append(f"| {title}, by {line['x']} | {' | '.join(cells)} |")
    head = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return "\n\n".join(["# Long runs", head, "![Four lines](growth.png)", "\n".join(rows)]) + "\n"


def _plot(lines: dict[str, dict[str, Any]], file: Path) -> None:
    figure = Figure(figsize=(11, 6), layout="constrained")
    for axes, (title, line) in zip(figure.subplots(2, 2).flat, lines.items(), strict=True):
        axes.plot(*zip(*line["points"], strict=True), color=OURS_COLOUR, marker=".")
        axes.set(title=title, xlabel=line["x"], ylabel=line["y"])
        axes.set_ylim(0, 1.25 * max(value for _, value in line["points"]))
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        axes.locator_params(axis="x", nbins=5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
