"""Tables and files of metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from pytorch_accelerated.huggingface.checkpoints.saving import write_whole
from pytorch_accelerated.progress.screen import printable


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
    _write(folder / f"{split}_results.json", metrics)
    if combined:
        path = folder / "all_results.json"
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        _write(path, {**earlier, **metrics})


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


def _write(path: Path, metrics: Mapping[str, Any]) -> None:
    # Python writes and reads metrics that are not finite as NaN and Infinity.
    write_whole(path, [json.dumps(dict(metrics), indent=4, sort_keys=True).encode()])
