"""Facts about the parts of a trainer: model, loss, optimizer and scheduler."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from pytorch_accelerated.models.wrappers import bare_model


@dataclasses.dataclass(frozen=True)
class PartFacts:
    """What is trained, and by what.

    Attributes:
        model, loss, optimizer, scheduler: names of classes, or of a function; None for a part that does not exist.
        parameters: the number of elements of all parameters.
        trainable_parameters: the number of those that need gradients.
        groups: the settings of each parameter group of the optimizer.
        group_sizes: the number of elements in each group.
    """

    model: str
    parameters: int
    trainable_parameters: int
    loss: str | None
    optimizer: str | None
    scheduler: str | None
    groups: list[dict[str, Any]]
    group_sizes: list[int]


def part_facts(model: nn.Module, *, loss_func: Any = None, optimizer: Any = None, scheduler: Any = None) -> PartFacts:
    """Facts about parts that may be wrapped. Does not wait for the device.

    >>> facts = part_facts(nn.Linear(3, 1), loss_func=nn.functional.mse_loss)
    >>> facts.model, facts.parameters, facts.loss, facts.optimizer
    ('Linear', 4, 'mse_loss', None)
    """
    bare = bare_model(model)
    parameters = list(bare.parameters())
    groups = getattr(optimizer, "param_groups", None) or []
    return PartFacts(
        type(bare).__qualname__,
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        None if loss_func is None else getattr(loss_func, "__qualname__", type(loss_func).__qualname__),
        _class_name(getattr(optimizer, "optimizer", optimizer)),  # accelerate's wrappers name their own class
        _class_name(getattr(scheduler, "scheduler", scheduler)),
        [{name: value for name, value in group.items() if name != "params"} for group in groups],
        [sum(parameter.numel() for parameter in group["params"]) for group in groups],
    )


def _class_name(value: Any) -> str | None:
    return None if value is None else type(value).__qualname__
