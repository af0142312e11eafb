"""Streams that report their position, and runs over them, uninterrupted or resumed."""

import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from tests.chaos.size import some
from tests.support.histories import state_without_times
from tests.support.reference import regression_data
from tests.support.resuming import assert_same


def count(number: Any) -> None:
    with number.get_lock():
        number.value += 1


class Walk(IterableDataset[Any]):
    """Rows in an order that only its own generator determines, with noise of all three generators that user code draws
    from.

    Workers, and ranks that it knows of, have different rows.
    """

    def __init__(self, rows: int = 9, *, rank: int = 0, ranks: int = 1) -> None:
        self.inputs, self.targets = (values[rank::ranks] for values in regression_data(rows))
        self.generator = torch.Generator().manual_seed(rank)
        self.order: list[int] | None = None
        self.read = multiprocessing.Value("i", 0)  # workers count too

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        share = slice(None) if worker is None else slice(worker.id, None, worker.num_workers)
        inputs, targets = self.inputs[share], self.targets[share]
        if self.order is None:
            self.order = torch.randperm(len(inputs), generator=self.generator).tolist()
        while self.order:
            row = self.order.pop()
            count(self.read)
            noise = torch.rand(3, dtype=torch.float64) + np.random.rand() + random.random()
            yield inputs[row] + 0.1 * noise, targets[row]
        self.order = None

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "order": None if self.order is None else list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.order = state["order"]


class WithStepsOnly(IterableDataset[Any]):
    """The same rows in order; the iterator has a state, the dataset does not."""

    def __init__(self) -> None:
        self.walk = Walk()

    def __iter__(self) -> Iterator[Any]:
        return Steps(self.walk)


class Stateless(WithStepsOnly):
    """The same without any state."""

    def __iter__(self) -> Iterator[Any]:
        yield from Steps(self.walk)


class Steps(Iterator[Any]):
    """Reports its position, although its dataset does not."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.position = 0

    def __next__(self) -> Any:
        if self.position == len(self.walk.inputs):
            raise StopIteration
        self.position += 1
        count(self.walk.read)
        noise = torch.rand(3, dtype=torch.float64) + np.random.rand() + random.random()
        return self.walk.inputs[self.position - 1] + 0.1 * noise, self.walk.targets[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def stateful(dataset: Any, **kwargs: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader  # few tests need it

    return StatefulDataLoader(dataset, **{"batch_size": 2, **kwargs})


class SaveEverywhere(TrainerCallback):
    """Saves after each update and after each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: list[str] = []

    def _save(self, trainer: Trainer, kind: str) -> None:
        self.saved.append(f"{kind}_{trainer.run_state.updates}")
        trainer.save_training_state(self.folder / self.saved[-1])

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self._save(trainer, "update")

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self._save(trainer, "epoch")


def run(
    data: Any, *callbacks: TrainerCallback, process_seed: int = 0, base: Any = Trainer, **arguments: Any
) -> Trainer:
    """Three epochs over `data`, with dropout. `process_seed` simulates earlier work of the process."""
    torch.manual_seed(process_seed)
    np.random.seed(process_seed)
    random.seed(process_seed)
    model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer: Trainer = base(model, nn.MSELoss(), optimizer, callbacks=callbacks, seed=11)
    trainer.train(data, **{"num_epochs": 3, "per_device_batch_size": 2, **arguments})
    return trainer


def outcome(trainer: Trainer) -> dict[str, Any]:
    """All results that must be the same in the end, bit for bit."""
    run_state = trainer.run_state.state_dict()
    if not trainer._ranks.is_first:
        del run_state["batches_in_epoch"]  # a training state has that of the first rank
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "history": state_without_times(trainer.run_history),
        "run_state": run_state,
        "torch": torch.default_generator.get_state(),
        "numpy": torch.from_numpy(np.random.get_state(legacy=False)["state"]["key"].astype(np.int64)),
        "random": random.getstate(),
    }


def check_everywhere(make: Callable[[], Any], folder: Path, **arguments: Any) -> None:
    """Save a run wherever it can be saved; from each state it must resume as if nothing had happened."""
    saver = SaveEverywhere(folder)
    whole = outcome(run(make(), saver, **arguments))
    assert len(saver.saved) == whole["run_state"]["updates"] + whole["run_state"]["epochs"]
    for name in some(saver.saved[2::3], saver.saved):
        resumed = run(make(), process_seed=99, resume_from=folder / name, **arguments)
        try:
            assert_same(outcome(resumed), whole)
        except AssertionError as error:
            raise AssertionError(f"resumed from {name}: {error}") from error
