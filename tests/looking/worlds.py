"""Trainers of several kinds, and everything about them that a look before training must leave alone."""

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.callbacks import MoveModulesToDeviceCallback, TrainerCallback


class Counting(TrainerCallback):
    """A user's callback; it has no `state_dict`."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.seen.append(kwargs["step"])


class Memory(nn.Module):
    """Keeps a running mean in a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(values.detach().float().mean(), alpha=0.1)
        return values - self.mean


class OfDicts(nn.Module):
    """Returns its own loss for dict batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class OwnHooks(Trainer):
    """Draws noise from every generator in its own hook, and has further optimizers, modules and schedules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Linear(1, 1, bias=False)
        self.optimizer_of_scale = torch.optim.Adam(self.scale.parameters(), lr=0.01)
        self.shifts = [nn.Linear(1, 1, bias=False)]
        self.of_shifts = {"shift": torch.optim.SGD(self.shifts[0].parameters(), lr=0.01, momentum=0.9)}
        self.schedule_of_shifts = torch.optim.lr_scheduler.StepLR(self.of_shifts["shift"], 3)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        output = super().calculate_train_batch_loss(batch)
        loss = output["loss"] * self.scale.weight.abs().sum() + self.shifts[0].weight.square().sum()
        return {**output, "loss": loss + 0.001 * noise}

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.optimizer_of_scale.step()
        self.of_shifts["shift"].step()
        self.schedule_of_shifts.step()


def make(kind: str, **kwargs: Any) -> tuple[Trainer, Any]:
    """A trainer and its training data, of 50 rows: six batches of 8, and one of 2."""
    set_seed(0)
    loss: Any = nn.CrossEntropyLoss()
    images, labels = torch.randn(50, 1, 6, 6), torch.randint(0, 3, (50,))
    data: Any = (images, labels)
    if kind == "dicts":
        model: Any = OfDicts()
        loss, data = None, {"inputs": torch.randn(50, 4), "labels": labels}
    elif kind == "cnn":
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Memory(), nn.Dropout(0.2)]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3))
    else:
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3))
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:-1]}, {"params": parameters[-1:], "lr": 0.005}]
    optimizer = torch.optim.AdamW(groups, lr=0.01) if kind == "dicts" else torch.optim.SGD(groups, 0.01, momentum=0.9)
    callbacks = [MoveModulesToDeviceCallback(), Counting()]
    trainer = (OwnHooks if kind == "mlp" else Trainer)(model, loss, optimizer, callbacks=callbacks, **kwargs)
    return trainer, data


def everything(trainer: Trainer) -> dict[str, Any]:
    """A copy of all that a look must leave as it is."""
    modules = [value for value in vars(trainer).values() if isinstance(value, nn.Module)]
    optimizers = [value for value in vars(trainer).values() if isinstance(value, torch.optim.Optimizer)]
    if isinstance(trainer, OwnHooks):
        modules += trainer.shifts
        optimizers += trainer.of_shifts.values()
    model = trainer.get_model()
    return {
        "tensors": [each.detach().clone() for one in modules for each in (*one.parameters(), *one.buffers())],
        "gradients": [None if each.grad is None else each.grad.clone() for each in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "forward": [sorted(vars(module)) for module in model.modules()],
        "optimizers": copy.deepcopy([optimizer.state_dict() for optimizer in optimizers]),
        "schedule": getattr(getattr(trainer, "schedule_of_shifts", None), "last_epoch", None),
        "steps": [sorted(vars(optimizer)) for optimizer in optimizers],
        "attributes": {name: id(value) for name, value in vars(trainer).items()},
        "history": copy.deepcopy(trainer.run_history.state_dict()),
        "timings": trainer.run_history.timings,
        "state": copy.deepcopy(vars(trainer.run_state)),
        "seen": [list(callback.seen) for callback in trainer.callback_handler if isinstance(callback, Counting)],
        "torch": torch.get_rng_state(),
        "numpy": str(np.random.get_state(legacy=False)["state"]),
        "random": random.getstate(),
    }


def results(trainer: Trainer) -> dict[str, Any]:
    """`everything` that two equal runs have in common: without the identity of objects and measured times."""
    found = everything(trainer)
    records = [
        (record.epoch, record.update, record.samples, record.train_loss, record.learning_rates, record.gradient_norm)
        for record in trainer.run_history.step_records
    ]
    history = {**found["history"], "step_records": records, "seconds": None}
    return {**found, "history": history, "attributes": None, "timings": None}
