"""Reads runs back, from a report, a training state, a ``result.json`` or a log history, and compares them."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_accelerated.errors import ConfigurationError, PytorchAcceleratedError, RunFileError
from pytorch_accelerated.extras.report.contents import RunContents, branch_facts, data_in, write_page
from pytorch_accelerated.extras.report.result import FORMAT, why_lost
from pytorch_accelerated.states import MEASURED_FILE
from pytorch_accelerated.states.verify import list_states, looks_like_state, read_manifest
from pytorch_accelerated.tracking import greater_is_better
from pytorch_accelerated.utils import read_run_history

RESULT_FILE = "result.json"
COMPARISON_FILE = "compare.html"
_LOG_HISTORY_FILE = "trainer_state.json"
_WITHOUT_RESULT = ("running", "failed", "lost", "unreadable")
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def read_run(path: Path) -> RunContents:
    """The run that `path` shows or has saved, with the status and the error in a ``result.json`` next to it.

    Raises:
        RunFileError: if it is nothing of that kind, or damaged.
    """
    if path.name == RESULT_FILE and path.is_file():
        path = path.parent
    try:
        result = _result_of(path)
        log = _log_history_in(path)
        if log is not None:
            contents = _of_log_history(log)
        elif path.is_dir():
            contents = _of_states(path, result)
        else:
            contents = _of_page(path.read_text(encoding="utf-8"))
            _add_measured(contents, path)
        if result is not None:
            _add_result(contents, json.loads(result.read_text(encoding="utf-8")))
        if contents.state.get("status") == "running" and (reason := why_lost(contents.state)):
            contents.state |= {"status": "lost", "detail": reason}
        for best in contents.best:
            if not {"name", "value", "epoch", "update", "is_main"} <= best.keys():
                raise ValueError(f"a best value has only {', '.join(best)}")
            best.setdefault("greater_is_better", greater_is_better(best["name"]))  # version 1.0 did not write it
    except (*_UNREADABLE, OSError, PytorchAcceleratedError) as error:
        reason = "what it holds is damaged, or of another kind" if path.exists() else "there is no such file or folder"
        reason = str(error).removesuffix(".") if isinstance(error, PytorchAcceleratedError) else reason
        raise RunFileError(
            f"{path} is not a record of a run: {reason}. A run is a page of ReportCallback (.html), a folder of "
            f"training states, or a {RESULT_FILE} or {_LOG_HISTORY_FILE} or its folder."
        ) from error
    contents.source = str(path)
    contents.name = contents.name or (path.name if path.is_dir() else path.stem)
    return contents


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder and below: pages, and folders without one that have states, a result or a log history.

    Raises:
        OSError: if a folder or a page cannot be read.
    """
    inside = sorted(path for path in folder.iterdir() if not path.is_symlink())
    pages = [path for path in inside if path.suffix == ".html" and _shows_one_run(path)]
    if _log_history_in(folder) or any(folder.glob("run.json")) or any(folder.glob("*/run.json")):
        return pages or [folder]
    own = pages or [folder] * (folder / RESULT_FILE in inside)
    below = [(path, run) for path in inside if path.is_dir() for run in runs_in(path)]
    return own + [run for path, run in below if not own or run != path or (path / RESULT_FILE).exists()]


def all_runs(place: Path) -> list[RunContents]:
    """The run that `place` is, or all runs in it. One that cannot be read has the status "unreadable", and says why.

    Raises:
        RunFileError: if there is no such file or folder.
        OSError: if a folder cannot be read.
    """
    if not place.exists():
        raise RunFileError(f"There is no file or folder {str(place)!r}. Check the path.")
    runs = []
    for path in runs_in(place) if place.is_dir() else [place]:
        try:
            runs.append(read_run(path))
        except RunFileError as error:
            runs.append(RunContents(path.name, str(path), {"status": "unreadable", "detail": str(error)}))
    return runs


def _result_of(path: Path) -> Path | None:
    """The ``result.json`` in a folder or next to a page; one of two pages can't claim it."""
    folder = path if path.is_dir() else path.parent
    is_one_of_several = path.suffix == ".html" and sum(map(_shows_one_run, folder.glob("*.html"))) > 1
    result = folder / RESULT_FILE
    return result if result.is_file() and not is_one_of_several else None


