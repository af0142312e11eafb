"""What scripts import from here: results, strategies, checkpoint folders, measures of time and memory."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.seeding import set_seed as set_seed
from pytorch_accelerated.huggingface.arguments.fields import HubStrategy as HubStrategy
from pytorch_accelerated.huggingface.arguments.fields import IntervalStrategy as IntervalStrategy
from pytorch_accelerated.huggingface.arguments.fields import SaveStrategy as SaveStrategy
from pytorch_accelerated.huggingface.arguments.fields import SchedulerType as SchedulerType
from pytorch_accelerated.huggingface.knowledge import RemoveColumnsCollator as RemoveColumnsCollator
from pytorch_accelerated.record.warning import stacklevel_of_user, warn_user
from pytorch_accelerated.states.disk import children_of, is_folder
from pytorch_accelerated.states.layout import MANIFEST_NAME
from pytorch_accelerated.states.publish import is_replaceable, remove_state
from pytorch_accelerated.states.verify import list_states

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.training_args import TrainingArguments
    from pytorch_accelerated.ranks.ranks import Ranks


class TrainOutput(NamedTuple):
    """The result of `Trainer.train`.

    Attributes:
        global_step: updates done, including those before a resume.
        training_loss: mean over the steps of this call.
        metrics: the last entry of the log history.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """The result of `Trainer.predict`.

    Attributes:
        predictions: an array with the rows in the order of the dataset; a tuple of them for multiple outputs.
        label_ids: likewise; None without labels, an empty tuple for a model whose loss needs none.
        metrics: by name, with prefix.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class EvalLoopOutput(NamedTuple):
    """The result of `Trainer.evaluation_loop`: like `PredictionOutput`, with the number of rows."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class EvalPrediction:
    """The argument of `compute_metrics`; ``predictions, label_ids = prediction`` works too.

    Args:
        predictions: of the model, in the order of the dataset; a tuple for multiple outputs.
        label_ids: the labels, likewise.
        inputs: of the model, if ``include_for_metrics`` asks for them, like `losses` of the rows.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses

    @property
    def elements(self) -> tuple[Any, ...]:
        """The predictions, the labels and, if there are any, the inputs and the losses."""
        extras = tuple(extra for extra in (self.inputs, self.losses) if extra is not None)
        return (self.predictions, self.label_ids, *extras)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        return self.elements[index]


PREFIX_CHECKPOINT_DIR = "checkpoint"
_CHECKPOINT_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-([0-9]+)")


def output_dir_of(args: TrainingArguments) -> Path:
    """The folder of a run."""
    return placed(args, str(args.output_dir))  # the arguments fill in its default


def placed(args: TrainingArguments, path: str | os.PathLike[str]) -> Path:
    """A path among the arguments, as it was meant when they were made."""
    return Path(getattr(args, "_made_in", ""), path)


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
            f"or whose {MANIFEST_NAME} is gone. The steps {first_step} to {max_steps} would replace them. "
            "Choose another `output_dir`, move them away, or resume from the newest."
        )


def warn_of_earlier_checkpoints(args: TrainingArguments, ranks: Ranks) -> None:
    """Warn on the first rank if saving will delete checkpoints that this run has not written."""
    limit, folder = args.save_total_limit, output_dir_of(args)
    if args.save_strategy == SaveStrategy.NO or not ranks.is_first:
        return
    names = [Path(path).name for path in sort_checkpoints(folder)]
    if names:
        warn_user(
            ranks,
            f"{folder} holds {', '.join(names)} of an earlier run, and `save_total_limit` is {limit}: this run will "
            "delete them as it saves. To keep them, give another `output_dir`; to continue that run, call "
            "`train(resume_from_checkpoint=True)`.",
        )


def rotate_checkpoints(
    output_dir: str | os.PathLike[str],
    save_total_limit: int | None,
    best_model_checkpoint: str | os.PathLike[str] | None = None,
) -> None:
    """Delete the oldest checkpoints in `output_dir`, so that at most `save_total_limit` stay. Call it on one rank.

    The newest and the best always stay, so a limit of 1 may leave two. An interruption leaves whole checkpoints only.
    """
    if save_total_limit is None or save_total_limit < 1:
        return
    checkpoints = sort_checkpoints(output_dir)
    best = [] if best_model_checkpoint is None else [os.fspath(best_model_checkpoint)]
    kept = {os.path.realpath(path) for path in (*checkpoints[-1:], *best)}
    deletable = [path for path in checkpoints if os.path.realpath(path) not in kept]
    for path in deletable[: max(len(checkpoints) - save_total_limit, 0)]:
        remove_state(Path(path))


def enable_full_determinism(seed: int, warn_only: bool = False) -> None:
    """Seed all generators and have torch use deterministic algorithms only, for the rest of this process.

    Call it before the first CUDA operation, because cuBLAS reads its workspace setting then.

    Args:
        seed: see `set_seed`.
        warn_only: warn about an operation that has no deterministic algorithm, where torch would raise an error.
    """
    set_seed(seed)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: int | None = None,
    num_steps: int | None = None,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """Seconds since `start_time` and rates per second, with names that begin with `split`.

    Args:
        split: for example "train".
        start_time: of `time.time`.
        num_samples: gives ``<split>_samples_per_second``.
        num_steps: gives ``<split>_steps_per_second``.
        num_tokens: gives ``<split>_tokens_per_second``.
    """
    seconds = time.time() - start_time
    metrics = {f"{split}_runtime": round(seconds, 4)}
    if seconds > 0:  # unless the clock was set back, or has not moved
        for name, count in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
            if count is not None:
                metrics[f"{split}_{name}_per_second"] = round(count / seconds, 3)
    return metrics


def meter_memory(stage: str, *, is_nested: bool = False) -> Callable[[], dict[str, int]]:
    """A function for the bytes that this process has more than now, by name; `is_nested`, if within another stage."""
    module = require("pytorch_accelerated.extras.huggingface.memory", needed_by="`skip_memory_metrics=False`")
    return module.meter(stage, is_nested=is_nested)  # type: ignore[no-any-return]


def warn(message: str) -> None:
    """Warn in this process, pointing at the line of the user's code that called the library."""
    warnings.warn(message, stacklevel=stacklevel_of_user())
