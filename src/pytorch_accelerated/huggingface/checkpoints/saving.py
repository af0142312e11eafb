"""Checkpoint folders: a training state of the native loop, and the files that people and other tools read.

A folder is written atomically. A run resumes from the native parts. Folders of transformers do not have these and are
read file by file; no file is ever executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.errors import ConfigurationError, InvalidCheckpointError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.huggingface.arguments.argument import unsupported_names
from pytorch_accelerated.huggingface.trainer_utils import checkpoint_step, sort_checkpoints, warn
from pytorch_accelerated.huggingface.training_args import TrainingArguments
from pytorch_accelerated.ranks.sharding import has_shards, is_sharded, own_part, whole
from pytorch_accelerated.states.codec import chunks, encode, read_tensors
from pytorch_accelerated.states.disk import explained_reading, is_file
from pytorch_accelerated.states.layout import MANIFEST_NAME, SHARDS_NAME
from pytorch_accelerated.states.optimizers import OPTIMIZER_FILE
from pytorch_accelerated.states.portable import load_portable, save_portable
from pytorch_accelerated.states.publish import make_folders, write_whole
from pytorch_accelerated.states.state_folder import part_names, read_state
from pytorch_accelerated.states.training_state import TRAINING_WEIGHTS
from pytorch_accelerated.states.verify import (
    filling_from,
    find_state,
    open_plain_file,
    read_manifest,
    state_folders,
    verify,
)
from pytorch_accelerated.states.weights import canonical_state_dict, load_canonical

TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.bin"
OPTIMIZER_NAME = OPTIMIZER_FILE
_RUN_PART = "run"
_BEGINNINGS = ("model", "pytorch_model")  # of the files that `read_weights` reads
WEIGHTS_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
OLD_WEIGHTS_NAME = "pytorch_model.bin"
DEEPSPEED_NAME = "latest"  # where DeepSpeed has written a checkpoint of its own
WEIGHT_FILES = (WEIGHTS_NAME, INDEX_NAME, OLD_WEIGHTS_NAME, ADAPTER_NAME)
BASE_KEY = "frozen_base"
_VALUES_LOOKED_AT = 64


# -------------------------------------------------------------------------------------------------------------- writing


@dataclasses.dataclass
class StagedCheckpoint:
    """A checkpoint that is being written: first the files of methods that users may override, then what a resume lacks.

    Attributes:
        folder: where its files go until all are there.
        model: the model that trains.
        lacks_weights: whether the files belong to `model` except for its weights, which are in the native parts.
        has_optimizer: whether the file of the optimizer has its whole state.
        needs_both: whether the weights to evaluate differ from those that a resume needs.
    """

    folder: Path
    model: nn.Module
    needs_both: bool = False
    lacks_weights: bool = False
    has_optimizer: bool = False

    def is_of(self, model: nn.Module, output_dir: str | Path | None) -> bool:
        """Whether the files of the model that trains go to the checkpoint itself."""
        is_checkpoint = output_dir is not None and Path(output_dir) == self.folder
        return model is self.model and is_checkpoint and not self.needs_both

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


# -------------------------------------------------------------------------------------------------------------- finding


def find_checkpoint(folder: Path | None, output_dir: Path) -> Path:
    """The checkpoint to resume from: `folder`, or with None the newest undamaged one in `output_dir`.

    A checkpoint is damaged if a file that a resume reads was changed since `on_save`; one of transformers, without a
    manifest, cannot be checked, and is only taken where no other is. If `folder` is damaged and the newest in its
    folder, as scripts find it, the newest undamaged one takes its place. Warnings name the checkpoints passed over.

    Raises:
        ConfigurationError: a ValueError, if there is none.
        InvalidCheckpointError: if `folder` is damaged, or all checkpoints are.
    """
    if folder is not None:
        output_dir = folder.parent
        if not is_file(folder / MANIFEST_NAME):
            if not _holds_weights(folder):
                raise ConfigurationError(
                    f"Can't find a valid checkpoint at {folder}: it has none of {', '.join(WEIGHT_FILES)}."
                )
            return folder
        try:
            _check(folder)
            return folder
        except InvalidCheckpointError:
            if sort_checkpoints(output_dir)[-1:] != [str(folder)]:
                raise
    newest = find_state(output_dir, _check) if state_folders(output_dir) else None
    unchecked = [path for path in map(Path, sort_checkpoints(output_dir)) if _holds_weights_alone(path)]
    if newest is None and not unchecked:
        raise ConfigurationError(
            f"No valid checkpoint found in output directory ({output_dir}). Leave `resume_from_checkpoint` out to "
            "start, or give the path of a checkpoint."
        )
    if newest is None:
        return unchecked[-1]
    later = [path.name for path in unchecked if (checkpoint_step(path) or 0) > (checkpoint_step(newest) or 0)]
    if later:
        names = ", ".join(later)
        warn(
            f"Resuming from {newest}; skipped {names} without {MANIFEST_NAME}: give its path to resume from it anyway."
        )
    return newest


def holds_run(folder: Path) -> bool:
    """Whether a checkpoint has the native parts, which a run resumes from exactly."""
    return is_file(folder / MANIFEST_NAME) and _RUN_PART in part_names(read_manifest(folder))


def _holds_weights(folder: Path) -> bool:
    return any(is_file(folder / name) for name in (*WEIGHT_FILES, DEEPSPEED_NAME))


def _holds_weights_alone(folder: Path) -> bool:
    try:
        return _holds_weights(folder) and not is_file(folder / MANIFEST_NAME)
    except InvalidCheckpointError:  # it cannot be read
        return False


def _check(folder: Path) -> None:
    """Compare the files that a resume reads with the manifest."""
    manifest = read_manifest(folder)
    parts = part_names(manifest)
    suffixes = (".safetensors", ".bin") if _RUN_PART in parts else (".safetensors", ".bin", ".pt", ".pth")
    read = {TRAINER_STATE_NAME, SHARDS_NAME, INDEX_NAME, OPTIMIZER_NAME, *(f"{part}.json" for part in parts)}
    names = {entry.name for entry in manifest.files} - {TRAINING_ARGS_NAME}
    verify(folder, {name for name in names if name in read or name.endswith(suffixes)})


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


# ----------------------------------------------------------------------------------------------- files and adapters


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
    if is_file(folder / DEEPSPEED_NAME):
        return dict(of_deepspeed(folder).weights())
    raise InvalidCheckpointError(f"{folder} has no weights: none of {', '.join(WEIGHT_FILES)} is there.")


def of_deepspeed(folder: Path) -> Any:
    """The checkpoint that DeepSpeed has written there, with methods for its parts."""
    module = require("pytorch_accelerated.extras.deepspeed.foreign", needed_by=f"{folder / DEEPSPEED_NAME}")
    return module.DeepSpeedCheckpoint(folder)


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
        raise InvalidCheckpointError(f"{path} is not an index of weights: {error!r}.") from error
    return files


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
