"""Reads runs back, from a report, a training state or a log history, and compares them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_accelerated.checkpointing import disk
from pytorch_accelerated.checkpointing.policy import read_metric_records, read_step_records
from pytorch_accelerated.checkpointing.publish import replacing
from pytorch_accelerated.checkpointing.verify import find_state, read_manifest
from pytorch_accelerated.errors import ConfigurationError, PytorchAcceleratedError, RunFileError
from pytorch_accelerated.report.contents import RunContents, best_values, data_in, metric_columns, page_of, step_columns
from pytorch_accelerated.tracking.history import LoggedHistory
from pytorch_accelerated.tracking.step_records import StepRecord, samples_per_second
from pytorch_accelerated.tracking.values import MetricRecord

_MAY_BE = (
    "A run is a page that ReportCallback has written (.html), a training state or a folder of several, or a "
    "trainer_state.json of a Hugging Face trainer or its folder."
)
_LOG_HISTORY_FILE = "trainer_state.json"
_ARGUMENTS_FILE = "training_args.json"  # of our trainer, beside the former in checkpoints
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def read_run(path: Path) -> RunContents:
    """The run that `path` shows or has saved.

    Raises:
        RunFileError: if it is nothing of that kind, or damaged.
    """
    source = path
    if path.is_dir():
        state = path if (path / _LOG_HISTORY_FILE).is_file() else find_state(path)
        has_log = state is not None and (state / _LOG_HISTORY_FILE).is_file()
        path = state / _LOG_HISTORY_FILE if state is not None and has_log else state or path / "manifest.json"
    try:
        if path.is_dir():
            contents = _of_state(path)
        else:
            text = path.read_text(encoding="utf-8")
            contents = _of_log_history(path, text) if path.name == _LOG_HISTORY_FILE else _of_page(text)
    except (*_UNREADABLE, OSError, PytorchAcceleratedError) as error:
        reason = error if isinstance(error, PytorchAcceleratedError) else f"{type(error).__name__}, {error}"
        raise RunFileError(f"{source} is not a record of a run: {reason}. {_MAY_BE}") from error
    contents.source = str(source)
    contents.name = contents.name or source.stem
    return contents


def _of_page(text: str) -> RunContents:
    runs = json.loads(data_in(text) or "{}")["runs"]
    if len(runs) != 1:
        raise RunFileError(f"it compares {len(runs)} runs, so give the page of each of them instead")
    return RunContents.from_json(runs[0])


def _of_state(state: Path) -> RunContents:
    facts = read_manifest(state).facts
    contents = _of_records(read_metric_records(state), read_step_records(state))
    shown = {name: value for name, value in facts.items() if isinstance(value, (bool, int, float, str))}
    contents.state |= {name: facts.get(name) for name in ("updates", "epochs") if name in facts}
    contents.notes = {"training state": state.name, **shown}
    return contents


def _of_log_history(path: Path, text: str) -> RunContents:
    state = json.loads(text)
    contents = _of_records(LoggedHistory(state["log_history"]).records, [])
    contents.state |= {"updates": int(state["global_step"])}
    arguments = path.with_name(_ARGUMENTS_FILE)
    contents.config = dict(json.loads(arguments.read_text(encoding="utf-8"))) if arguments.is_file() else {}
    return contents


def _of_records(records: Sequence[MetricRecord], steps: Sequence[StepRecord]) -> RunContents:
    metrics = metric_columns(records)
    every: list[tuple[int, int]] = [(each.epoch, each.update) for each in records]
    every += [(each.epoch, each.update) for each in steps]
    epochs, updates = zip(*every, strict=True) if every else ((0,), (0,))
    state: dict[str, Any] = {"epoch": max(epochs), "updates": max(updates)}
    if steps:
        state |= {"seconds": steps[-1].seconds, "samples_per_second": samples_per_second(steps)}
    return RunContents(name="", state=state, metrics=metrics, steps=step_columns(steps), best=best_values(metrics, {}))


def write_comparison(runs: Sequence[Path], output: Path) -> None:
    """Write a page that shows `runs` side by side, or the page of a single one.

    Raises:
        ConfigurationError: if the page would replace one of them.
        RunFileError: if one of them is not a record of a run.
        OSError: if the page cannot be written.
    """
    replaced = [str(path) for path in runs if path.exists() and output.exists() and path.samefile(output)]
    if replaced:
        raise ConfigurationError(f"The comparison would replace {replaced[0]}, one of the runs. Name another file.")
    contents = [read_run(path) for path in runs]
    names = [run.name for run in contents]
    for number, run in enumerate(contents, start=1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"
    page = page_of(contents, " · ".join(run.name for run in contents))
    with replacing(output) as file:
        disk.write(file, page.encode())
