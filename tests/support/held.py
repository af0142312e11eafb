"""Trainers that hold more than a model and an optimizer, as people write them; in float64."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from tests.support.reference import regression_data

ROWS = 11


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Tanh(), nn.Linear(4, 2)).double()


class CentreLoss(nn.Module):
    """Learns where the outputs should lie, and counts its calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        nearest = self.centres[(targets[:, 0] > 0).long()]
        return (outputs - targets).square().mean() + (outputs - nearest).square().mean()


class PlainLoss:
    """No module: a list with a parameter as an attribute."""

    def __init__(self) -> None:
        self.weights = [nn.Parameter(torch.zeros(2, dtype=torch.float64))]

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = (outputs - targets).square().mean(dim=0)
        return (losses * torch.exp(-self.weights[0]) + self.weights[0]).mean()


class Tasks(Trainer):
    """Weighs two tasks by what it has learnt about them: uncertainty weighting."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self.log_vars = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = torch.optim.AdamW([*model.parameters(), self.log_vars], 0.05)
        super().__init__(model, nn.MSELoss(), optimizer, *args, **kwargs)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        errors = (output["model_outputs"] - batch[1]).square().mean(dim=0)
        return {**output, "loss": (errors * torch.exp(-self.log_vars) + self.log_vars).sum()}


class Byol(Trainer):
    """Learns from a slow copy of itself."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        super().__init__(model, nn.MSELoss(), optimizer, *args, **kwargs)
        self.target = copy.deepcopy(model).requires_grad_(False)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        hints = self.target(batch[0] + 0.1)
        return {**output, "loss": output["loss"] + (output["model_outputs"] - hints).square().mean()}

    @torch.no_grad()
    def optimizer_step(self) -> None:
        super().optimizer_step()
        for slow, fast in zip(self.target.parameters(), self.model.parameters(), strict=True):
            slow.lerp_(fast, 0.3)


class TwoOptimizers(Trainer):
    """A head beside the model, with an optimizer and a schedule of its own in a dict."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1, 0.5), *args, **kwargs)
        torch.manual_seed(1)
        self.heads = {"second": nn.Linear(2, 2).double()}
        optimizer = torch.optim.AdamW(self.heads["second"].parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.of_head: dict[str, Any] = {"optimizer": optimizer, "schedule": schedule}

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        second = self.heads["second"](output["model_outputs"])
        return {**output, "loss": output["loss"] + (second - batch[1]).square().mean()}

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.of_head["optimizer"].step()

    def scheduler_step(self) -> None:
        self.of_head["schedule"].step()

    def optimizer_zero_grad(self) -> None:
        super().optimizer_zero_grad()
        self.of_head["optimizer"].zero_grad()


class Gan(Trainer):
    """A critic that is trained in the middle of each batch."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, nn.MSELoss(), torch.optim.Adam(model.parameters(), 0.05), *args, **kwargs)
        torch.manual_seed(1)
        self.critic = nn.Linear(2, 1).double()
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), 0.05)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        fakes = output["model_outputs"]
        self.critic_optimizer.zero_grad()
        (self.critic(fakes.detach()).square() + (self.critic(batch[1]) - 1).square()).mean().backward()
        self.critic_optimizer.step()
        return {**output, "loss": output["loss"] + (self.critic(fakes) - 1).square().mean()}


def with_loss(make_loss: Callable[[], Any], parameters_of: Callable[[Any], list[Any]], **kwargs: Any) -> Trainer:
    model, loss = new_model(), make_loss()
    optimizer = torch.optim.AdamW([*model.parameters(), *parameters_of(loss)], 0.05)
    return Trainer(model, loss, optimizer, **kwargs)


def with_closure(**kwargs: Any) -> Trainer:
    """Nothing but the optimizer has the parameter of the loss function."""
    scale = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets).square() * torch.exp(-scale) + scale).mean()

    model = new_model()
    return Trainer(model, loss, torch.optim.AdamW([*model.parameters(), scale], 0.05), **kwargs)


def with_several(**kwargs: Any) -> Trainer:
    """One optimizer has the matrices, another one the biases and what the loss function learns."""
    model, loss = new_model(), CentreLoss()
    others = [*(each for each in model.parameters() if each.ndim == 1), loss.centres]
    matrices = torch.optim.SGD([each for each in model.parameters() if each.ndim == 2], 0.1, 0.9)
    return Trainer(model, loss, {"matrices": matrices, "others": torch.optim.AdamW(others, 0.05)}, **kwargs)


TRAINERS: dict[str, Callable[..., Trainer]] = {
    "a loss with parameters": functools.partial(with_loss, CentreLoss, lambda loss: [loss.centres]),
    "a loss that is no module": functools.partial(with_loss, PlainLoss, lambda loss: loss.weights),
    "a closure": with_closure,
    "weights of tasks": lambda **kwargs: Tasks(new_model(), **kwargs),
    "a target network": lambda **kwargs: Byol(new_model(), **kwargs),
    "two optimizers": lambda **kwargs: TwoOptimizers(new_model(), **kwargs),
    "several optimizers": with_several,
    "a critic": lambda **kwargs: Gan(new_model(), **kwargs),
}


def train(
    name: str, *callbacks: Any, rows: int = ROWS, before: Callable[[Trainer], None] | None = None, **arguments: Any
) -> Trainer:
    """Two epochs of the trainer of that name, which `before` may change."""
    trainer = TRAINERS[name](callbacks=callbacks, seed=3)
    if before is not None:
        before(trainer)
    trainer.train(regression_data(rows), 2, **{"per_device_batch_size": 2, **arguments})
    return trainer


def tensors_of(trainer: Trainer) -> dict[str, Any]:
    """All that training changes, by names of our own."""
    found: dict[str, Any] = {"model": trainer.get_model().state_dict(), "optimizer": trainer.optimizer.state_dict()}
    found["parameters"] = [each.detach() for group in trainer.optimizer.param_groups for each in group["params"]]
    for name in ("target", "critic", "critic_optimizer"):
        if hasattr(trainer, name):
            found[name] = getattr(trainer, name).state_dict()
    if isinstance(trainer, TwoOptimizers):
        found |= {"head": trainer.heads["second"].state_dict()}
        found |= {name: part.state_dict() for name, part in trainer.of_head.items()}
    if isinstance(trainer.loss_func, CentreLoss):
        found["loss"] = trainer.loss_func.state_dict()
    return found
