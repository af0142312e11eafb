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
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.record.step_records import StepRecord
from pytorch_accelerated.record.text import printable
from pytorch_accelerated.record.values import MetricRecord, joined
from pytorch_accelerated.record.warning import never_ends_a_run
from pytorch_accelerated.states import disk
from pytorch_accelerated.states.publish import replacing

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer

_SECONDS_BETWEEN_WRITES = 1.0  # of step records: opening the file for each takes longer than a small update


# Epoch, update, and what the row is of: a step record, metrics of the run (0), or its n-th evaluation after training.
_Place = tuple[int, int, int]
_STEP = -1


@never_ends_a_run
class _FileLogger(TrainerCallback, abc.ABC):
    """Writes every number in the run history to a file, which always has whole rows.

    The metrics recorded at one point of the run make a row. A step record has a row of its own, so that the file has a
    curve that grows within epochs: it has the columns of `StepRecord.columns`. Rows of metrics have no `train_loss`
    unless a metric has that name.

    Rows are added at the end of the file; step records about once a second. A new file replaces the old one at
    first, and when a column is added. A resumed run writes it again from the history of its training state.

    Args:
        path: the path of the file, which replaces an existing one. Missing folders are created.
        step_records: False for the metrics only.
    """

    takes_part_in_preflight = False
    _told_apart_by = "path"

    _columns: Sequence[str] = ()
    # The file lacks these rows, or has the last of them without metrics that have come since.
    _rows: Sequence[tuple[_Place, dict[str, Any]]] = ()
    _size_bytes = 0  # of the file before these; 0 if nothing was written yet
    _starts_over = False
    _written_at = -math.inf
    _last_place: _Place = (1, 0, 0)
    _evaluations = 0
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
        self._evaluations += 1

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Log all remaining metrics, also after an exception."""
        try:
            self._log(trainer)
        finally:
            self._is_evaluating = False

    on_exception = on_evaluation_run_end

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write the file again: the history that is being loaded has all rows."""
        self._starts_over = True

    def _log(self, trainer: Trainer, *, survives_power_cuts: bool = True) -> None:
        history, ranks = trainer.run_history, trainer.run_context.parts.ranks
        steps = history.read_new_step_records(self.state_key) if self.step_records else []
        metrics = history.read_new_records(self.state_key)
        if not ranks.is_first or not (steps or metrics or self._starts_over):
            return
        self._rows = joined([*self._rows, *self._entries(steps, metrics)])
        self._last_place = self._rows[-1][0] if self._rows else self._last_place
        if not survives_power_cuts and time.monotonic() - self._written_at <= _SECONDS_BETWEEN_WRITES:
            return
        path = self._absolute(self.path)
        is_whole = path.is_file() and path.stat().st_size >= self._size_bytes
        if self._starts_over or (self._size_bytes and not is_whole):
            self._columns, self._size_bytes = (), 0
            if not self._is_evaluating:
                all_steps = history.step_records if self.step_records else ()
                self._rows = joined(self._entries(all_steps, history.records))
        self._starts_over = False
        self._write(survives_power_cuts=survives_power_cuts)

    def _entries(
        self, steps: Sequence[StepRecord], metrics: Sequence[MetricRecord]
    ) -> Iterator[tuple[_Place, dict[str, Any]]]:
        """Each step record and each number among the metrics with its place, in the order of updates."""
        measured = [((each.epoch, each.update, _STEP), each.columns()) for each in steps]
        evaluation = (*self._last_place[:2], self._evaluations) if self._is_evaluating else None
        numbers = [
            (evaluation or (each.epoch, each.update, 0), {each.name: each.value}) for each in metrics if each.is_scalar
        ]
        return heapq.merge(measured, numbers, key=lambda entry: entry[0][1])

    def _write(self, *, survives_power_cuts: bool) -> None:
        """Write the rows that the file lacks, and the last row again if it may have more metrics now."""
        names = ["epoch", "update", *self._columns, *(name for _, values in self._rows for name in values)]
        columns = sorted(dict.fromkeys(names), key=_is_of_steps)
        is_whole = columns != self._columns
        unsettled = [row for row in self._rows[-1:] if row[0][2] != _STEP]
        rows = [{"epoch": epoch, "update": update, **values} for (epoch, update, _), values in self._rows]
        number_settled = len(rows) - len(unsettled)
        start, before = (0, self._beginning(columns)) if is_whole else (self._size_bytes, "")
        data = (before + self._lines(rows[:number_settled], columns)).encode()
        size_bytes = start + len(data)
        data += self._lines(rows[number_settled:], columns).encode()
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
    """Writes a table with the columns `epoch`, `update`, one for each metric, and the columns of step records.

    Cells without a value are empty.

    >>> callbacks = [..., CSVLoggerCallback("log.csv")]  # `...` stands for the default callbacks
    """

    def _beginning(self, columns: Sequence[str]) -> str:
        header = {name: _text_in_cell(name) for name in columns}
        text = self._absolute(self.path).read_bytes()[: self._size_bytes].decode() if self._size_bytes else ""
        earlier = list(csv.DictReader(io.StringIO(text, newline=""), self._columns))
        return self._lines([header, *earlier[1:]], columns)

    def _lines(self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
        text = io.StringIO(newline="")
        csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
        return text.getvalue()


class JSONLoggerCallback(_FileLogger):
    """Writes one JSON object per line, with `epoch`, `update` and the metrics, or what a step record has.

    JSON only has finite numbers. The others become the strings "NaN", "Infinity" and "-Infinity", which Python's
    `float` and JavaScript's `Number` convert to numbers.

    >>> callbacks = [..., JSONLoggerCallback("log.jsonl", step_records=False)]
    """

    def _beginning(self, columns: Sequence[str]) -> str:
        return self._absolute(self.path).read_bytes()[: self._size_bytes].decode() if self._size_bytes else ""

    def _lines(self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
        return "".join(json.dumps({name: _json_value(value) for name, value in row.items()}) + "\n" for row in rows)


def _is_of_steps(column: str) -> bool:
    return column in StepRecord._fields[2:] or column.startswith("learning_rate")


def _text_in_cell(name: str) -> str:
    """A name as spreadsheets take it for a text in one row, not for a formula."""
    return printable(f"'{name}" if name.startswith(("=", "+", "-", "@")) else name)


def _json_value(value: float) -> float | str:
    return value if math.isfinite(value) else json.dumps(value)  # "NaN", "Infinity" or "-Infinity"
