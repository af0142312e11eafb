"""The folders ``checkpoint-<step>``: which there are, which is the last, which can go."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pytorch_accelerated.checkpointing.layout import MANIFEST_NAME
from pytorch_accelerated.checkpointing.publish import is_replaceable, remove_state
from pytorch_accelerated.checkpointing.reading import children_of, is_folder
from pytorch_accelerated.checkpointing.verify import list_states
from pytorch_accelerated.errors import ConfigurationError

PREFIX_CHECKPOINT_DIR = "checkpoint"
_CHECKPOINT_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-([0-9]+)")


def checkpoint_name(step: int) -> str:
    """The name of the folder that is saved after update `step`.

    >>> checkpoint_name(500)
    'checkpoint-500'
    """
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"


def checkpoint_step(folder: str | os.PathLike[str]) -> int | None:
    """The update after which `folder` was saved, by its name; None if that is no checkpoint's.

    >>> checkpoint_step("results/checkpoint-500"), checkpoint_step("results/runs")
    (500, None)
    """
    match = _CHECKPOINT_NAME.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def sort_checkpoints(output_dir: str | os.PathLike[str]) -> list[str]:
    """The paths of the checkpoints in `output_dir`, the one that was saved first at the front.

    The manifests tell: a run that began anew, or was resumed from an older checkpoint, has lower numbers in a folder
    with higher ones. Folders without a manifest are taken for older than all others, and sorted by number.
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
    """The path of the checkpoint with the highest number in `folder`; None if there is none, or no such folder."""
    return max(sort_checkpoints(folder), key=lambda path: checkpoint_step(path) or 0, default=None)


def refuse_steps_taken_by_others(output_dir: Path, first_step: int, max_steps: int) -> None:
    """Refuse a run whose checkpoints would have names that something else has: it would end at the first of them.

    Args:
        output_dir: where the run saves.
        first_step: the first update that it does.
        max_steps: the last one.

    Raises:
        ConfigurationError: a ValueError; names what is in the way.
    """
    taken = [
        step
        for path in (children_of(output_dir) if is_folder(output_dir) else ())
        if (step := checkpoint_step(path)) is not None and first_step <= step <= max_steps
        if path.name == checkpoint_name(step) and not is_replaceable(path)
    ]
    if taken:
        raise ConfigurationError(
            f"{output_dir} holds {', '.join(map(checkpoint_name, sorted(taken)))}, which this library did not write, "
            f"or whose {MANIFEST_NAME} is gone. The run would do the steps {first_step} to {max_steps}, reach these "
            "numbers, and not replace what is not its own. Choose another `output_dir`, move them away, or go on from "
            "the newest of them with `resume_from_checkpoint`."
        )


def checkpoints_to_delete(checkpoints: Sequence[str], save_total_limit: int, best: str | None) -> list[str]:
    """Those of `checkpoints` that go, so that no more than `save_total_limit` stay.

    The newest and the best always stay, so a limit of 1 may leave two.

    Args:
        checkpoints: paths, the oldest first.
        save_total_limit: at least 1.
        best: the path of the best, if there is one.
    """
    kept = {os.path.realpath(path) for path in (*checkpoints[-1:], *filter(None, [best]))}
    deletable = [path for path in checkpoints if os.path.realpath(path) not in kept]
    return deletable[: max(len(checkpoints) - save_total_limit, 0)]


def rotate_checkpoints(
    output_dir: str | os.PathLike[str],
    save_total_limit: int | None,
    best_model_checkpoint: str | os.PathLike[str] | None = None,
) -> None:
    """Delete the oldest checkpoints in `output_dir`, so that no more than `save_total_limit` stay. One rank.

    The newest and the best stay in any case. A process that dies on the way leaves whole checkpoints only.

    Raises:
        ConfigurationError: if the limit is below 1.
        CheckpointError: if the disk refuses.
    """
    if save_total_limit is None:
        return
    if save_total_limit < 1:
        raise ConfigurationError(
            f"`save_total_limit` is {save_total_limit}, but the newest checkpoint always stays. Give 1 or more, or "
            "None to keep all; save_strategy='no' saves none."
        )
    best = None if best_model_checkpoint is None else os.fspath(best_model_checkpoint)
    for path in checkpoints_to_delete(sort_checkpoints(output_dir), save_total_limit, best):
        remove_state(Path(path))
