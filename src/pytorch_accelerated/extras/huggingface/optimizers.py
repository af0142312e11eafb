"""Optimizers of the Hugging Face trainer that torch does not have, and Muon, which is for some parameters only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.facts import require
from pytorch_accelerated.ranks import Optimizers

_ADAM = ("betas", "eps")
# By the family in the name, as in "paged_adamw_8bit".
_OF_BITSANDBYTES: dict[str, tuple[str, tuple[str, ...]]] = {
    "adamw": ("AdamW", _ADAM),
    "ademamix": ("AdEMAMix", _ADAM),
    "lion": ("Lion", ("betas",)),
    "rmsprop": ("RMSprop", ()),
}

_OF_SCHEDULEFREE: dict[str, tuple[str, tuple[str, ...]]] = {
    "schedule_free_adamw": ("AdamWScheduleFree", _ADAM),
    "schedule_free_radam": ("RAdamScheduleFree", _ADAM),
    "schedule_free_sgd": ("SGDScheduleFree", ()),
}


def class_and_arguments(
    args: Any, name: str, model: nn.Module, adam: dict[str, Any], given: dict[str, Any]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of the optimizer `name`, and its arguments besides the parameters.

    Args:
        args: of the run.
        name: one of those that torch doesn't have.
        model: whose parameters are trained.
        adam: the arguments of Adam.
        given: further arguments, which win.

    Raises:
        MissingDependencyError: if it is of a package that is not installed.
    """
    needed_by = f"optim={str(name)!r}"
    taken: tuple[str, ...] = ()
    others: dict[str, Any] = {}
    if name == "adafactor":
        classes = require("transformers.optimization", needed_by=needed_by)
        kind, others = "Adafactor", {"scale_parameter": False, "relative_step": False}
    elif name == "muon":
        hidden = {id(each) for each in _hidden_matrices(model)}
        return MuonWithAdamW, {"lr": args.learning_rate, "hidden": hidden, **adam, **given}
    elif name.startswith("schedule_free"):
        classes = require("schedulefree", needed_by=needed_by)
        kind, taken = _OF_SCHEDULEFREE[name]
        others = {} if name == "schedule_free_radam" else {"warmup_steps": int(args.warmup_steps)}
    else:
        classes = require("bitsandbytes", needed_by=needed_by).optim
        family = name.removeprefix("paged_").partition("_")[0]
        kind, taken = _OF_BITSANDBYTES[family]
        others = {"optim_bits": 8 if name.endswith("8bit") else 32}
        others |= {} if family == "rmsprop" else {"is_paged": name.startswith("paged_")}
        if family == "ademamix":  # of two mean gradients
            adam["betas"] += (given.pop("beta3", 0.9999),)
    chosen = {one: adam[one] for one in taken}
    return getattr(classes, kind), {"lr": args.learning_rate, **chosen, **others, **given}


class MuonWithAdamW(Optimizers):
    """Muon for the matrices of hidden layers, AdamW for the rest, at one learning rate.

    Args:
        params: groups of parameters.
        hidden: the ids of the matrices.
        lr: the learning rate; Muon's is adjusted so that updates are as large as AdamW's.
        adam: further settings of AdamW.
    """

    def __init__(self, params: Iterable[dict[str, Any]], *, hidden: Collection[int], lr: float, **adam: Any) -> None:
        groups = list(params)

        def those(is_hidden: bool) -> list[dict[str, Any]]:
            chosen = [[each for each in group["params"] if (id(each) in hidden) is is_hidden] for group in groups]
            return [{**group, "params": one} for group, one in zip(groups, chosen, strict=True) if one]

        optimizers: dict[str, torch.optim.Optimizer] = {}
        if those(True):
            optimizers["muon"] = torch.optim.Muon(those(True), lr=lr, adjust_lr_fn="match_rms_adamw")
        if those(False):
            optimizers["adamw"] = torch.optim.AdamW(those(False), lr=lr, **adam)
        super().__init__(optimizers)
        self.defaults = {"lr": lr}


def _hidden_matrices(model: nn.Module) -> list[torch.Tensor]:
    """The weights of embeddings, and of all linear layers but the last one, or the output layer of a language model."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    last = getattr(model, "get_output_embeddings", lambda: None)() or (linear[-1] if linear else None)
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [module.weight for module in linear if module is not last and id(module.weight) not in tied]


def keep_embeddings_whole(model: nn.Module) -> None:
    """Keep 32-bit states for embeddings in 8-bit optimizers: their gradients are too uneven for 8 bits."""
    manager = require("bitsandbytes.optim", needed_by="An 8-bit optimizer").GlobalOptimManager
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})
