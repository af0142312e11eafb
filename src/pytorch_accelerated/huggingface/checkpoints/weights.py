"""Files with the weights of a model, and PEFT models, whose checkpoints hold everything but the frozen base."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.checkpointing.disk import explained_reading, is_file
from pytorch_accelerated.checkpointing.formats import read_tensors
from pytorch_accelerated.checkpointing.portable import load_portable
from pytorch_accelerated.checkpointing.verify import filling_from, open_plain_file
from pytorch_accelerated.checkpointing.weights import canonical_state_dict
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.models.sharding import own_part
from pytorch_accelerated.optional import require

WEIGHTS_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
OLD_WEIGHTS_NAME = "pytorch_model.bin"
WEIGHT_FILES = (WEIGHTS_NAME, INDEX_NAME, OLD_WEIGHTS_NAME, ADAPTER_NAME)


def read_weights(folder: Path) -> dict[str, Any]:
    """The weights in a folder, by name, from any of the usual files."""
    if is_file(folder / WEIGHTS_NAME):
        return read_safetensors(folder / WEIGHTS_NAME)
    if is_file(folder / INDEX_NAME):
        return {
            name: value
            for file in _files_of_index(folder / INDEX_NAME)
            for name, value in read_safetensors(folder / file).items()
        }
    if is_file(folder / OLD_WEIGHTS_NAME):
        return load_portable(folder / OLD_WEIGHTS_NAME)
    raise InvalidCheckpointError(
        f"{folder} has no weights: none of {', '.join(WEIGHT_FILES)} is there. Give the folder of a checkpoint."
    )


def read_safetensors(path: Path) -> dict[str, Any]:
    """The tensors in a safetensors file, by name."""
    with open_plain_file(path) as file:
        return dict(read_tensors(filling_from(file, path), path.stat().st_size, what=str(path)))


def _files_of_index(path: Path) -> list[str]:
    """The files that an index names. They must be in its folder."""
    try:
        with explained_reading(path):
            text = path.read_text(encoding="utf-8")
        files = sorted(set(json.loads(text)["weight_map"].values()))
        if any(Path(file).name != file for file in files):
            raise ValueError("it names files elsewhere")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"{path} is not an index of weights ({type(error).__name__}: {error}). Use another checkpoint."
        ) from error
    return files


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
