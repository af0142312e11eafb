"""What distinguishes a run from others, as one flat dict of plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.run_config import TrainerRunConfig, plain_value
from pytorch_accelerated.tracking.part_facts import part_facts


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
