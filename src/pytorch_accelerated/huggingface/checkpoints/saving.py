"""Checkpoint folders: a training state of the native loop, and the files that people and other tools read.

A folder is written atomically. A run resumes from the native parts. Folders of transformers do not have these and are
read file by file; no file is ever executed.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.callbacks.warning import stacklevel_of_user
from pytorch_accelerated.checkpointing import disk
from pytorch_accelerated.checkpointing.codec import encode
from pytorch_accelerated.checkpointing.disk import children_of, is_file
from pytorch_accelerated.checkpointing.formats import chunks
from pytorch_accelerated.checkpointing.layout import MANIFEST_NAME, SHARDS_NAME
from pytorch_accelerated.checkpointing.optimizers import OPTIMIZER_FILE as OPTIMIZER_NAME
from pytorch_accelerated.checkpointing.portable import save_portable
from pytorch_accelerated.checkpointing.publish import explained, make_folders, replacing
from pytorch_accelerated.checkpointing.state_folder import part_names, read_state
from pytorch_accelerated.checkpointing.training_state import TRAINING_WEIGHTS
from pytorch_accelerated.checkpointing.verify import read_manifest, verify
from pytorch_accelerated.checkpointing.weights import canonical_state_dict, load_canonical
from pytorch_accelerated.errors import ConfigurationError, InvalidCheckpointError
from pytorch_accelerated.huggingface.arguments.argument import unsupported_names
from pytorch_accelerated.huggingface.checkpoints.weights import (
    ADAPTER_NAME,
    INDEX_NAME,
    WEIGHT_FILES,
    WEIGHTS_NAME,
    frozen_base,
    has_adapters,
    load_adapters,
    read_weights,
)
from pytorch_accelerated.huggingface.trainer_utils import checkpoint_step, sort_checkpoints
from pytorch_accelerated.huggingface.training_args import TrainingArguments
from pytorch_accelerated.models.sharding import has_shards, is_sharded, whole

TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.bin"
_RUN_PART = "run"
_BEGINNINGS = ("model", "pytorch_model")  # of the files that `read_weights` reads


# -------------------------------------------------------------------------------------------------------------- writing


@dataclasses.dataclass
class StagedCheckpoint:
    """A checkpoint that is being written: first the files of methods that users may override, then what a resume lacks.

    Attributes:
        folder: where its files go until all are there.
        model: the model that trains.
        lacks_weights: whether the files are those of `model` but for its weights, which are those of the native parts.
        has_optimizer: whether the file of the optimizer has its whole state.
    """

    folder: Path
    model: nn.Module
    lacks_weights: bool = False
    has_optimizer: bool = False

    def is_of(self, model: nn.Module, output_dir: str | Path | None) -> bool:
        """Whether the files of the model that trains go to the checkpoint itself."""
        return model is self.model and output_dir is not None and Path(output_dir) == self.folder

    @property
    def weights_part(self) -> str | None:
        """The native part for the weights: none if the files of a user's method have all of them."""
        if self.lacks_weights:
            return "model"
        live, saved = canonical_state_dict(self.model), own_weights(self.model, self.folder)
        is_whole = live.keys() == saved.keys() and all(_is_same(value, saved[name]) for name, value in live.items())
        return None if is_whole else TRAINING_WEIGHTS


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


def save_states(folder: Path, states: Mapping[str, Any]) -> None:
    """Write each of the states to the file that it is named by."""
    for name, state in states.items():
        save_portable(folder / name, state)


def write_whole(path: Path, contents: Iterable[bytes | memoryview]) -> None:
    """Write or replace a file atomically, and create missing folders. Call it on one rank."""
    with explained(path), replacing(path.resolve()) as file:
        for data in contents:
            disk.write(file, data)


# -------------------------------------------------------------------------------------------------------------- finding


