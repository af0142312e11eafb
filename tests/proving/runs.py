"""Small runs with everything that may part two runs, each of which can be planted."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import StopTrainingError
from tests.support.reference import regression_data

ROWS, UPDATES_PER_EPOCH = 48, 6
ADAMW = functools.partial(torch.optim.AdamW, lr=0.02)


class Noisy(Dataset[Any]):
    """Rows with noise; the content of a row, or a label, may be another one."""

    def __init__(self, noise: float = 0.0, changed_row: int | None = None, changed_label: int | None = None) -> None:
        self.inputs, self.targets = regression_data(ROWS)
        self.noise = noise
        if changed_row is not None:
            self.inputs[changed_row, 0] += 1e-6
        if changed_label is not None:
            self.targets[changed_label] *= -1

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(3, dtype=torch.float64)
        return self.inputs[index] + self.noise * noise, self.targets[index]


class AsDicts(Noisy):
    """The same rows as dicts, for a model with its own loss."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return {"inputs": inputs, "targets": targets}


class OwnLoss(nn.Sequential):
    """Takes and returns dicts."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:  # type: ignore[override]
        outputs = super().forward(inputs)
        return {"loss": nn.functional.mse_loss(outputs, targets), "outputs": outputs}


class Log(TrainerCallback):
    """What each update was: rows, found by their targets, losses of batches, gradients, weights before and after it."""

    takes_part_in_preflight = False  # nor in a replay

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.losses: dict[int, list[float]] = {}
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.weights_after: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.weights.setdefault(trainer.run_state.updates + 1, copies(trainer.get_model().state_dict()))

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        update = trainer.run_state.updates + 1
        targets = batch["targets"] if isinstance(batch, dict) else batch[1]
        found = (targets[:, None] == regression_data(ROWS)[1][None]).all(-1).nonzero()
        self.rows.setdefault(update, []).extend(found[:, 1].tolist())
        self.losses.setdefault(update, []).append(batch_output["loss"].item())

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        gradients = {name: each.grad for name, each in trainer.get_model().named_parameters() if each.grad is not None}
        self.gradients[trainer.run_state.updates + 1] = copies(gradients)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.weights_after[trainer.run_state.updates] = copies(trainer.get_model().state_dict())


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in tensors.items()}


class At(TrainerCallback):
    """Does something before the forward pass of an update."""

    def __init__(self, update: int, action: Callable[[Trainer], object]) -> None:
        self.update, self.action = update, action

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == self.update - 1:
            self.action(trainer)


class Interrupt(TrainerCallback):
    """Stops a run after 15 updates."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == 15:
            raise StopTrainingError


def make(
    *callbacks: Any,
    base: type[Trainer] = Trainer,
    seed: int = 5,
    first_weights: int = 0,
    dropout: float = 0.2,
    has_norm: bool = True,
    optimizer: Callable[..., Any] = ADAMW,
    dataset: dict[str, Any] | None = None,
    is_evaluated: bool = True,
    is_of_dicts: bool = False,
    **arguments: Any,
) -> tuple[Trainer, dict[str, Any]]:
    """A trainer with dropout and BatchNorm, and the arguments of `train`: four epochs of six updates."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(first_weights)
        norms = [nn.BatchNorm1d(6)] if has_norm else []
        layers = [nn.Linear(3, 6), *norms, nn.Dropout(dropout), nn.Tanh(), nn.Linear(6, 2)]
        model = (OwnLoss if is_of_dicts else nn.Sequential)(*layers).double()
    trainer = base(
        model, None if is_of_dicts else nn.MSELoss(), optimizer(model.parameters()), callbacks=callbacks, seed=seed
    )
    evaluated = {"eval_dataset": regression_data(7)} if is_evaluated else {}
    given = {
        "train_dataset": (AsDicts if is_of_dicts else Noisy)(**dataset or {}),
        "num_epochs": 4,
        "per_device_batch_size": 8,
        **evaluated,
    }
    return trainer, given | arguments


def train(
    folder: Path, *callbacks: Any, every: int = UPDATES_PER_EPOCH, resume: bool = False, **changes: Any
) -> tuple[Trainer, dict[str, Any]]:
    """Such a run that has trained, with states in `folder`."""
    saver = SaveTrainingStateCallback(folder, save_every_n_steps=every)
    trainer, arguments = make(*callbacks, saver, **changes)
    trainer.train(**arguments, resume_from=folder if resume else None)
    return trainer, arguments


class BadOnce(Trainer):
    """The loss of update 6 is NaN, wherever the run comes from."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        return {**output, "loss": output["loss"] * math.nan} if self.run_state.updates == 5 else output


class ByBatches(TrainerCallback):
    """Lowers the rate with each batch that it has seen, and keeps their number: going back is not leaving out."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.count += 1
        trainer.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
