"""PEFT models, whose checkpoints hold everything but the frozen base."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.checkpointing.weights import canonical_state_dict
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.huggingface.checkpoints.weight_files import ADAPTER_NAME, read_safetensors
from pytorch_accelerated.models.sharding import own_part
from pytorch_accelerated.optional import require

BASE_KEY = "frozen_base"
_VALUES_LOOKED_AT = 64


def has_adapters(model: Any) -> bool:
    """Whether this is a PEFT model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def frozen_base(model: nn.Module) -> set[str]:
    """The names of the frozen base in the state of a PEFT model; none for other models."""
    if not has_adapters(model):
        return set()
    parts = {f".{name}." for name in model.peft_config}  # type: ignore[union-attr]  # a dict
    frozen = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and not any(part in f"{name}." for part in parts)
    }
    # Quantized layers keep the statistics of a parameter under names that begin with its own.
    beginnings = ((name, itertools.accumulate(name.split("."), "{}.{}".format)) for name in canonical_state_dict(model))
    return {name for name, starts in beginnings if not frozen.isdisjoint(starts)}


def fingerprint_of(model: nn.Module, names: Collection[str]) -> str:
    """A hash of a few values of each of these tensors, to detect another base."""
    digest = hashlib.sha256()
    for name, value in canonical_state_dict(model).items():
        if name in names and isinstance(value, torch.Tensor):
            some = own_part(value).detach().flatten()[:_VALUES_LOOKED_AT].cpu().contiguous()
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_adapters(model: Any, folder: Path) -> None:
    """Load the adapters of `model` from files of PEFT."""
    peft = require("peft", needed_by=type(model).__name__)
    for name in model.peft_config:
        path = (folder if name == "default" else folder / name) / ADAPTER_NAME
        loaded = peft.set_peft_model_state_dict(model, read_safetensors(path), adapter_name=name)
        if loaded.unexpected_keys:
            raise InvalidCheckpointError(
                f"{path} has weights that the adapter {name!r} of this {type(model).__name__} does not have: "
                f"{', '.join(loaded.unexpected_keys)}. Make it with the same configuration as when it was saved."
            )
