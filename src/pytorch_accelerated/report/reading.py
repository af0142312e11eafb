"""Reads runs back: from a report, a training state, a log with JSON lines, or a log history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_accelerated.checkpointing.saved_metrics import read_metric_records, read_step_records
from pytorch_accelerated.checkpointing.verify import find_state, read_manifest
from pytorch_accelerated.errors import PytorchAcceleratedError, RunFileError
from pytorch_accelerated.report.contents import RunContents, best_values, metric_columns, step_columns
from pytorch_accelerated.report.page import data_in
from pytorch_accelerated.tracking.logged import LoggedHistory
from pytorch_accelerated.tracking.step_records import StepRecord
from pytorch_accelerated.tracking.values import MetricRecord

_COLUMNS_OF_STEPS = {"samples", "seconds", "train_loss", "samples_per_second", "data_wait_share"}
_MAX_BYTES = 256 * 2**20
_MAY_BE = (
    "A run is a page that ReportCallback has written (.html), a training state or a folder of several, a log of "
    "JSONLoggerCallback (one JSON object per line), or a trainer_state.json of a Hugging Face trainer or its folder."
)
_LOG_HISTORY_FILE = "trainer_state.json"
_ARGUMENTS_FILE = "training_args.json"  # of our trainer, beside the former in checkpoints


def read_run(path: Path) -> RunContents:
    """The run that `path` shows or has saved.

    Raises:
        RunFileError: if it is nothing of that kind, or damaged.
    """
    if path.is_dir() and not (path / _LOG_HISTORY_FILE).is_file():
        return _of_state(path)
    if path.is_dir():
        return _named(read_run(path / _LOG_HISTORY_FILE), path)
    if not path.is_file():
        raise RunFileError(f"There is no file or folder {str(path)!r}. {_MAY_BE}")
    if path.stat().st_size > _MAX_BYTES:
        raise RunFileError(f"{path} has more than {_MAX_BYTES >> 20} MiB, so it is no record of a run. {_MAY_BE}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunFileError(f"{path} is not text ({error}). {_MAY_BE}") from error
    if path.name == _LOG_HISTORY_FILE:
        return _of_log_history(path, text)
    return _of_page(path, text) if "<html" in text[:1000] else _of_lines(path, text)


def _of_page(path: Path, text: str) -> RunContents:
    data = data_in(text)
    if data is None:
        raise RunFileError(f"{path} is an HTML page, but not one of a run: it contains no data of one. {_MAY_BE}")
    try:
        runs = json.loads(data)["runs"]
        if len(runs) != 1:
            raise RunFileError(f"{path} compares {len(runs)} runs. Give the page of each of them instead.")
        return _named(RunContents.from_json(runs[0]), path)
    except (ValueError, TypeError, LookupError) as error:
        raise RunFileError(f"The data in {path} is not that of a run: {error}. {_MAY_BE}") from error


def _of_state(folder: Path) -> RunContents:
    state = find_state(folder)
    if state is None:
        raise RunFileError(f"There is no complete training state in {folder}. {_MAY_BE}")
    if (state / _LOG_HISTORY_FILE).is_file():
        return _named(read_run(state / _LOG_HISTORY_FILE), folder)
    try:
        records, steps = read_metric_records(state), read_step_records(state)
        facts = read_manifest(state).facts
    except PytorchAcceleratedError as error:
        raise RunFileError(f"The training state {state} cannot be read: {error}") from error
    contents = _of_records(records, steps)
    shown = {name: value for name, value in facts.items() if isinstance(value, (bool, int, float, str))}
    contents.state |= {name: facts.get(name) for name in ("updates", "epochs") if name in facts}
    contents.notes = {"training state": state.name, **shown}
    return _named(contents, folder)


def _of_log_history(path: Path, text: str) -> RunContents:
    try:
        state = json.loads(text)
        contents = _of_records(LoggedHistory(state["log_history"]).records, [])
        contents.state |= {"updates": int(state["global_step"])}
        arguments = path.with_name(_ARGUMENTS_FILE)
        contents.config = dict(json.loads(arguments.read_text(encoding="utf-8"))) if arguments.is_file() else {}
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RunFileError(f"{path} is not the state of a Hugging Face trainer: {error!r}. {_MAY_BE}") from error
    return _named(contents, path)


def _of_lines(path: Path, text: str) -> RunContents:
    records: list[MetricRecord] = []
    steps: list[StepRecord] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(line) if line.strip() else {"epoch": 0, "update": 0}
            if row.keys() >= _COLUMNS_OF_STEPS:
                steps.append(_step_record_in(row))
            else:
                records += _metric_records_in(row)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RunFileError(f"Line {number} of {path} is not a row of a log: {error}. {_MAY_BE}") from error
    if not records and not steps:
        raise RunFileError(f"{path} contains no values. {_MAY_BE}")
    return _named(_of_records(records, steps), path)


def _metric_records_in(row: dict[str, Any]) -> list[MetricRecord]:
    epoch, update = int(row["epoch"]), int(row["update"])
    numbers = {name: value for name, value in row.items() if name not in ("epoch", "update")}
    return [MetricRecord(name, float(value), epoch, update) for name, value in numbers.items()]


def _step_record_in(row: dict[str, Any]) -> StepRecord:
    """The inverse of `StepRecord.columns`."""
    norm, memory = row.get("gradient_norm"), row.get("peak_memory")
    return StepRecord(
        epoch=int(row["epoch"]),
        update=int(row["update"]),
        samples=int(row["samples"]),
        seconds=float(row["seconds"]),
        train_loss=float(row["train_loss"]),
        learning_rates=tuple(float(row[name]) for name in row if name.startswith("learning_rate")),
        gradient_norm=None if norm is None else float(norm),
        samples_per_second=float(row["samples_per_second"]),
        data_wait_share=float(row["data_wait_share"]),
        peak_memory=None if memory is None else int(memory),
    )


def _of_records(records: Sequence[MetricRecord], steps: Sequence[StepRecord]) -> RunContents:
    metrics = metric_columns(records)
    every: list[tuple[int, int]] = [(each.epoch, each.update) for each in records]
    every += [(each.epoch, each.update) for each in steps]
    epochs, updates = zip(*every, strict=True) if every else ((0,), (0,))
    state = {"epoch": max(epochs), "updates": max(updates)}
    if steps:
        state["seconds"] = steps[-1].seconds
    return RunContents(name="", state=state, metrics=metrics, steps=step_columns(steps), best=best_values(metrics, {}))


def _named(contents: RunContents, path: Path) -> RunContents:
    """`contents` with its source, and a name that the user recognises."""
    contents.source = str(path)
    contents.name = path.stem if contents.name in ("", Path(_LOG_HISTORY_FILE).stem) else contents.name
    return contents
