"""Callbacks that write metrics to files or record learning rates."""

from __future__ import annotations

import abc
import csv
import io
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.expected import ExpectedMetrics
from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing import disk
from pytorch_accelerated.checkpointing.matching import require_kinds
from pytorch_accelerated.checkpointing.publish import replacing
from pytorch_accelerated.checkpointing.run_parts import check_records
from pytorch_accelerated.tracking.values import MetricRecord

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer


class _FileLogger(TrainerCallback, abc.ABC):
    """Writes every number in the run history to a file, which is complete after each epoch and evaluation.

    Each time, a new file replaces the old one, so a crash never leaves half a line. A resumed run continues from the
    saved training state; rows logged after that state was saved are logged again.

    Args:
        path: the path of the file, which replaces an existing one. Missing folders are created.
    """

    takes_part_in_preflight = False

    path: Path
    _records: tuple[MetricRecord, ...] = ()

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def state_key(self) -> str:
        """The class and the path."""
        return f"{type(self).__name__}({self.path})"

    @abc.abstractmethod
    def _text(self, rows: list[dict[str, float]]) -> str:
        """The content of the file. Each row has `epoch`, `update` and the metrics recorded at that point."""

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log the training epoch."""
        self._log(trainer)

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Log the evaluation."""
        self._log(trainer)

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log the metrics that later callbacks recorded."""
        self._log(trainer)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log all remaining metrics."""
        self._log(trainer)

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log all remaining metrics."""
        self._log(trainer)

    def on_exception(self, trainer: Trainer, exception: BaseException, **kwargs: Any) -> None:
        """Log the metrics recorded before the exception."""
        self._log(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The logged records."""
        return {"records": [list(record) for record in self._records]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the logged records."""
        require_kinds(state, {"records": (list,)}, of=type(self).__name__)
        check_records(state["records"], "records")
        self._records = tuple(MetricRecord(*record) for record in state["records"])

    def _log(self, trainer: Trainer) -> None:
        new = [record for record in trainer.run_history.read_new_records(self.state_key) if record.is_scalar]
        self._records += tuple(new)
        if new and trainer.internal_run.ranks.is_first:
            try:
                with replacing(self.path) as file:
                    disk.write(file, self._text(_rows(self._records)).encode())
            except OSError as error:
                warn_user(
                    trainer.internal_run.ranks,
                    f"{type(self).__name__} could not write {self.path}: {error}. Training continues; the next attempt "
                    "writes everything. Check the disk's free space and the permissions.",
                )


class CSVLoggerCallback(_FileLogger):
    """Writes a table with the columns `epoch`, `update` and one for each metric; cells without a value are empty."""

    def _text(self, rows: list[dict[str, float]]) -> str:
        columns = dict.fromkeys(name for row in rows for name in row)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


class JSONLoggerCallback(_FileLogger):
    """Writes one JSON object per line, with `epoch`, `update` and the metrics.

    JSON only has finite numbers. The others become the strings "NaN", "Infinity" and "-Infinity", which Python's
    `float` and JavaScript's `Number` convert to numbers.
    """

    def _text(self, rows: list[dict[str, float]]) -> str:
        return "".join(json.dumps({name: _json_value(value) for name, value in row.items()}) + "\n" for row in rows)


class LearningRateMonitorCallback(TrainerCallback):
    """Records the learning rate after the last update of each training epoch.

    The rate of the first parameter group is `learning_rate`; other groups have `learning_rate_1` and so on.
    """

    def expected_metrics(self, sets: Sequence[str]) -> ExpectedMetrics:
        """The learning rates; how many groups there will be is not known."""
        return ExpectedMetrics(("learning_rate",), is_complete=False)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the learning rates."""
        for index, group in enumerate(trainer.optimizer.param_groups):
            trainer.run_history.update_metric(f"learning_rate_{index}" if index else "learning_rate", group["lr"])


def _rows(records: Iterable[MetricRecord]) -> list[dict[str, float]]:
    """The records as rows, one for each moment of recording."""
    rows: list[dict[str, float]] = []
    for record in records:
        moment = {"epoch": record.epoch, "update": record.update}
        if not rows or not moment.items() <= rows[-1].items() or record.name in rows[-1]:
            rows.append({**moment})
        rows[-1][record.name] = record.value
    return rows


def _json_value(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else f"{'-' if value < 0 else ''}Infinity"
