"""Callbacks that write metrics to files or record learning rates."""

from __future__ import annotations

import abc
import csv
import heapq
import io
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.expected import ExpectedMetrics
from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing import disk
from pytorch_accelerated.checkpointing.matching import require_kinds
from pytorch_accelerated.checkpointing.publish import replacing
from pytorch_accelerated.checkpointing.run_parts import check_records
from pytorch_accelerated.tracking.step_records import StepRecord, records_of, table_of
from pytorch_accelerated.tracking.values import MetricRecord

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer

_SECONDS_BETWEEN_WRITES = 1.0  # of step records: opening the file for each takes longer than a small update

Row = dict[str, Any]


class _FileLogger(TrainerCallback, abc.ABC):
    """Writes every number in the run history to a file, which always has whole rows.

    The metrics recorded at one point of the run make a row. A step record has a row of its own, so that the file has a
    curve that grows within epochs: its columns are those of `StepRecord.columns`. Rows of metrics have no `train_loss`
    unless a metric has that name.

    Rows are added at the end of the file, those of step records about once a second. A new file replaces the old one at
    first, and when a column is added. A resumed run continues from the saved training state; rows logged after that
    state was saved are logged again.

    Args:
        path: the path of the file, which replaces an existing one. Missing folders are created.
        step_records: False for the metrics only.
    """

    takes_part_in_preflight = False

    path: Path
    step_records: bool = True
    _entries: Sequence[MetricRecord | StepRecord] = ()
    _columns: Sequence[str] = ()
    _metric_columns: Sequence[str] = ("epoch", "update")
    # Of the file, up to the last row if more metrics may be added to that.
    _settled_entries = 0
    _settled_bytes = 0
    _size_bytes = 0
    _written_at = -math.inf
    _evaluation_at: tuple[int, int] | None = None  # of an evaluation after training: the epoch and update it belongs to

    def __init__(self, path: str | os.PathLike[str], *, step_records: bool = True) -> None:
        self.path = Path(path)
        self.step_records = step_records

    @property
    def state_key(self) -> str:
        """The class and the path."""
        return f"{type(self).__name__}({self.path})"

    def saved_places(self) -> dict[str, str]:
        """The file, for the summary of a run."""
        return {"log": str(self.path)}

    @abc.abstractmethod
    def _header(self, columns: Sequence[str]) -> str:
        """The beginning of the file."""

    @abc.abstractmethod
    def _lines(self, rows: Iterable[Row], columns: Sequence[str]) -> str:
        """The lines of rows. Each row has `epoch`, `update` and the values of that point or step record."""

    def on_step_records(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log the step records."""
        if self.step_records:
            self._log(trainer, survives_power_cuts=False)

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

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """The evaluation belongs to the last point of the run that was logged, although the history begins anew."""
        if self._entries:
            self._evaluation_at = self._entries[-1].epoch, self._entries[-1].update

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log all remaining metrics."""
        self._log(trainer)
        self._evaluation_at = None

    def on_exception(self, trainer: Trainer, exception: BaseException, **kwargs: Any) -> None:
        """Log the metrics recorded before the exception."""
        self._log(trainer)
        self._evaluation_at = None

    def state_dict(self) -> dict[str, Any]:
        """The logged records."""
        metrics = [entry for entry in self._entries if isinstance(entry, MetricRecord)]
        steps = [entry for entry in self._entries if isinstance(entry, StepRecord)]
        is_metric = [isinstance(entry, MetricRecord) for entry in self._entries]
        return {
            "records": [list(record) for record in metrics],
            "step_records": table_of(steps),
            "is_metric": torch.tensor(is_metric, dtype=torch.bool),  # of each record, in the order of the file
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the logged records."""
        require_kinds(state, {"records": (list,)}, of=type(self).__name__)
        check_records(state["records"], "records")
        metrics = [MetricRecord(*record) for record in state["records"]]
        steps = records_of(state.get("step_records", ()))  # older states have none
        is_metric = state["is_metric"].tolist() if steps else [True] * len(metrics)
        if sum(is_metric) != len(metrics) or len(is_metric) != len(metrics) + len(steps):
            raise ValueError("`is_metric` does not fit the number of records")
        rest: tuple[Iterator[Any], ...] = (iter(steps), iter(metrics))
        self._entries = [next(rest[each]) for each in is_metric]
        self._columns, self._metric_columns = (), _FileLogger._metric_columns  # the file has to be written anew

    def _log(self, trainer: Trainer, *, survives_power_cuts: bool = True) -> None:
        history, ranks = trainer.run_history, trainer.internal_run.ranks
        steps = history.read_new_step_records(self.state_key) if self.step_records else []
        metrics = [record for record in history.read_new_records(self.state_key) if record.is_scalar]
        if self._evaluation_at is not None:
            epoch, update = self._evaluation_at
            metrics = [record._replace(epoch=epoch, update=update) for record in metrics]
            # If the last row has one of them, the first begins a row, and all come into it.
            metrics.sort(key=lambda record: record.name not in self._metric_columns)
        if not (steps or metrics):
            return
        new: Iterator[MetricRecord | StepRecord] = heapq.merge(steps, metrics, key=lambda record: record.update)
        vars(self).setdefault("_entries", []).extend(new)
        is_due = survives_power_cuts or time.monotonic() - self._written_at > _SECONDS_BETWEEN_WRITES
        if ranks.is_first and is_due:
            try:
                self._write(survives_power_cuts=survives_power_cuts)
            except OSError as error:
                warn_user(
                    ranks,
                    f"{type(self).__name__} could not write {self.path}: {error}. Training continues; the next attempt "
                    "writes everything. Check the disk's free space and the permissions.",
                )

    def _write(self, *, survives_power_cuts: bool) -> None:
        """Write the rows that the file lacks, and the last row again if it may have more metrics now."""
        new = list(_rows(self._entries[self._settled_entries :] if self._columns else self._entries))
        columns = self._columns_with(new)
        is_whole = columns != self._columns or not self.path.exists() or self.path.stat().st_size != self._size_bytes
        if is_whole:
            new = list(_rows(self._entries))
        start = 0 if is_whole else self._settled_bytes
        *before, last = new
        settled = (self._header(columns) if is_whole else "") + self._lines([row for row, _ in before], columns)
        unsettled = self._lines([last[0]], columns)
        if last[1] == 0:
            settled, unsettled = settled + unsettled, ""
        data = (settled + unsettled).encode()
        if is_whole:
            with replacing(self.path) as file:
                disk.write(file, data)
        else:
            with open(self.path, "r+b", buffering=0) as file:
                file.seek(start)
                disk.write(file, data)
                file.truncate()
                if survives_power_cuts:
                    disk.flush(file)
        self._columns = columns
        self._written_at = time.monotonic()
        self._settled_entries = len(self._entries) - last[1]
        self._settled_bytes = start + len(settled.encode())
        self._size_bytes = start + len(data)

    def _columns_with(self, rows: Sequence[tuple[Row, int]]) -> Sequence[str]:
        """The columns of the file with those of further rows: first the metrics, then those of step records."""
        metrics = dict.fromkeys(self._metric_columns)
        of_steps = dict.fromkeys(self._columns)
        for row, number_of_metrics in rows:
            (metrics if number_of_metrics else of_steps).update(dict.fromkeys(row))
        self._metric_columns = list(metrics)
        return list({**metrics, **of_steps})


class CSVLoggerCallback(_FileLogger):
    """Writes a table with the columns `epoch`, `update`, one for each metric, and those of step records.

    Cells without a value are empty.
    """

    def _header(self, columns: Sequence[str]) -> str:
        return self._lines([dict(zip(columns, columns, strict=True))], columns)

    def _lines(self, rows: Iterable[Row], columns: Sequence[str]) -> str:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([row.get(name) for name in columns] for row in rows)
        return text.getvalue()


class JSONLoggerCallback(_FileLogger):
    """Writes one JSON object per line, with `epoch`, `update` and the metrics, or what a step record has.

    JSON only has finite numbers. The others become the strings "NaN", "Infinity" and "-Infinity", which Python's
    `float` and JavaScript's `Number` convert to numbers.
    """

    def _header(self, columns: Sequence[str]) -> str:
        return ""

    def _lines(self, rows: Iterable[Row], columns: Sequence[str]) -> str:
        return "".join(json.dumps({name: _json_value(value) for name, value in row.items()}) + "\n" for row in rows)


class LearningRateMonitorCallback(TrainerCallback):
    """Records the learning rate after the last update of each training epoch.

    The rate of the first parameter group is `learning_rate`; other groups have `learning_rate_1` and so on.
    """

    def expected_metrics(self, sets: Sequence[str]) -> ExpectedMetrics:
        """The learning rates; how many groups there will be is not known."""
        return ExpectedMetrics(("learning_rate",), others=("learning_rate_",))

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the learning rates."""
        for index, group in enumerate(trainer.optimizer.param_groups):
            trainer.run_history.update_metric(f"learning_rate_{index}" if index else "learning_rate", group["lr"])


def _rows(entries: Iterable[MetricRecord | StepRecord]) -> Iterator[tuple[Row, int]]:
    """The entries as rows, each with the number of metrics in it: 0 for a step record."""
    row: Row = {}
    metrics = 0
    for entry in entries:
        if isinstance(entry, StepRecord):
            if metrics:
                yield row, metrics
            yield entry.columns(), 0
            metrics = 0
            continue
        moment = {"epoch": entry.epoch, "update": entry.update}
        if metrics and not (moment.items() <= row.items() and entry.name not in row):
            yield row, metrics
            metrics = 0
        row = {**(row if metrics else moment), entry.name: entry.value}
        metrics += 1
    if metrics:
        yield row, metrics


def _json_value(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else f"{'-' if value < 0 else ''}Infinity"
