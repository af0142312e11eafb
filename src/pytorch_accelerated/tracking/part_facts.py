"""Facts about model, loss, optimizer and scheduler, and the hyper-parameters of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.models.wrappers import bare_model
from pytorch_accelerated.run_config import TrainerRunConfig, plain_value


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


def hyperparameters_of(
    run_config: TrainerRunConfig, model: nn.Module, optimizer: Any, scheduler: Any, own: Mapping[str, Any]
) -> dict[str, Any]:
    """The run config, the classes of model, optimizer and scheduler with their numbers, and the user's own values.

    Values are None, bools, numbers and strings. Names of nested values are joined by dots; lists become strings.

    Args:
        run_config: of the run.
        model: wrapped or not.
        optimizer: any object; of its parameter groups, everything but the parameters is included.
        scheduler: any object, or None.
        own: the user's values, by name; they replace others of the same name.
    """
    facts = part_facts(model, optimizer=optimizer, scheduler=scheduler)
    total, trainable = facts.parameters, facts.trainable_parameters
    nested = {
        **run_config.to_dict(),
        "model": facts.model,
        "model.parameters": total,
        "model.trainable_parameters": trainable,
        "model.trainable_share": trainable / total if total else 0.0,
        "optimizer": facts.optimizer,
        "scheduler": facts.scheduler,
    }
    for index, (group, size) in enumerate(zip(facts.groups, facts.group_sizes, strict=True)):
        prefix = f"optimizer.group_{index}" if index else "optimizer"
        nested[prefix + ".parameters"] = size
        nested.update({f"{prefix}.{name}": value for name, value in group.items()})
    return dict(_flat({**nested, **own}))


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # a learning rate may be a tensor; this is before the first update
        plain = plain_value(value)
        yield f"{prefix}{name}", str(plain) if isinstance(plain, list) else plain
