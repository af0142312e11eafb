"""Checkpoint folders: a training state of the native loop, and the files that people and other tools read.

A folder is written atomically. A run resumes from the native parts. Folders of transformers do not have these and are
read file by file; no file is ever executed.
"""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pytorch_accelerated.callbacks.warning import stacklevel_of_user
from pytorch_accelerated.checkpointing import disk
from pytorch_accelerated.checkpointing.codec import encode
from pytorch_accelerated.checkpointing.layout import MANIFEST_NAME, SHARDS_FILE, SHARDS_NAME, Manifest
from pytorch_accelerated.checkpointing.optimizers import OPTIMIZER_FILE as OPTIMIZER_NAME
from pytorch_accelerated.checkpointing.portable import save_portable
from pytorch_accelerated.checkpointing.publish import explained, make_folders, replacing
from pytorch_accelerated.checkpointing.reading import children_of, is_file
from pytorch_accelerated.checkpointing.state_folder import part_names, read_state
from pytorch_accelerated.checkpointing.tensor_file import chunks
from pytorch_accelerated.checkpointing.verify import find_damage, read_manifest, verify
from pytorch_accelerated.checkpointing.weights import canonical_state_dict, load_canonical
from pytorch_accelerated.errors import ConfigurationError, InvalidCheckpointError
from pytorch_accelerated.huggingface.arguments.argument import unsupported_names
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments
from pytorch_accelerated.huggingface.checkpoints.folders import checkpoint_step, sort_checkpoints
from pytorch_accelerated.huggingface.checkpoints.weight_files import (
    ADAPTER_NAME,
    INDEX_NAME,
    OLD_WEIGHTS_NAME,
    WEIGHT_FILES,
    WEIGHTS_NAME,
    read_weights,
)
from pytorch_accelerated.huggingface.models.adapters import frozen_base, has_adapters, load_adapters
from pytorch_accelerated.models.sharding import has_shards, whole

TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.bin"
_RUN_PART = "run"


# -------------------------------------------------------------------------------------------------------------- writing


class StagedWeights(NamedTuple):
    """How a checkpoint that is being written gets its weights.

    Attributes:
        folder_of_run: where the native parts hold them.
        gathered: those of a sharded model, for a folder without native parts.
    """

    folder_of_run: Path | None
    gathered: dict[str, Any] | None


def gathered_weights(model: nn.Module) -> dict[str, Any] | None:
    """The weights of a sharded model, for which all ranks must call it; None for others."""
    return whole(canonical_state_dict(model)) if has_shards(model) else None


def save_weights(model: nn.Module, folder: Path, state_dict: Mapping[str, Any] | None) -> None:
    """Write the weights, by default the model's, by its ``save_pretrained``, else to ``model.safetensors``."""
    weights = dict(whole(canonical_state_dict(model)) if state_dict is None else state_dict)
    if hasattr(model, "save_pretrained"):
        make_folders(folder.resolve())
        model.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]  # not torch's own
        return
    write_whole(folder / WEIGHTS_NAME, chunks(encode(weights, path="model").tensors))


def save_description(model: nn.Module, folder: Path) -> None:
    """Write the files besides the weights that ``from_pretrained`` needs."""
    if hasattr(model, "peft_config"):
        model.save_pretrained(folder)  # type: ignore[operator]  # only the adapters
        return
    if not hasattr(model, "save_pretrained"):
        return
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)


def save_companions(folder: Path, args: TrainingArguments, processing_class: Any) -> None:
    """Write the arguments, and the tokenizer or the like."""
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(folder)
    contents = args.to_dict()
    save_portable(folder / TRAINING_ARGS_NAME, _with_attributes(args, contents))
    text = json.dumps(contents, indent=2, sort_keys=True) + "\n"
    (folder / TRAINING_ARGS_NAME).with_suffix(".json").write_text(text, encoding="utf-8")


