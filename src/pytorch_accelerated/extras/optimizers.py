"""Groups of a model's parameters for an optimizer, and which of two optimizers gets them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.ranks import Optimizers, listed
from pytorch_accelerated.record import text

__all__ = ["Optimizers", "muon_and_adamw", "param_groups"]

# How torchvision, transformers and people call the part that is exchanged.
_HEADS = {"fc", "head", "heads", "classifier", "score", "qa_outputs", "lm_head", "output_layer", "final_layer"}
_MOST_NAMES = 20  # of parameters, in one line


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
        no_decay: whether biases and the parameters of norms (of one dimension) get a weight decay of 0.
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
            f"{listed(unused)} in `settings` is not in the name of any trained parameter. They are "
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


def muon_and_adamw(
    model: nn.Module, *, lr: float, weight_decay: float = 0.1, adamw: Sequence[str] | None = None
) -> dict[str, torch.optim.Optimizer]:
    """Muon for the hidden matrices of a model and AdamW for the rest, as `Trainer(optimizer=...)` takes them.

    ::

        trainer = Trainer(model, loss_func, optimizer=muon_and_adamw(model, lr=1e-3))

    The rule is Jordan's (2024, kellerjordan.github.io/posts/muon): scalars and vectors, embeddings, and the input and
    output layers belong to AdamW. So do parameters of three and more dimensions, such as convolutions, which
    torch's Muon does not take. The step of Muon is scaled to the size of AdamW's (Liu et al., 2025, arXiv 2502.16982),
    so that both have one learning rate and weight decay. Which parameters go where is printed, by the first process.

    Args:
        model: whose parameters with `requires_grad` are trained.
        lr: of both.
        weight_decay: of both.
        adamw: regular expressions for names of further parameters for AdamW, in the input and output layers.
            Default: the input layer are the embeddings, a convolution that comes first, or the first layer of an
            `nn.Sequential`; the head is what `fine_tune` takes for it.

    Returns:
        The optimizers by the names "muon" and "adamw".

    Raises:
        ConfigurationError: if input or output layer are unclear, if an expression is not in any name, or if nothing is
            left for one of the optimizers.
    """
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    embeddings = [each for each in model.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
    embedded = {id(parameter) for each in embeddings for parameter in each.parameters()}
    patterns = list(adamw) if adamw is not None else [f"^{re.escape(head_of(model, 'adamw=[{!r}]'))}([.]|$)"]
    layers = [name for name, each in parameters.items() if each.ndim > 1]
    if adamw is None and not embedded and layers and parameters[layers[0]].ndim == 2:
        patterns.append(f"^{re.escape(_first_in_order(model, layers[0]))}$")
    unused = [each for each in adamw or () if not any(re.search(each, name) for name in parameters)]
    hidden = [
        name
        for name, each in parameters.items()
        if each.ndim == 2 and id(each) not in embedded and not any(re.search(pattern, name) for pattern in patterns)
    ]
    rest = [name for name in parameters if name not in hidden]
    if unused or not hidden or not rest:
        why = f"{listed(unused)} in `adamw` is not in any name" if unused else "nothing is left for one of the two"
        raise ConfigurationError(f"{why}. The trained parameters are {listed(list(parameters))}.")
    if int(os.environ.get("RANK", 0)) == 0:
        for title, names in (("Muon", hidden), ("AdamW", rest)):
            count = sum(parameters[name].numel() for name in names)
            # Of many layers, the numbers are left out, so that all of them have one line.
            kinds = dict.fromkeys(re.sub(r"(^|[.])\d+(?=[.])", r"\1*", name) for name in names)
            shown = ", ".join(names if len(names) <= _MOST_NAMES else kinds)
            text.show(text.folded(f"{title} trains {count:,} parameters: {shown}"))
    settings: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    muon = torch.optim.Muon([parameters[name] for name in hidden], adjust_lr_fn="match_rms_adamw", **settings)
    return {"muon": muon, "adamw": torch.optim.AdamW([parameters[name] for name in rest], **settings)}


def _first_in_order(model: nn.Module, name: str) -> str:
    """The name of the first matrix, if its place in the model says that it comes first."""
    steps = name.split(".")[:-2]
    parents = [model.get_submodule(".".join(steps[:end])) for end in range(len(steps) + 1)]
    if not all(isinstance(each, nn.Sequential) for each in parents):
        raise ConfigurationError(
            f"Which part of the {type(model).__name__} is its input layer? It has no embedding, and does not say in "
            "which order its layers are called. Say it, and the head, by patterns for names of parameters, such as "
            f"adamw=[{'^' + re.escape(name) + '$'!r}, 'head']."
        )
    return name


def head_of(model: nn.Module, say: str = "head={!r}") -> str:
    """The name of the module that is the head, where the model says so.

    Args:
        model: the model.
        say: for the error, how to say it.

    Raises:
        ConfigurationError: if it is unclear.
    """
    children = {name: child for name, child in model.named_children() if next(child.parameters(), None) is not None}
    declared = getattr(model, "get_classifier", None)
    if callable(declared):
        head = declared()
        found: list[str] = [name for name, module in model.named_modules() if module is head and name in children]
    elif isinstance(model, nn.Sequential):
        found = list(children)[-1:]
    else:
        found = [name for name in children if name in _HEADS]
    if len(found) != 1 or len(children) == 1:
        raise ConfigurationError(
            f"Which part of the {type(model).__name__} is its head? Its children with parameters are "
            f"{', '.join(map(repr, children)) or '(none)'}. Say it by a pattern for names of parameters, such as "
            f"{say.format(next(iter(model.named_parameters()))[0].rpartition('.')[0])}."
        )
    return found[0]


def _depths(names: Sequence[str]) -> dict[str, int]:
    """The number of the layer that each parameter belongs to. Those that the model itself has belong to the first."""
    layers: dict[str, int] = {}
    depths = {}
    for name in names:
        steps = name.split(".")
        end = 1 + next((index for index, step in enumerate(steps) if step.isdigit()), 0)
        depths[name] = layers.setdefault(".".join(steps[:end]), len(layers)) if len(steps) > 1 else 0
    return depths
