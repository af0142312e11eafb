"""Reads runs back, from a report, a training state or a log history, and compares them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pytorch_accelerated.errors import ConfigurationError, PytorchAcceleratedError, RunFileError
from pytorch_accelerated.report.contents import RunContents, data_in, write_page
from pytorch_accelerated.tracking import greater_is_better
from pytorch_accelerated.utils import read_run_history

_LOG_HISTORY_FILE = "trainer_state.json"
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def read_run(path: Path) -> RunContents:
    """The run that `path` shows or has saved.

    Raises:
        RunFileError: if it is nothing of that kind, or damaged.
    """
    try:
        log = _log_history_in(path)
        if log is not None:
            contents = _of_log_history(log)
        elif path.is_dir():
            contents = RunContents(name="")
            contents.read_history(read_run_history(path))
        else:
            contents = _of_page(path.read_text(encoding="utf-8"))
    except (*_UNREADABLE, OSError, PytorchAcceleratedError) as error:
        reason = error if isinstance(error, PytorchAcceleratedError) else f"{type(error).__name__}, {error}"
        raise RunFileError(
            f"{path} is not a record of a run: {reason}. A run is a page of ReportCallback (.html), a folder of "
            "training states, or a trainer_state.json or its folder."
        ) from error
    contents.source = str(path)
    contents.name = contents.name or path.stem
    for best in contents.best:  # pages of version 1.0 do not say it
        best.setdefault("greater_is_better", greater_is_better(best["name"]))
    return contents


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder and below: pages, and folders of states or of a log history without a page beside them.

    Raises:
        OSError: if a folder or a page cannot be read.
    """
    inside = sorted(path for path in folder.iterdir() if not path.is_symlink())
    pages = [path for path in inside if path.suffix == ".html" and _shows_one_run(path)]
    if _log_history_in(folder) or any(folder.glob("run.json")) or any(folder.glob("*/run.json")):
        return pages or [folder]
    below = [(path, run) for path in inside if path.is_dir() for run in runs_in(path)]
    return pages + [run for path, run in below if not (pages and run == path)]


def _shows_one_run(path: Path) -> bool:
    """Whether a file is a page of ours, and not a comparison. A damaged one counts, so that the reader names it."""
    data = data_in(path.read_text(encoding="utf-8", errors="replace"))
    try:
        return data is not None and len(json.loads(data)["runs"]) == 1
    except _UNREADABLE:
        return True


def _log_history_in(path: Path) -> Path | None:
    """The log history that `path` is or has; of several checkpoints that of the last; None without one."""
    checkpoints = path.glob(f"checkpoint-*/{_LOG_HISTORY_FILE}")
    newest_last = sorted(checkpoints, key=lambda file: (len(file.parent.name), file.parent.name))
    files = [path if path.name == _LOG_HISTORY_FILE else path / _LOG_HISTORY_FILE]
    return next((file for file in [*files, *reversed(newest_last)] if file.is_file()), None)


def _of_page(text: str) -> RunContents:
    runs = json.loads(data_in(text) or "{}")["runs"]
    if len(runs) != 1:
        raise RunFileError(f"it compares {len(runs)} runs, so give the page of each of them instead")
    return RunContents.from_json(runs[0])


def _of_log_history(path: Path) -> RunContents:
    from pytorch_accelerated.huggingface import LoggedHistory

    state = json.loads(path.read_text(encoding="utf-8"))
    contents = RunContents(name="")
    contents.read_history(LoggedHistory(state["log_history"]))
    contents.state |= {"updates": int(state["global_step"])}
    arguments = path.with_name("training_args.json")  # of our trainer, in checkpoints
    contents.config = dict(json.loads(arguments.read_text(encoding="utf-8"))) if arguments.is_file() else {}
    return contents


def write_comparison(runs: Sequence[Path], output: Path) -> None:
    """Write a page that shows runs side by side, or the page of a single one.

    Runs come in the order of their best values, the best run first: of the metric that most runs watch or show first.

    Args:
        runs: the page, states or log history of each, or folders with any number of them, at any depth.
        output: the page to write.

    Raises:
        ConfigurationError: if the page would replace one of them.
        RunFileError: if one of them is not a record of a run.
        OSError: if the page cannot be written.
    """
    found = [run for path in runs for run in (path.is_dir() and runs_in(path)) or [path]]
    replaced = [str(path) for path in found if path.exists() and output.exists() and path.samefile(output)]
    if replaced:
        raise ConfigurationError(f"The comparison would replace {replaced[0]}, one of the runs. Name another file.")
    contents = _best_first([read_run(path) for path in found])
    names = [run.name for run in contents]
    for number, run in enumerate(contents, start=1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"
    title = " · ".join(run.name for run in contents) if len(contents) < 5 else f"{len(contents)} runs"
    write_page(contents, title, output)


def _best_first(runs: Sequence[RunContents]) -> list[RunContents]:
    """Sorted by the best value of one metric; runs without a value come last, and the order is otherwise kept."""
    found = [best for run in runs for best in run.best if best["is_main"]]
    watched = [best for best in found if best.get("is_watched")]
    main = Counter(best["name"] for best in watched or found)
    (name, _), *_ = main.most_common(1) or [("", 0)]

    def place(run: RunContents) -> float:
        best = next((best for best in run.best if best["name"] == name), {"value": None})
        if not isinstance(best["value"], (int, float)):
            return math.inf
        return -best["value"] if best["greater_is_better"] else best["value"]

    return sorted(runs, key=place)