def _shows_one_run(path: Path) -> bool:
    """Whether a file is a page of ours, and not a comparison. A damaged one counts, so that the reader names it."""
    if path.name == COMPARISON_FILE:  # that of a single run would be counted as a second one
        return False
    data = data_in(path.read_text(encoding="utf-8", errors="replace"))
    try:
        return data is not None and len(json.loads(data)["runs"]) == 1
    except _UNREADABLE:
        return True


def _log_history_in(path: Path) -> Path | None:
    """The log history that `path` is or has, from the last of its checkpoints; None without one."""
    checkpoints = path.glob(f"checkpoint-*/{_LOG_HISTORY_FILE}")
    newest_last = sorted(checkpoints, key=lambda file: (len(file.parent.name), file.parent.name))
    files = [path if path.name == _LOG_HISTORY_FILE else path / _LOG_HISTORY_FILE]
    return next((file for file in [*files, *reversed(newest_last)] if file.is_file()), None)


def _of_page(text: str) -> RunContents:
    data = data_in(text)
    if data is None:
        raise RunFileError("the file has no data of a run in it")
    runs = json.loads(data)["runs"]
    if len(runs) != 1:
        raise RunFileError(f"it compares {len(runs)} runs, so give the page of each of them instead")
    return RunContents.from_json(runs[0])


def _add_measured(contents: RunContents, page: Path) -> None:
    """Add what was measured of the run on a page: of the states in its folder or one below, which only one page has."""
    files = [*page.parent.glob(MEASURED_FILE), *page.parent.glob(f"*/{MEASURED_FILE}")]
    if len(files) == 1 and sum(map(_shows_one_run, page.parent.glob("*.html"))) == 1:
        added = RunContents("")
        added.read_history(read_run_history(files[0].parent))
        names = {each["name"] for each in added.metrics if each["is_measured"]}
        contents.metrics += [each for each in added.metrics if each["name"] in names]
        contents.best += [each for each in added.best if each["name"] in names]


def _of_states(path: Path, result: Path | None) -> RunContents:
    """What the states in a folder have; next to a ``result.json`` they may be one folder down, or missing."""
    contents = RunContents(name="")
    inside = [] if result is None else sorted(path.iterdir())
    for place in [path, *(each for each in inside if each.is_dir() and not (each / RESULT_FILE).exists())]:
        with contextlib.suppress(FileNotFoundError):  # next to a result, a missing state isn't a mistake
            contents.read_history(read_run_history(place))
            contents.branch = branch_facts(_newest_facts(place).get("branch_of", ()))
            return contents
    if result is None:
        raise RunFileError("the folder has no run in it")
    return contents


def _newest_facts(place: Path) -> dict[str, Any]:
    return (read_manifest(place) if looks_like_state(place) else list_states(place)[-1][1]).facts


def _add_result(contents: RunContents, result: Mapping[str, Any]) -> None:
    """Take what a ``result.json`` says. It knows how the run went, and by which metric it is judged."""
    if result["format"] != FORMAT:
        raise RunFileError(f"its {RESULT_FILE} has format {result['format']!r}, which a newer version may read")
    taken = ("status", "epoch", "updates", "seconds", "updated", "error", "pid", "host")
    contents.state |= {name: result[name] for name in taken}
    contents.state["detail"] = result["reason"]
    contents.config = contents.config or dict(result["config"])
    contents.notes = contents.notes or dict(result["notes"])
    best = result["best"]
    if best is not None:
        best = {**best, "last": result["metrics"].get(best["name"]), "is_main": True, "is_watched": True}
        contents.best = [best, *(each for each in contents.best if each["name"] != best["name"])]


def _of_log_history(path: Path) -> RunContents:
    from pytorch_accelerated.huggingface import LoggedHistory

    state = json.loads(path.read_text(encoding="utf-8"))
    contents = RunContents(name="")
    contents.read_history(LoggedHistory(state["log_history"]))
    contents.state |= {"updates": int(state["global_step"])}
    arguments = path.with_name("training_args.json")  # of our trainer, in checkpoints
    contents.config = dict(json.loads(arguments.read_text(encoding="utf-8"))) if arguments.is_file() else {}
    return contents


