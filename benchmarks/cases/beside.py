"""What a training run loses to the evaluation of its states, in the run and beside it."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.data import CLASSES
from benchmarks.measuring import Result, Setting, Target, take_turns
from benchmarks.processes import settle
from pytorch_accelerated import callbacks
from pytorch_accelerated.trainer import Trainer

FEATURES, WIDTH, BATCH_SIZE = 256, 1024, 128
WITHOUT, IN_RUN, BESIDE = "states without evaluation", "evaluated in the run", "evaluated beside the run"


class TrainingClock(callbacks.TrainerCallback):
    """Times the run from the end of its first update to that of its last one."""

    first = last = 0.0

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last


def run(setting: Setting) -> list[Result]:
    epochs, updates = setting.size(6, quick=2), setting.size(200, quick=4)
    sizes = {"train": updates * BATCH_SIZE, "eval": setting.size(20_000, quick=256)}
    torch.set_num_threads(1)
    measures = {way: partial(_seconds, way, epochs, sizes, setting.folder) for way in (WITHOUT, IN_RUN, BESIDE)}
    take_turns(measures, 1)  # warms up
    return [
        Result(
            title=f"Training of {epochs * updates:,} updates with a state after each of {epochs} epochs, on two cores",
            unit="s from the first update to the last",
            rounds=take_turns(measures, setting.repeats),
            baseline=WITHOUT,
            targets=[Target(BESIDE, at_most=1.03)],
            note=f"MLP {FEATURES}-{WIDTH}-{WIDTH}-{CLASSES}, batch {BATCH_SIZE}; {sizes['eval']:,} rows to evaluate.",
        )
    ]


def _seconds(way: str, epochs: int, sizes: dict[str, int], place: Path) -> float:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        states = Path(folder) / "states"
        clock = TrainingClock()
        own: list[Any] = [callbacks.SaveTrainingStateCallback(states, save_every_n_epochs=1), clock]
        if way == BESIDE:
            own.insert(0, callbacks.EvaluateBesideCallback(states))
        context = multiprocessing.get_context("forkserver")
        beside = context.Process(target=_evaluate, args=(states, sizes["eval"]))
        if way == BESIDE:
            beside.start()
            time.sleep(5)  # it starts in that time, so that only evaluations remain
        trainer = Trainer(_model(), nn.CrossEntropyLoss(), None, callbacks=own)
        trainer.optimizer = torch.optim.Adam(trainer.model.parameters())
        eval_dataset = _data(sizes["eval"]) if way == IN_RUN else None
        trainer.train(_data(sizes["train"]), epochs, eval_dataset, per_device_batch_size=BATCH_SIZE)
        if way == BESIDE:
            beside.join()
            assert len(trainer.run_history.get_metric_values("eval_loss_epoch")) == epochs
        return clock.last - clock.first


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )


def _data(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, FEATURES), torch.randint(CLASSES, (samples,)))


def _evaluate(states: Path, samples: int) -> None:
    settle()
    trainer = Trainer(_model(), nn.CrossEntropyLoss(), None, callbacks=())
    trainer.evaluate_states(states, dataset=_data(samples), per_device_batch_size=BATCH_SIZE)