def _with_attributes(args: TrainingArguments, contents: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A dict whose values are also attributes, as in the object that `transformers` saves.

    OrderedDict is the only class that ``torch.load(weights_only=True)`` accepts with attributes.
    """
    values = OrderedDict(contents)
    others = {name: vars(args)[name] for name in unsupported_names(type(args))}
    sizes = {"train_batch_size": args.train_batch_size, "eval_batch_size": args.eval_batch_size}
    attributes = {**others, **sizes, **contents}
    vars(values).update((name, value) for name, value in attributes.items() if not hasattr(OrderedDict, name))
    return values


def write_whole(path: Path, contents: Iterable[bytes | memoryview]) -> None:
    """Write or replace a file atomically, and create missing folders. Call it on one rank."""
    with explained(path), replacing(path.resolve()) as file:
        for data in contents:
            disk.write(file, data)


# -------------------------------------------------------------------------------------------------------------- finding


def find_checkpoint(source: str | Path | bool, output_dir: Path) -> Path:
    """The checkpoint to resume from: `source`, or with True the newest undamaged one in `output_dir`.

    A checkpoint is damaged if a file that a resume reads was changed. The newest undamaged one beside it takes its
    place. One warning lists the damaged ones, and those with higher numbers that have no manifest, so that their age is
    unknown. Another warning lists changed files that a resume does not read.

    Raises:
        ConfigurationError: a ValueError, if there is none.
        InvalidCheckpointError: if there are checkpoints, but all are damaged.
    """
    skipped: dict[str, str] = {}
    for candidate in _candidates(source, output_dir):
        try:
            not_read = _refuse_damaged(candidate)
        except InvalidCheckpointError as error:
            skipped[candidate.name] = str(error)
            continue
        if isinstance(source, bool) or skipped:
            skipped = {**_without_place(candidate), **skipped}
        for what, complaints in (
            ("; skipped:", list(skipped.values())),
            (", some of whose files were changed. These are not read:", not_read),
        ):
            if complaints:
                message = "\n".join([f"Resuming from {candidate}{what}", *complaints])
                warnings.warn(message, stacklevel=stacklevel_of_user())
        return candidate
    complaints = ["No checkpoint is valid:", *skipped.values(), "Give the folder of a valid one, or start without."]
    raise InvalidCheckpointError("\n".join(complaints))


def _candidates(source: str | Path | bool, output_dir: Path) -> list[Path]:
    """The folders that `find_checkpoint` tries, in order."""
    if isinstance(source, bool):
        candidates = _newest_first(output_dir)
        if not candidates:
            raise ConfigurationError(
                f"No valid checkpoint found in output directory ({output_dir}), from which the run should resume. "
                "Leave `resume_from_checkpoint` out to start, or give the path of a checkpoint."
            )
        return candidates
    folder = Path(source)
    if not _holds_weights(folder):
        raise ConfigurationError(
            f"Can't find a valid checkpoint at {folder}: it has none of {', '.join(WEIGHT_FILES)}. Give the "
            "folder of a checkpoint, 'checkpoint-<step>'."
        )
    others = [path for path in _newest_first(folder.parent) if path.resolve() != folder.resolve()]
    return [folder, *others] if checkpoint_step(folder) is not None else [folder]


def holds_run(folder: Path) -> bool:
    """Whether a checkpoint has the native parts, which a run resumes from exactly."""
    return is_file(folder / MANIFEST_NAME) and _RUN_PART in part_names(read_manifest(folder))


def _newest_first(output_dir: Path) -> list[Path]:
    """The checkpoints in a folder, sorted by their manifests; those without one by their number."""
    return [path for path in reversed([Path(path) for path in sort_checkpoints(output_dir)]) if _looks_saved(path)]


def _without_place(taken: Path) -> dict[str, str]:
    """Complaints about checkpoints beside `taken` that have higher numbers but no valid manifest, by name."""
    complaints = {}
    for path in map(Path, sort_checkpoints(taken.parent)):
        is_higher = (checkpoint_step(path) or 0) > (checkpoint_step(taken) or 0)
        try:
            if not is_higher or not children_of(path):
                continue
            if not is_file(path / MANIFEST_NAME):
                raise InvalidCheckpointError(
                    f"{path} has no {MANIFEST_NAME}, so it is unknown when it was written, and whether it is "
                    "complete. To resume from it anyway, give its path."
                )
            read_manifest(path)
        except InvalidCheckpointError as error:
            complaints[path.name] = str(error)
    return complaints


def _looks_saved(folder: Path) -> bool:
    """Whether it is a checkpoint, or cannot be read, which is an error later."""
    try:
        return is_file(folder / MANIFEST_NAME) or _holds_weights(folder)
    except InvalidCheckpointError:
        return True


def _holds_weights(folder: Path) -> bool:
    return any(is_file(folder / name) for name in WEIGHT_FILES)


def _refuse_damaged(folder: Path) -> list[str]:
    """Raise an error for changed files that a resume reads, and return complaints about others.

    A folder without a manifest cannot be checked.
    """
    if not is_file(folder / MANIFEST_NAME):
        return []
    manifest = read_manifest(folder)
    names = {entry.name for entry in manifest.files}
    read = _names_read(manifest)
    verify(folder, read)
    return find_damage(folder, manifest, names - read)


def _names_read(manifest: Manifest) -> set[str]:
    """The files of a checkpoint that a resume reads."""
    names = {entry.name for entry in manifest.files}
    read = {TRAINER_STATE_NAME}
    parts = part_names(manifest)
    if _RUN_PART in parts:
        read |= {f"{part}{suffix}" for part in parts for suffix in (".json", ".safetensors")}
        read |= {name for name in names if name == SHARDS_NAME or SHARDS_FILE.fullmatch(name)}
        read |= set() if "optimizer" in parts else {OPTIMIZER_NAME}
    else:
        read |= {INDEX_NAME, OLD_WEIGHTS_NAME}
        read |= {name for name in names if name.endswith((".safetensors", ".pt", ".pth"))}
    return read & names


# -------------------------------------------------------------------------------------------------------------- reading


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint, or of a model saved by transformers. All or nothing.

    Raises:
        InvalidCheckpointError: if they are damaged, missing, or belong to another model.
    """
    if holds_run(folder):
        _, parts = read_state(folder, ["model"])
        load_canonical(model, parts["model"], may_lack=frozen_base(model))
        return
    if has_adapters(model) and (folder / ADAPTER_NAME).is_file():
        load_adapters(model, folder)
        return
    tensors = read_weights(folder)
    # Of tensors that share memory, only one is stored.
    live = canonical_state_dict(model)
    by_memory = {_memory(live[name]): value for name, value in tensors.items() if name in live}
    for name, tensor in live.items():
        if name not in tensors and _memory(tensor) in by_memory:
            tensors[name] = by_memory[_memory(tensor)]
    load_canonical(model, tensors)


def _memory(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride()