def write_comparison(runs: Sequence[Path], output: Path, metric: str | None = None) -> list[str]:
    """Write a page that shows runs side by side, the best first, or the page of a single one.

    Args:
        runs: the page, states, result or log history of each, or folders with any number of them, at any depth.
        output: the page to write.
        metric: by which to sort them, see `main_metric`.

    Returns:
        Why some runs in the folders cannot be read, and were left out.

    Raises:
        ConfigurationError: if the page would replace one of them, or no run has the metric.
        RunFileError: if one of them is not a record of a run.
        CheckpointError: if the page cannot be written.
    """
    found = [run for path in runs for run in (path.is_dir() and all_runs(path)) or [read_run(path)]]
    damaged = [run for run in found if run.state.get("status") == "unreadable"]
    for run in damaged:
        if Path(run.source) in runs or len(damaged) == len(found):
            raise RunFileError(run.state["detail"])
    replaced = [run.source for run in found if output.exists() and Path(run.source).samefile(output)]
    if replaced:
        raise ConfigurationError(f"The comparison would replace {replaced[0]}, one of the runs. Name another file.")
    contents = [run for run in found if run not in damaged]
    contents = best_first(contents, main_metric(contents, metric))
    names = [run.name for run in contents]
    for number, run in enumerate(contents, start=1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"
    title = " · ".join(run.name for run in contents) if len(contents) < 5 else f"{len(contents)} runs"
    write_page(contents, title, output)
    return [run.state["detail"] for run in damaged]


def main_metric(runs: Sequence[RunContents], wanted: str | None = None) -> str:
    """The metric that ranks runs: the one wanted, or the one that most runs watch, or show first; "" without any.

    Raises:
        ConfigurationError: if no run has a best value of the one wanted.
    """
    found = [best for run in runs for best in run.best]
    names = {best["name"] for best in found}
    if wanted is not None and wanted not in names:
        raise ConfigurationError(
            f"No run has a best value of {wanted!r}, but of: {', '.join(sorted(names)) or 'nothing'}. Name one of "
            "these, or let a callback such as SaveBestModelCallback watch it, which says whether more is better."
        )
    main = [best for best in found if best["is_main"]]
    watched = [best["name"] for best in main if best.get("is_watched")]
    chosen = Counter(watched or [best["name"] for best in main]).most_common(1)
    return wanted or (chosen[0][0] if chosen else "")


def best_of(run: RunContents, metric: str) -> dict[str, Any] | None:
    """The best value of a metric in a run, with its place; None without a finite one."""
    found = (best for best in run.best if best["name"] == metric and isinstance(best["value"], (int, float)))
    return next((best for best in found if math.isfinite(best["value"])), None)


def best_first(runs: Sequence[RunContents], metric: str) -> list[RunContents]:
    """Sorted by the best value of a metric; runs without a value come last, and the order is otherwise kept."""

    def place(run: RunContents) -> float:
        best = best_of(run, metric) or {"value": math.inf, "greater_is_better": False}
        return float(-best["value"] if best["greater_is_better"] else best["value"])

    return sorted(runs, key=place)


def values_by_seed(runs: Sequence[RunContents], metric: str) -> tuple[dict[str, float], list[str]]:
    """The best values of runs that are over, by their seeds; and the other runs, each with the reason.

    Raises:
        ConfigurationError: if two runs have the same seed.
    """
    values: dict[str, float] = {}
    left_out = []
    for run in runs:
        status, seed, best = run.state.get("status"), run.config.get("seed"), best_of(run, metric)
        if status in _WITHOUT_RESULT:
            left_out.append(f"{run.source}: {status}, {run.state.get('detail', '')}".removesuffix(", "))
        elif seed is None:
            left_out.append(f"{run.source}: its page or result.json has no seed. Give one: Trainer(..., seed=1)")
        elif best is None:
            left_out.append(f"{run.source}: no finite value of {metric!r}")
        elif str(seed) in values:
            raise ConfigurationError(
                f"{run.source} is the second run with seed {seed}. Keep one of each in its folder."
            )
        else:
            values[str(seed)] = float(best["value"])
    return values, left_out
