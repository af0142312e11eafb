"""What the Hugging Face trainer writes about a run for people: tables and files of metrics, and model cards."""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.huggingface import TrainingArguments
from pytorch_accelerated.record.text import printable
from pytorch_accelerated.states.publish import write_whole

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface import Trainer

Listed = str | Sequence[str] | None
_PACKAGES = ("pytorch_accelerated", "torch", "accelerate", "transformers", "datasets", "tokenizers")
_OF_ONE_MACHINE = ("output_dir", "logging_dir", "resume_from_checkpoint")
_NO_METRICS = ("_runtime", "_per_second", "_preparation_time", "epoch")


def formatted(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics for people: durations, megabytes and gigaflops as strings, other fractions to four decimals.

    >>> formatted({"train_runtime": 3723.456, "train_mem_cpu_alloc_delta": 5_000_000, "train_loss": 0.123456})
    {'train_runtime': '1:02:03.45', 'train_mem_cpu_alloc_delta': '4MB', 'train_loss': 0.1235}
    """
    return {name: _readable(name, value) for name, value in metrics.items()}


def as_table(split: str, metrics: Mapping[str, Any]) -> str:
    """A table of metrics, sorted by name, with the split as its heading."""
    readable = {printable(name): value for name, value in formatted(metrics).items()}
    name_width = max(map(len, readable), default=0)
    value_width = max((len(str(value)) for value in readable.values()), default=0)
    rows = [f"  {name:<{name_width}} = {value!s:>{value_width}}" for name, value in sorted(readable.items())]
    return "\n".join([f"***** {split} metrics *****", *rows])


def save_results(folder: Path, split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Write metrics to ``<split>_results.json``, and if `combined`, add them to ``all_results.json``. One rank.

    Raises:
        TypeError: if JSON cannot hold a metric; nothing is written then.
        CheckpointError: if the disk refuses.
    """
    _write_metrics(folder / f"{split}_results.json", metrics)
    if combined:
        path = folder / "all_results.json"
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        _write_metrics(path, {**earlier, **metrics})


def _readable(name: str, value: Any) -> Any:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return value
    if "_runtime" in name:
        seconds, fraction = divmod(value, 1)
        return f"{timedelta(seconds=seconds)}.{int(fraction * 100):02d}"
    if "_mem_" in name:
        return f"{int(value) >> 20}MB"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value


def _write_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    # Python writes and reads metrics that are not finite as NaN and Infinity.
    write_whole(path, [json.dumps(dict(metrics), indent=4, sort_keys=True).encode()])


def write_card(
    face: Trainer,
    folder: Path,
    name: str | None,
    tasks: Listed,
    datasets: tuple[Listed, Listed, Listed],
    header: Mapping[str, Any],
) -> None:
    """Write a page in Markdown; see `Trainer.create_model_card`.

    It lists the arguments that differ from the defaults, except folders, and the last logged value of each name.

    Args:
        face: the trainer.
        folder: for ``README.md``.
        name: of the model.
        tasks: what it does.
        datasets: the names of the datasets, those on the hub, and their configurations.
        header: what else the hub reads; values that are None are left out.
    """
    model, args = face.model, face.args
    name = name or Path(args.output_dir or ".").resolve().name
    last = {key: value for entry in face.state.log_history for key, value in entry.items()}
    head = {
        **header,
        "tags": _listed(header.get("tags")),
        "pipeline_tag": next(iter(_listed(tasks) or []), None),
        "datasets": _listed(datasets[1]),
        "model-index": [{"name": name, "results": list(_results(tasks, *datasets, last))}],
    }
    defaults = TrainingArguments().to_dict()
    given = {
        key: value
        for key, value in args.to_dict().items()
        if key not in _OF_ONE_MACHINE and (key not in defaults or defaults[key] != value)
    }
    versions = {each: sys.modules[each].__version__ for each in _PACKAGES if each in sys.modules}
    parts: dict[str, Mapping[str, Any]] = {
        "Last logged values": formatted(last),
        "Arguments that differ from the defaults": given,
        "Versions": {"Python": platform.python_version(), **versions},
    }
    size = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        "---",
        # A line of JSON is also YAML.
        *(f"{key}: {_json(value)}" for key, value in head.items() if value is not None),
        "---",
        "",
        f"# {name}",
        "",
        f"`{type(model).__name__}` with {size:,} parameters, trained with {_PACKAGES[0]} on {args.world_size} "
        "process(es).",
    ]
    for title, values in parts.items():
        if values:
            lines += ["", f"## {title}", "", *(f"- `{key}`: {_json(value)}" for key, value in values.items())]
    write_whole(folder / "README.md", ["\n".join([*lines, ""]).encode()])


def _results(tasks: Any, datasets: Any, tags: Any, arguments: Any, last: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The metrics of the last evaluation, for each pair of a task and a dataset."""
    values = {
        key.removeprefix("eval_"): value
        for key, value in last.items()
        if key.startswith("eval_") and not key.endswith(_NO_METRICS) and _is_finite(value)
    }
    metrics = [{"name": key.replace("_", " "), "type": key, "value": value} for key, value in values.items()]
    names, tags, arguments = (_listed(each) or [] for each in (datasets or tags, tags, arguments))
    for task in _listed(tasks) or [] if metrics else []:
        for index, name in enumerate(names):
            dataset = {"name": name, "type": tags[index] if index < len(tags) else name}
            if index < len(arguments):
                dataset["args"] = arguments[index]
            yield {"task": {"name": task, "type": task}, "dataset": dataset, "metrics": metrics}


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _listed(value: Listed) -> list[str] | None:
    return [value] if isinstance(value, str) else None if value is None else list(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
