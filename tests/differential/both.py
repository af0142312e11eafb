"""Runs the scenarios with the reference and with ours, in processes of their own."""

import functools
import hashlib
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.support.processes import REPOSITORY, run_forked, run_on_ranks, run_script, run_under_torchrun

VERSION = "0.1.61"
#: Where `make` installs the reference, without its dependencies, so that both packages use the same torch.
REFERENCE = Path(os.environ.get("PYTORCH_ACCELERATED_REFERENCE", Path(sys.prefix) / "reference"))
OBSERVE = Path(__file__).with_name("observe.py")
SCENARIOS = Path(__file__).with_name("scenarios")
ON_RANKS = ("gathering",)
WORLD_SIZE = 2
MODULES = tuple(sorted(path.stem for path in SCENARIOS.glob("*.py") if path.stem not in ("__init__", "common")))


def is_installed() -> bool:
    """Whether the reference is there."""
    return (REFERENCE / "pytorch_accelerated").is_dir()


@functools.cache
def observations() -> tuple[dict[str, Any], dict[str, Any]]:
    """What the scenarios show with the reference, and what they show with ours.

    Those of the reference are kept beside it, until a scenario, a version or the kernels change: each kind of kernel
    rounds in its own way.
    """
    return _of_the_reference(), _observe(REPOSITORY / "src")


def _of_the_reference() -> dict[str, Any]:
    kept, key = REFERENCE / "observations.json", _key()
    if kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["key"] == key:
            return found["seen"]  # type: ignore[no-any-return]
    seen = _observe(REFERENCE)
    kept.write_text(json.dumps({"key": key, "seen": seen}), encoding="utf-8")
    return seen


def _key() -> str:
    sources = [path.read_text(encoding="utf-8") for path in sorted([*SCENARIOS.glob("*.py"), OBSERVE])]
    versions = [sys.version, *(version(name) for name in ("torch", "accelerate", "numpy", "timm"))]
    kernels = torch.backends.cpu.get_cpu_capability()
    return hashlib.sha256(json.dumps([VERSION, kernels, *versions, *sources]).encode()).hexdigest()


def _observe(package: Path) -> dict[str, Any]:
    paths = [package, REPOSITORY, REPOSITORY / "tests" / "support"]
    # A machine's GPUs are hidden already; without this variable accelerate looks for other devices on some.
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "ACCELERATE_USE_CPU": "true"}
    # The reference needs processes that have not imported ours.
    alone, together = (run_script, run_under_torchrun) if package == REFERENCE else (run_forked, run_on_ranks)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seen.json"
        alone(OBSERVE, file, *MODULES, env=env, timeout_seconds=1200)
        seen = _read(file)
        together(OBSERVE, WORLD_SIZE, file, *ON_RANKS, env=env, timeout_seconds=1200)
        for rank in range(WORLD_SIZE):
            of_rank = _read(Path(f"{file}.{rank}"))
            seen.update({f"rank {rank} of {WORLD_SIZE}, {name}": value for name, value in of_rank.items()})
    return seen


def _read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    assert not found["errors"], f"scenarios that ended with an error show nothing: {found['errors']}"
    return found["seen"]  # type: ignore[no-any-return]
