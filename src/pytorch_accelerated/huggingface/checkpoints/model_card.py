"""Model cards: descriptions of results for the hub and for people."""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments
from pytorch_accelerated.huggingface.evaluation.results import formatted

CARD_NAME = "README.md"

_PACKAGE = __name__.partition(".")[0]
_PACKAGES = (_PACKAGE, "torch", "accelerate", "transformers", "datasets", "tokenizers")
_OF_ONE_MACHINE = ("output_dir", "logging_dir", "resume_from_checkpoint")
_NO_METRICS = ("_runtime", "_per_second", "_preparation_time", "_delta", "epoch")


def model_card(
    model: Any,
    args: TrainingArguments,
    log_history: Sequence[Mapping[str, Any]],
    *,
    name: str | None = None,
    tasks: str | Sequence[str] | None = None,
    datasets: str | Sequence[str] | None = None,
    dataset_tags: str | Sequence[str] | None = None,
    dataset_args: str | Sequence[str] | None = None,
    **metadata: Any,
) -> str:
    """A page in Markdown, with a header for the hub that also has the `metadata` that are not None.

    It lists the arguments that differ from the defaults, except folders, and the last logged value of each name. See
    `Trainer.create_model_card` for the others.
    """
    name = name or Path(args.output_dir or ".").resolve().name
    last = {key: value for entry in log_history for key, value in entry.items()}
    head = {
        **metadata,
        "tags": _listed(metadata.get("tags")),
        "pipeline_tag": next(iter(_listed(tasks) or []), None),
        "datasets": _listed(dataset_tags),
        "model-index": [{"name": name, "results": list(_results(tasks, datasets, dataset_tags, dataset_args, last))}],
    }
    defaults = TrainingArguments().to_dict()
    given = {
        key: value
        for key, value in args.to_dict().items()
        if key not in _OF_ONE_MACHINE and (key not in defaults or defaults[key] != value)
    }
    versions = {each: sys.modules[each].__version__ for each in _PACKAGES if each in sys.modules}
    about = {"tasks": tasks, "datasets": datasets, "configurations": dataset_args}
    parts: dict[str, Mapping[str, Any]] = {
        "Tasks and data": {key: _listed(value) for key, value in about.items() if value is not None},
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
        f"`{type(model).__name__}` with {size:,} parameters, trained with {_PACKAGE} on {args.world_size} process(es).",
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


def _listed(value: str | Sequence[str] | None) -> list[str] | None:
    return [value] if isinstance(value, str) else None if value is None else list(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
