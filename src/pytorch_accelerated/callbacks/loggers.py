"""Callbacks that write metrics to files."""

from __future__ import annotations

import abc
import csv
import heapq
import io
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.record.step_records import StepRecord
from pytorch_accelerated.record.text import printable
from pytorch_accelerated.record.values import MetricRecord
from pytorch_accelerated.record.warning import never_ends_a_run
from pytorch_accelerated.states import disk
from pytorch_accelerated.states.publish import replacing

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer

_SECONDS_BETWEEN_WRITES = 1.0  # of step records: opening the file for each takes longer than a small update


class _Row(NamedTuple):
    """The values of a step record, or of the metrics of one point of the run, with `epoch` and `update`."""

    values: dict[str, Any]
    is_step: bool

    @property
    def place(self) -> tuple[int, int]:
        """The epoch and the update."""
        return self.values["epoch"], self.values["update"]


@never_ends_a_run
class _FileLogger(TrainerCallback, abc.ABC):
    """Writes every number in the run history to a file, which always has whole rows.

    The metrics recorded at one point of the run make a row. A step record has a row of its own, so that the file has a
    curve that grows within epochs: its columns are those of `StepRecord.columns`. Rows of metrics have no `train_loss`
    unless a metric has that name.

    Rows are added at the end of the file, those of step records about once a second. A new file replaces the old one at
    first, and when a column is added. A resumed run writes it again from the history of its training state.

    Args:
        path: the path of the file, which replaces an existing one. Missing folders are created.
        step_records: False for the metrics only.
    """

    takes_part_in_preflight = False
    _told_apart_by = "path"

    _columns: Sequence[str] = ()
    # Those that the file lacks, and the last row of metrics, which may get more of them.
    _rows: Sequence[_Row] = ()
    _size_bytes = 0  # of the file before these; 0 if nothing was written yet
    _begins_anew = False
    _written_at = -math.inf
    _last_place = (1, 0)
    _is_evaluating = False

    def __init__(self, path: str | os.PathLike[str], *, step_records: bool = True) -> None:
        self.path = Path(path)
        self.step_records = step_records

    def saved_places(self) -> dict[str, str]:
        """The file, for the summary of a run."""
        return {"log": str(self.path)}

    @abc.abstractmethod
    def _beginning(self, columns: Sequence[str]) -> str:
        """The file before the rows in `_rows`, now with these columns."""

    @abc.abstractmethod
    def _lines(self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
        """The lines of rows. Each row has `epoch`, `update` and the values of that point or step record."""

    def on_step_records(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log the step records."""
        if self.step_records:
            self._log(trainer, survives_power_cuts=False)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log the metrics that were recorded since the last time."""
        self._log(trainer)

    on_eval_epoch_end = on_training_run_epoch_end = on_training_run_end = on_train_epoch_end

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin a row at the last logged point of the run, although the history was reset."""
        self._is_evaluating = True
        self._rows = [*self._rows, _new_row(*self._last_place)]

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log all remaining metrics, also after an exception."""
        try:
            self._log(trainer)
        finally:
            self._is_evaluating = False

    on_exception = on_evaluation_run_end

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write the file again: the history that is being loaded has all rows."""
        self._begins_anew = True

    def _log(self, trainer: Trainer, *, survives_power_cuts: bool = True) -> None:
        history, ranks = trainer.run_history, trainer.run_context.ranks
        steps = history.read_new_step_records(self.state_key) if self.step_records else []
        metrics = history.read_new_records(self.state_key)
        if self._is_evaluating:
            epoch, update = self._last_place
            metrics = [record._replace(epoch=epoch, update=update) for record in metrics]
        if not ranks.is_first or not (steps or metrics or self._begins_anew):
            return
        self._rows = _with_entries(self._rows, steps, metrics)
        self._last_place = self._rows[-1].place if self._rows else self._last_place
        if not survives_power_cuts and time.monotonic() - self._written_at <= _SECONDS_BETWEEN_WRITES:
            return
        path = self._absolute(self.path)
        is_whole = path.is_file() and path.stat().st_size >= self._size_bytes
        if self._begins_anew or (self._size_bytes and not is_whole):
            self._columns, self._size_bytes = (), 0
            if not self._is_evaluating:
                self._rows = _with_entries((), history.step_records if self.step_records else (), history.records)
        self._begins_anew = False
        self._write(survives_power_cuts=survives_power_cuts)

    def _write(self, *, survives_power_cuts: bool) -> None:
        """Write the rows that the file lacks, and the last row again if it may have more metrics now."""
        rows = [row for row in self._rows if len(row.values) > len(row.place)]
        names = ["epoch", "update", *self._columns, *(name for row in rows for name in row.values)]
        columns = sorted(dict.fromkeys(names), key=_is_of_steps)
        is_whole = columns != self._columns
        unsettled = [row for row in rows[-1:] if not row.is_step]
        settled = rows[: len(rows) - len(unsettled)]
        start, before = (0, self._beginning(columns)) if is_whole else (self._size_bytes, "")
        data = (before + self._lines([row.values for row in settled], columns)).encode()
        size_bytes = start + len(data)
        data += self._lines([row.values for row in unsettled], columns).encode()
        if is_whole:
            with replacing(self._absolute(self.path)) as file:
                disk.write(file, data)
        else:
            with open(self._absolute(self.path), "r+b", buffering=0) as file:
                file.seek(start)
                disk.write(file, data)
                file.truncate()
                if survives_power_cuts:
                    disk.flush(file)
        self._columns, self._rows, self._size_bytes = columns, unsettled, size_bytes
        self._written_at = time.monotonic()


class CSVLoggerCallback(_FileLogger):
    """Writes a table with the columns `epoch`, `update`, one for each metric, and those of step records.

    Cells without a value are empty.
    """

    def _beginning(self, columns: Sequence[str]) -> str:
        header = {name: _text_in_cell(name) for name in columns}
        rows: list[Mapping[str, Any]] = []
        if self._size_bytes:
            text = self._absolute(self.path).read_bytes()[: self._size_bytes].decode()
            _, *cells = csv.reader(io.StringIO(text, newline=""))
            rows = [dict(zip(self._columns, row, strict=True)) for row in cells]
        return self._lines([header, *rows], columns)

    def _lines(self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([row.get(name) for name in columns] for row in rows)
        return text.getvalue()


class JSONLoggerCallback(_FileLogger):
    """Writes one JSON object per line, with `epoch`, `update` and the metrics, or what a step record has.

    JSON only has finite numbers. The others become the strings "NaN", "Infinity" and "-Infinity", which Python's
    `float` and JavaScript's `Number` convert to numbers.
    """

    def _beginning(self, columns: Sequence[str]) -> str:
        return self._absolute(self.path).read_bytes()[: self._size_bytes].decode() if self._size_bytes else ""

    def _lines(self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
        return "".join(json.dumps({name: _json_value(value) for name, value in row.items()}) + "\n" for row in rows)


def _new_row(epoch: int, update: int) -> _Row:
    return _Row({"epoch": epoch, "update": update}, is_step=False)


def _is_of_steps(column: str) -> bool:
    return column in StepRecord._fields[2:] or column.startswith("learning_rate")


def _with_entries(rows: Sequence[_Row], steps: Sequence[StepRecord], metrics: Sequence[MetricRecord]) -> list[_Row]:
    """The rows and those of further records: a metric shares the row before it if that is of the same moment."""
    joined = list(rows)
    numbers = [record for record in metrics if record.is_scalar]
    entries: Iterator[MetricRecord | StepRecord] = heapq.merge(steps, numbers, key=lambda record: record.update)
    for entry in entries:
        if isinstance(entry, StepRecord):
            joined.append(_Row(entry.columns(), is_step=True))
            continue
        last = joined[-1] if joined else None
        if last is None or last.is_step or last.place != (entry.epoch, entry.update) or entry.name in last.values:
            joined.append(_new_row(entry.epoch, entry.update))
        joined[-1].values[entry.name] = entry.value
    return joined


def _text_in_cell(name: str) -> str:
    """A name as spreadsheets take it for a text in one row, not for a formula."""
    return printable(f"'{name}" if name.startswith(("=", "+", "-", "@")) else name)


def _json_value(value: float) -> float | str:
    return value if math.isfinite(value) else json.dumps(value)  # "NaN", "Infinity" or "-Infinity"
