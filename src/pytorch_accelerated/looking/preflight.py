"""A rehearsal of a run: one update, one evaluation batch, one save and reload; then everything is restored."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.evaluation import OuterLimit
from pytorch_accelerated.callbacks.saving import SaveTrainingStateCallback
from pytorch_accelerated.checkpointing.disk import is_folder, resolved
from pytorch_accelerated.checkpointing.training_state import save_run
from pytorch_accelerated.errors import CheckpointError, UnknownMetricError
from pytorch_accelerated.looking.batch_facts import BatchFacts, facts_of
from pytorch_accelerated.looking.rehearsal import rehearsal
from pytorch_accelerated.progress.screen import format_bytes

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer

_EMA_PREFIX = "ema_model_"


@dataclasses.dataclass(frozen=True, repr=False)
class PreflightReport:
    """The results of `Trainer.preflight`; ``print(report)`` shows them.

    Attributes:
        metric_names: the metrics that the run will record.
        seconds: the duration of the whole rehearsal.
        state_size_bytes: the size of one training state.
        free_bytes: free space on the disk for training states, or for temporary files if none are saved.
        rehearsed: the callbacks that took part.
        left_out: the callbacks that would have printed or written something.
        batch: what the first training batch of this rank looks like.
    """

    metric_names: tuple[str, ...]
    seconds: float
    state_size_bytes: int
    free_bytes: int
    rehearsed: tuple[str, ...]
    left_out: tuple[str, ...]
    batch: BatchFacts = BatchFacts(())

    def __repr__(self) -> str:
        facts = {
            "metrics": ", ".join(self.metric_names),
            "training state": f"{format_bytes(self.state_size_bytes)}, of {format_bytes(self.free_bytes)} free",
            "callbacks": ", ".join(self.rehearsed) or "none",
            "left out": ", ".join(self.left_out) or "none",
        }
        lines = [f"  {f'{name}:':<15} {value}" for name, value in facts.items()]
        batch = textwrap.indent(str(self.batch), "    ")
        head = f"Preflight passed in {self.seconds:.1f} s: one update, one evaluated batch, one save and reload."
        return "\n".join([head, *lines, "  first batch:", batch, *(f"  {line}" for line in _REMARK)])


_REMARK = (
    "Model, optimizer, history, generators and callbacks are as before. Objects that the trainer cannot see,",
    "such as what your callbacks or datasets keep elsewhere, are not restored.",
)


def rehearse(trainer: Trainer, arguments: dict[str, Any]) -> PreflightReport:
    """Rehearse ``trainer.train(**arguments)``. Must be called by all ranks.

    Args:
        trainer: the trainer.
        arguments: the arguments of `train`.

    Raises:
        Any error that the run would have raised; CheckpointError also if the disk cannot hold what will be saved, and
            UnknownMetricError if a callback watches a metric that nothing records.
    """
    started = time.perf_counter()
    ranks = trainer.run_context.ranks
    callbacks = list(trainer.callback_handler)
    taking_part = [callback for callback in callbacks if getattr(callback, "takes_part_in_preflight", True)]
    savers = [callback for callback in callbacks if isinstance(callback, SaveTrainingStateCallback)]
    places = [_existing_parent(saver.save_dir) for saver in savers] or [Path(tempfile.gettempdir())]
    one_update = _OneUpdate()
    scratch = Path(ranks.do_on_first(lambda: tempfile.mkdtemp(prefix=".preflight-", dir=places[0])))
    try:
        with rehearsal(trainer, [*taking_part, OuterLimit(1), one_update], place=places[0]):
            # Going back to a training state would need callbacks that are left out.
            trainer.train(**{**arguments, "resume_from": None, "nonfinite_policy": None, "reset_run_history": True})
            metric_names, batch = tuple(trainer.run_history.get_metric_names()), one_update.batch
            save_run(trainer.run_context, scratch / "after", {})
            trainer.run_context.states.load(scratch / "after", is_at_work=False)
        size_bytes = sum(file.stat().st_size for file in (scratch / "after").iterdir())
        ranks.wait()
    finally:
        if ranks.is_first:
            shutil.rmtree(scratch, ignore_errors=True)
    _check_watched_metrics(callbacks, metric_names)
    free_bytes = shutil.disk_usage(places[0]).free
    if savers and free_bytes < 2 * size_bytes:
        raise CheckpointError(
            f"{savers[0].save_dir} needs room for two training states of {format_bytes(size_bytes)}, because each is "
            f"complete before an older one is deleted, but only {format_bytes(free_bytes)} are free on its disk. Free "
            "some space, or save elsewhere."
        )
    left_out = [callback for callback in callbacks if callback not in taking_part]
    return PreflightReport(
        metric_names=metric_names,
        seconds=time.perf_counter() - started,
        state_size_bytes=size_bytes,
        free_bytes=free_bytes,
        rehearsed=tuple(type(callback).__name__ for callback in taking_part),
        left_out=tuple(type(callback).__name__ for callback in left_out),
        batch=batch,
    )


class _OneUpdate(TrainerCallback):
    """Ends the run after one update, when everything (such as the schedule) has been created for the whole run.

    Attributes:
        batch: what the batch of that update looks like.
    """

    batch = BatchFacts(())

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        run = trainer.run_context
        run.settings = dataclasses.replace(run.settings, max_num_train_steps=1)

    def on_train_step_end(self, trainer: Trainer, *, batch: Any, **kwargs: Any) -> None:
        if not self.batch.entries:
            self.batch = facts_of(batch)


def _check_watched_metrics(callbacks: list[TrainerCallback], metric_names: tuple[str, ...]) -> None:
    for callback in callbacks:
        name = getattr(callback, "watch_metric", "intermediate_")
        is_used = not isinstance(callback, SaveTrainingStateCallback) or callback.retention.best is not None
        if is_used and not name.startswith("intermediate_") and name.removeprefix(_EMA_PREFIX) not in metric_names:
            raise UnknownMetricError(
                f"{type(callback).__name__} watches {name!r}, which nothing records. The run records "
                f"{', '.join(map(repr, metric_names))}. Watch one of these, or record {name!r}."
            )


def _existing_parent(path: str | Path) -> Path:
    """The innermost existing folder among `path` and its parents."""
    path = resolved(path)
    return next(folder for folder in (path, *path.parents) if is_folder(folder))
