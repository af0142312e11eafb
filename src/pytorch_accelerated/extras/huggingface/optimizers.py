"""Optimizers of the Hugging Face trainer that torch does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pytorch_accelerated.facts import require

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
    args: Any, name: str, adam: dict[str, Any], given: dict[str, Any]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of the optimizer `name`, and its arguments besides the parameters.

    Args:
        args: of the run.
        name: one of those that torch doesn't have.
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


def keep_embeddings_whole(model: nn.Module) -> None:
    """Keep 32-bit states for embeddings in 8-bit optimizers: their gradients are too uneven for 8 bits."""
    manager = require("bitsandbytes.optim", needed_by="An 8-bit optimizer").GlobalOptimManager
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})
