"""Keeps what the chaos runs did, as a table, where the environment variable ``CHAOS_RESULTS`` names a folder."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import pytorch_accelerated


def record(case: str, figures: Mapping[str, Any]) -> None:
    """Put the figures of a case into ``chaos.json``, and write the table ``chaos.md`` anew."""
    folder = os.environ.get("CHAOS_RESULTS")
    if not folder:
        return
    file = Path(folder) / "chaos.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(file.read_text()) if file.exists() else {}
    results[case] = dict(figures)
    file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    rows = [
        f"| {case} | {name} | {value} |" for case, figures in sorted(results.items()) for name, value in figures.items()
    ]
    versions = (
        f"pytorch-accelerated {pytorch_accelerated.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    )
    head = ["# What `make chaos` did", "", versions + ". A case that fails is an error, and writes no row.", ""]
    table = ["| case | what | figure |", "| --- | --- | --- |", *rows]
    (Path(folder) / "chaos.md").write_text("\n".join([*head, *table]) + "\n")
