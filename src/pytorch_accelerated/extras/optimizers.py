"""Groups of a model's parameters for an optimizer, by patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.ranks import Optimizers, listed

__all__ = ["Optimizers", "param_groups"]


def param_groups(
    model: nn.Module,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    lr: float | None = None,
    no_decay: bool = False,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Groups of the parameters of a model that are trained, for an optimizer.

    ::

        groups = param_groups(model, {"^head": {"lr": 1e-3}}, no_decay=True)
        optimizer = torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.05)

    Args:
        model: whose parameters with `requires_grad` are grouped.
        settings: the settings of a group by a regular expression that is searched in the names of parameters; the first
            one that is found counts. Parameters in which none is found belong to the group "others".
        lr: the learning rate of the last layer, for `layer_decay`, where `settings` have none.
        no_decay: whether biases and the parameters of norms (those of one dimension) get a weight decay of 0.
        layer_decay: a factor for the learning rate of each layer before the last one. A layer is an attribute of the
            model, or an item of a list or sequence in it. Source: Clark et al. (2020), "ELECTRA", arXiv 2003.10555.

    Returns:
        The groups, each with its ``name``; in the order of their first parameters.

    Raises:
        ConfigurationError: for an expression that no name has, or `layer_decay` without `lr`.
    """
    settings = dict(settings or {})
    if layer_decay is not None and lr is None:
        raise ConfigurationError("`layer_decay` needs `lr`, the learning rate of the last layer.")
    parameters = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    names = [name for name, _ in parameters]
    unused = [each for each in settings if not any(re.search(each, name) for name in names)]
    if unused:
        raise ConfigurationError(
            f"{listed(unused)} in `settings` is found in no name of a trained parameter, of which there are "
            f"{listed(names)}. Correct it, or leave it out."
        )
    depths = _depths(names)
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters:
        pattern = next((each for each in settings if re.search(each, name)), None)
        group = dict(settings[pattern]) if pattern is not None else {}
        title = pattern or "others"
        if lr is not None:
            group.setdefault("lr", lr)
        if layer_decay is not None:
            group["lr"] *= layer_decay ** (max(depths.values()) - depths[name])
            title += f", layer {depths[name]}"
        if no_decay and parameter.ndim < 2:
            group["weight_decay"] = 0.0
            title += ", no decay"
        groups.setdefault(title, {"name": title, "params": [], **group})["params"].append(parameter)
    return list(groups.values())


def _depths(names: Sequence[str]) -> dict[str, int]:
    """The number of the layer that each parameter belongs to. Those that the model itself has belong to the first."""
    layers: dict[str, int] = {}
    depths = {}
    for name in names:
        steps = name.split(".")
        end = 1 + next((index for index, step in enumerate(steps) if step.isdigit()), 0)
        depths[name] = layers.setdefault(".".join(steps[:end]), len(layers)) if len(steps) > 1 else 0
    return depths