def find_checkpoint(source: str | Path | bool, output_dir: Path) -> Path:
    """The checkpoint to resume from: `source`, or with True the newest undamaged one in `output_dir`.

    A checkpoint is damaged if a file that a resume reads was changed since `on_save`; one without a manifest cannot be
    checked. The newest undamaged one beside it takes its place. A warning lists the damaged ones, and those with higher
    numbers that have no manifest, so that their age is unknown.

    Raises:
        ConfigurationError: a ValueError, if there is none.
        InvalidCheckpointError: if there are checkpoints, but all are damaged.
    """
    skipped: dict[str, str] = {}
    for candidate in _candidates(source, output_dir):
        try:
            if is_file(candidate / MANIFEST_NAME):
                verify(candidate, _names_read(candidate))
        except InvalidCheckpointError as error:
            skipped[candidate.name] = str(error)
            continue
        if isinstance(source, bool) or skipped:
            skipped = {**_without_place(candidate), **skipped}
        if skipped:
            message = "\n".join([f"Resuming from {candidate}; skipped:", *skipped.values()])
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
    if not (is_file(folder / MANIFEST_NAME) or _holds_weights(folder)):
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


def _names_read(folder: Path) -> set[str]:
    """The files of a checkpoint that a resume reads."""
    manifest = read_manifest(folder)
    parts = part_names(manifest)
    suffixes = (".safetensors", ".bin") if _RUN_PART in parts else (".safetensors", ".bin", ".pt", ".pth")
    read = {TRAINER_STATE_NAME, SHARDS_NAME, INDEX_NAME, OPTIMIZER_NAME, *(f"{part}.json" for part in parts)}
    names = {entry.name for entry in manifest.files} - {TRAINING_ARGS_NAME}
    return {name for name in names if name in read or name.endswith(suffixes)}


# -------------------------------------------------------------------------------------------------------------- reading


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights of a checkpoint, or of a model saved by transformers. All or nothing.

    What a user's method has saved counts, such as averaged weights, unless it is another model than this one.

    Raises:
        InvalidCheckpointError: if they are damaged, missing, or belong to another model.
    """
    if not holds_run(folder):
        if has_adapters(model) and (folder / ADAPTER_NAME).is_file():
            load_adapters(model, folder)
        else:
            load_canonical(model, weights_in(folder, model))
        return
    manifest = read_manifest(folder)
    part = next((part for part in ("model", TRAINING_WEIGHTS) if part in part_names(manifest)), None)
    weights = {} if part is None else read_state(folder, [part])[1][part]
    if part != "model":
        verify(folder, [entry.name for entry in manifest.files if entry.name.startswith(_BEGINNINGS)])
        weights.update(own_weights(model, folder))
    load_canonical(model, weights, may_lack=frozen_base(model))


def weights_in(folder: Path, model: nn.Module) -> dict[str, Any]:
    """The weights in the files of a folder, with all names of tensors in `model` that share memory.

    Raises:
        InvalidCheckpointError: if there are none, or they cannot be read.
    """
    tensors = read_weights(folder)  # of tensors that share memory, only one
    live = canonical_state_dict(model)
    by_memory = {_memory(live[name]): value for name, value in tensors.items() if name in live}
    for name, tensor in live.items():
        if name not in tensors and _memory(tensor) in by_memory:
            tensors[name] = by_memory[_memory(tensor)]
    return tensors


def own_weights(model: nn.Module, folder: Path) -> dict[str, Any]:
    """The weights that a user's method has saved; none if they are not some of `model`'s, or cannot be read."""
    try:
        saved = weights_in(folder, model)
    except InvalidCheckpointError:
        return {}
    live = canonical_state_dict(model)
    fits = all(name in live and _shape(value) == _shape(live[name]) for name, value in saved.items())
    return saved if fits else {}


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)


def _is_same(live: Any, saved: Any) -> bool:
    if is_sharded(live) or not isinstance(live, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return False
    return live.dtype == saved.dtype and torch.equal(live.detach().cpu(), saved)


def _memory(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride()
