"""What distinguishes a run from others, as one flat dict of plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.models.wrappers import bare_model
from pytorch_accelerated.run_config import TrainerRunConfig, plain_value


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
    parameters = list(bare_model(model).parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    nested = {
        **run_config.to_dict(),
        "model": _class_name(bare_model(model)),
        "model.parameters": total,
        "model.trainable_parameters": trainable,
        "model.trainable_share": trainable / total if total else 0.0,
        "optimizer": _class_name(getattr(optimizer, "optimizer", optimizer)),  # accelerate's wrapper names its own
        "scheduler": _class_name(getattr(scheduler, "scheduler", scheduler)),
    }
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        prefix = f"optimizer.group_{index}" if index else "optimizer"
        nested[prefix + ".parameters"] = sum(parameter.numel() for parameter in group["params"])
        nested.update({f"{prefix}.{name}": value for name, value in group.items() if name != "params"})
    return dict(_flat({**nested, **own}))


def _class_name(value: Any) -> str | None:
    return None if value is None else type(value).__qualname__


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # a learning rate may be a tensor; this is before the first update
        plain = plain_value(value)
        yield f"{prefix}{name}", str(plain) if isinstance(plain, list) else plain
