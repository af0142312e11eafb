"""Files with the weights of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytorch_accelerated.checkpointing.formats import read_tensors
from pytorch_accelerated.checkpointing.portable import load_portable
from pytorch_accelerated.checkpointing.reading import explained_reading, is_file
from pytorch_accelerated.checkpointing.verify import filling_from, open_plain_file
from pytorch_accelerated.errors import InvalidCheckpointError

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
