"""Checkpoint folders, ``checkpoint-<step>``: how to list, sort and delete them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pytorch_accelerated.checkpointing.layout import MANIFEST_NAME
from pytorch_accelerated.checkpointing.publish import is_replaceable, remove_state
from pytorch_accelerated.checkpointing.reading import children_of, is_folder
from pytorch_accelerated.checkpointing.verify import list_states
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments

PREFIX_CHECKPOINT_DIR = "checkpoint"
_CHECKPOINT_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-([0-9]+)")


def output_dir_of(args: TrainingArguments) -> Path:
    """The folder of a run."""
    return Path(str(args.output_dir))  # the arguments fill in its default


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint of update `step`.

    >>> checkpoint_name(500)
    'checkpoint-500'
    """
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"


def checkpoint_step(folder: str | os.PathLike[str]) -> int | None:
    """The update in the name of a checkpoint; None for the name of another folder.

    >>> checkpoint_step("results/checkpoint-500"), checkpoint_step("results/runs")
    (500, None)
    """
    match = _CHECKPOINT_NAME.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def sort_checkpoints(output_dir: str | os.PathLike[str]) -> list[str]:
    """The paths of the checkpoints in `output_dir`, oldest first.

    Manifests record the order, because a restarted run, or one resumed from an older checkpoint, has lower numbers than
    its predecessor. Folders without a manifest are taken for the oldest, and sorted by number.
    """
    output_dir = Path(output_dir)
    if not is_folder(output_dir):
        return []
    serials = {folder.name: manifest.serial for folder, manifest in list_states(output_dir)}
    return sorted(
        (str(path) for path in children_of(output_dir) if checkpoint_step(path) is not None and is_folder(path)),
        key=lambda path: (serials.get(Path(path).name, 0), checkpoint_step(path)),
    )


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The path of the checkpoint with the highest number in `folder`, or None."""
    return max(sort_checkpoints(folder), key=lambda path: checkpoint_step(path) or 0, default=None)


def refuse_steps_taken_by_others(output_dir: Path, first_step: int, max_steps: int) -> None:
    """Reject a run whose checkpoints, from its first to its last update, would collide with folders of others."""
    taken = [
        step
        for path in (children_of(output_dir) if is_folder(output_dir) else ())
        if (step := checkpoint_step(path)) is not None and first_step <= step <= max_steps
        if path.name == checkpoint_name(step) and not is_replaceable(path)
    ]
    if taken:
        raise ConfigurationError(
            f"{output_dir} holds {', '.join(map(checkpoint_name, sorted(taken)))}, which this library did not write, "
            f"or whose {MANIFEST_NAME} is gone. The run would do the steps {first_step} to {max_steps}, and never "
            "replaces such folders. Choose another `output_dir`, move them away, or resume from the newest of them "
            "with `resume_from_checkpoint`."
        )


def rotate_checkpoints(
    output_dir: str | os.PathLike[str],
    save_total_limit: int | None,
    best_model_checkpoint: str | os.PathLike[str] | None = None,
) -> None:
    """Delete the oldest checkpoints in `output_dir`, so that at most `save_total_limit` stay. Call it on one rank.

    The newest and the best always stay, so a limit of 1 may leave two. An interruption leaves whole checkpoints only.
    """
    if save_total_limit is None:
        return
    if save_total_limit < 1:
        raise ConfigurationError(
            f"`save_total_limit` is {save_total_limit}, but the newest checkpoint always stays. Give 1 or more, or "
            "None to keep all; save_strategy='no' saves none."
        )
    checkpoints = sort_checkpoints(output_dir)
    best = [] if best_model_checkpoint is None else [os.fspath(best_model_checkpoint)]
    kept = {os.path.realpath(path) for path in (*checkpoints[-1:], *best)}
    deletable = [path for path in checkpoints if os.path.realpath(path) not in kept]
    for path in deletable[: max(len(checkpoints) - save_total_limit, 0)]:
        remove_state(Path(path))
