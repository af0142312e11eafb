"""`create_model_card` of the Hugging Face trainer: a page about a model, with a header for the hub."""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.huggingface import TrainingArguments

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface import Trainer

Listed = str | Sequence[str] | None
_PACKAGES = ("pytorch_accelerated", "torch", "accelerate", "transformers", "datasets", "tokenizers")
_OF_ONE_MACHINE = ("output_dir", "logging_dir", "resume_from_checkpoint")
_NO_METRICS = ("_runtime", "_per_second", "_preparation_time", "epoch")


def model_card(
    face: Trainer, name: str | None, tasks: Listed, datasets: tuple[Listed, Listed, Listed], header: Mapping[str, Any]
) -> str:
    """A page in Markdown; see `Trainer.create_model_card`.

    It lists the arguments that differ from the defaults, except folders, and the last logged value of each name.

    Args:
        face: the trainer.
        name: of the model.
        tasks: what it does.
        datasets: the names of the datasets, those on the hub, and their configurations.
        header: what the hub reads besides; values that are None are left out.
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
        "Last logged values": face.metrics_format(last),
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
    return "\n".join([*lines, ""])


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
