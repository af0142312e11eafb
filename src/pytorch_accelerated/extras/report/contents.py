"""What a page shows of a run, as plain values that are ready for JSON, and the page, which needs no network."""

from __future__ import annotations

import dataclasses
import html
import importlib.resources
import itertools
import json
import os
import platform
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pytorch_accelerated.states.publish import write_whole
from pytorch_accelerated.tracking import (
    MetricRecord,
    RunHistory,
    StepRecord,
    greater_is_better,
    hyperparameters_of,
    role_and_quantity,
)

_COLUMNS = ("epoch", "update", "value")  # of a metric
_MAX_MAIN_METRICS = 3
_MAX_SHOWN_SAMPLES = 64  # of a spike
_MAX_SHOWN_ROWS = 4096  # of a spike on the page, where they are folded
_NOT_IN_JSON = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
_MOST_EXACT = 2**53  # browsers round larger integers, such as seeds
_PACKAGES = ("pytorch_accelerated", "torch", "accelerate", "numpy", "transformers", "timm", "torchvision")
_SECRET = r"[^\0=]*(?i:token|password|passwd|secret|api[-_]?key|credential)[^\0=]*"

DATA_BEGINS = '<script id="run-data" type="application/json">'
DATA_ENDS = "</script>"


@dataclasses.dataclass
class RunContents:
    """What a page shows of one run. All values are plain; parts that are unknown are empty.

    Attributes:
        name: of the run.
        source: the file or folder that it was read from.
        state: `status` ("running", "finished", "stopped" or "failed"), `detail`, `started`, `updated` (seconds since
            1970), `seconds`, `samples_per_second`, `epoch`, `updates`,
            `skipped_updates`, `seconds_between_writes`.
        model: facts about the model and what trains it.
        config: the run config.
        environment: versions, device, command line.
        branch: where it left another run: `trunk`, `after_update`, and what was changed there, by name.
        notes: the user's own facts.
        metrics: for each metric `name`, `role`, `quantity`, the lists `epoch`, `update` and `value`, and `is_measured`,
            whether it was measured when the run was over.
        steps: the step records, one list for each field; `learning_rates` has one list for each group, `ranks` one for
            each rank, with its seconds of computation, of waiting for data, and of waiting for the others.
        best: for each metric that has a best value: `name`, `value`, `epoch`, `update`, `last`, `is_main`,
            `greater_is_better`, `is_watched`.
        epochs: for each epoch `epoch`, `seconds`, `data_wait_seconds`, `eval_seconds` and `wall_seconds`.
        events: `time`, `epoch`, `update`, `what` and `text`; of a loss spike also `rows`, indices in the training set,
            and their `number_of_rows`: a page doesn't show all of very many.
        predictions: see `predictions.describe`, by the name of the evaluation set, which is "" if there is one.
    """

    name: str
    source: str = ""
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    branch: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    steps: dict[str, Any] = dataclasses.field(default_factory=dict)
    best: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    epochs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    predictions: dict[str, Any] = dataclasses.field(default_factory=dict)

    def read_history(
        self, history: RunHistory, watched: Mapping[str, bool] | None = None, evaluation_sets: Iterable[str] = ()
    ) -> None:
        """Take curves, best values and sizes from the history of the run.

        Args:
            history: of the run.
            watched: whether greater is better, by the names of the metrics that callbacks watch. For others, words in
                their names tell it: less loss or error is better, more accuracy, precision, recall, F1 and so on.
            evaluation_sets: their names, which become part of the role: `eval_clean_loss` is the loss of "eval clean".
        """
        steps = history.step_records
        shown = [each for each in history.records if each.name not in history.names_not_shown]
        self.metrics = _metric_columns(shown, evaluation_sets)
        for metric in self.metrics:
            metric["is_measured"] = metric["name"] in history.names_measured_afterwards
        self.steps = _step_columns(steps)
        self.best = _best_values(self.metrics, history, watched or {})
        ends = [each.epoch for each in history.records[-1:]] + [each.epoch for each in steps[-1:]]
        self.state |= {"epoch": max(ends, default=0), "updates": history.updates_done}
        if steps and steps[-1].seconds:
            seconds = steps[-1].seconds
            self.state |= {"seconds": seconds, "samples_per_second": steps[-1].samples / seconds}

    def to_json(self) -> dict[str, Any]:
        """The fields, with the names of numbers that JSON lacks ("nan", "inf", "-inf") in their place."""
        return {field.name: json_value(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunContents:
        """The inverse of `to_json`, except for those numbers.

        Raises:
            TypeError, ValueError, RecursionError: if the values do not describe a run.
        """
        names = [field.name for field in dataclasses.fields(cls) if field.name in values]
        contents, empty = cls(**{name: json_value(values[name]) for name in names}), cls("")
        if any(type(value) is not type(getattr(empty, name)) for name, value in vars(contents).items()):
            raise ValueError("a field is of another type")
        return contents


def _metric_columns(records: Iterable[MetricRecord], evaluation_sets: Iterable[str]) -> list[dict[str, Any]]:
    """The numbers among the records by metric, each with its lists of epochs, updates and values."""
    sets = [name for name in evaluation_sets if name]
    by_name: dict[str, list[MetricRecord]] = {}
    for record in records:
        if record.is_scalar:
            by_name.setdefault(record.name, []).append(record)
    columns = []
    for name, of_name in by_name.items():
        role, quantity = role_and_quantity(name)
        role = role.strip("_/").replace("_", " ")
        prefix = next((f"{each}_" for each in sets if role and quantity.startswith(f"{each}_")), "")
        names = {"name": name, "role": f"{role} {prefix[:-1]}".strip(), "quantity": quantity.removeprefix(prefix)}
        columns.append(names | {part: [getattr(each, part) for each in of_name] for part in _COLUMNS})
    return columns


def _step_columns(records: Sequence[StepRecord]) -> dict[str, Any]:
    """The step records as one list for each field, and one for each parameter group's learning rates.

    The times of each rank are summed over the records; of a run that was resumed on more ranks, those it had before.
    """
    columns = {field: [getattr(record, field) for record in records] for field in StepRecord._fields}
    by_rank = [list(map(sum, zip(*times, strict=True))) for times in zip(*columns["ranks"], strict=False)]
    return {**columns, "learning_rates": list(itertools.zip_longest(*columns["learning_rates"])), "ranks": by_rank}


def _best_values(
    metrics: Iterable[Mapping[str, Any]], history: RunHistory, watched: Mapping[str, bool]
) -> list[dict[str, Any]]:
    """The best value of each metric for which better is known, with its place."""
    best = []
    for metric in metrics:
        name = metric["name"]
        greater = watched.get(name, greater_is_better(metric["quantity"]))
        record = None if greater is None else history.best_record(name, greater)
        if record is not None:
            facts = {"role": metric["role"], "last": metric["value"][-1], "greater_is_better": greater}
            best.append({**record._asdict(), **facts, "is_main": name in watched, "is_watched": name in watched})
    logged = [each for each in best if each["name"] not in history.names_measured_afterwards]
    evaluated = [each for each in logged if each["role"] not in ("train", "training")]
    main = [each for each in best if each["is_main"]]
    for each in (evaluated or logged)[: _MAX_MAIN_METRICS - len(main)]:
        each["is_main"] = True
    return best


def branch_facts(branch_of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a page says about a branch, from what its states say; empty for another run."""
    if not branch_of:
        return {}
    origin = branch_of[-1]
    changed = {name: f"{old} -> {new}" for name, (old, new) in origin["changed"].items()}
    return {"trunk": origin["trunk"], "after_update": origin["update"], **changed}


def json_value(value: Any) -> Any:
    """A plain value with text in place of numbers that JSON lacks ("nan", "inf", "-inf"), or that browsers round."""
    return json.loads(json.dumps(value), parse_constant=_NOT_IN_JSON.get, parse_int=_exact)


def _exact(digits: str) -> int | str:
    return int(digits) if abs(int(digits)) <= _MOST_EXACT else digits


def write_page(runs: Sequence[RunContents], title: str, path: Path) -> None:
    """Write the page that shows `runs`: a report of one, or a comparison of more. It is complete at any time.

    Raises:
        CheckpointError: if it cannot be written.
    """
    data = json.dumps({"runs": [run.to_json() for run in runs]}, allow_nan=False, separators=(",", ":"))
    page = string.Template(_file("page.html")).substitute(
        title=html.escape(title),
        chart_style=_file("vendored/uplot/uPlot.min.css"),
        style=_file("page.css"),
        data=data.replace("<", "\\u003c"),  # so that no text of a run can end the script or begin another one
        chart_script=_file("vendored/uplot/uPlot.iife.min.js"),
        script=_file("page.js"),
    )
    write_whole(path, [page.encode()])


def plain_notes(notes: Mapping[str, Any] | None) -> dict[str, Any]:
    """A user's own facts as they are in JSON; what JSON lacks becomes text."""
    return dict(json.loads(json.dumps(dict(notes or {}), default=repr)))


def shown_rows(samples: Sequence[Any]) -> list[Any]:
    """The first rows of a spike, as plain values."""
    return [row if isinstance(row, int) else str(row) for row in samples[:_MAX_SHOWN_ROWS]]


def spike_in_words(
    *, loss: float, median: float, first_update: int, last_update: int, samples: Sequence[int] | None, **_: Any
) -> str:
    """The arguments of `on_loss_spike` in words."""
    text = f"{loss:.4g}{'' if first_update == last_update else f' since update {first_update}'}"
    text += f", where the median was {median:.4g}"
    if samples:
        more = f" and {len(samples) - _MAX_SHOWN_SAMPLES} more" if len(samples) > _MAX_SHOWN_SAMPLES else ""
        text += f"; training samples {', '.join(map(str, samples[:_MAX_SHOWN_SAMPLES]))}{more}"
    return text


def data_in(page: str) -> str | None:
    """The JSON in a page of `write_page`; None if there is none."""
    begin = page.find(DATA_BEGINS)
    end = page.find(DATA_ENDS, begin)
    return None if begin < 0 or end < 0 else page[begin + len(DATA_BEGINS) : end]


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def model_facts(model: torch.nn.Module, optimizer: Any, scheduler: Any, loss_func: Any) -> dict[str, Any]:
    """What is trained, and by what."""
    values = hyperparameters_of(model, optimizer, scheduler, own={"loss": loss_func})
    # Once a schedule has begun, `initial_lr`, which comes after `lr`, is what the user gave.
    names = {name: name.removeprefix("model.").replace(".initial_lr", ".lr") for name in values}
    return {"class": values.pop("model")} | {names[name]: value for name, value in values.items()}


def environment_facts(device: torch.device, num_processes: int) -> dict[str, Any]:
    """Versions, device, host, command line and git commit. Values of options that look like secrets are left out."""
    versions = {name: getattr(sys.modules[name], "__version__", "?") for name in _PACKAGES if name in sys.modules}
    facts: dict[str, Any] = {"device": str(device)}
    if device.type == "cuda":
        facts["device"] = f"{torch.cuda.get_device_name(device)} ({device})"
        facts["cuda"] = torch.version.cuda
    facts |= {
        "processes": num_processes,
        "processor_cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name.replace("_", "-"): str(version) for name, version in versions.items()},
        "system": platform.platform(),
        "host": platform.node(),
        "command": "a notebook" if _is_kernel() else shlex.join(_without_secrets(sys.argv)),
        "folder": os.getcwd(),
    }
    commit = _git_commit()
    return facts if commit is None else {**facts, "git_commit": commit}


def _is_kernel() -> bool:
    """Whether the command line starts a notebook's kernel, and so says nothing about the notebook."""
    return Path(sys.argv[0]).name.endswith("kernel_launcher.py")


def _without_secrets(arguments: list[str]) -> list[str]:
    text = re.sub(f"({_SECRET}=)[^\\0]*", r"\1***", "\0".join(arguments))
    return re.sub(f"(-{_SECRET}\\0)(?!-)[^\\0]+", r"\1***", text).split("\0")


def _git_commit() -> str | None:
    """The commit of the folder of the script or notebook, and whether files were changed since; None without one."""
    script = Path(sys.argv[0] or ".")
    folder = script.parent if script.is_file() and not _is_kernel() else Path()
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty= with changes"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
