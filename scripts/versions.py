"""Runs a part of the tests with the oldest supported version of one dependency after the other, and writes a table.

    make versions               # writes benchmarks/results/versions.md
    python scripts/versions.py numpy tqdm

Each version gets a folder of its own, first on the path, and everything else stays as it is in this environment. torch
is never installed: it is large.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results" / "versions.md"
TESTS = ["tests/checkpointing", "tests/prediction", "tests/progress", "tests/steps", "tests/test_seeding.py"]


def main() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    oldest = {name: bound for name, bound in re.findall(r'"([\w-]+)>=([\d.]+)"', block) if name != "torch"}
    rows = [f"| {name} | {bound} | {outcome(name, bound)} |" for name, bound in oldest.items() if is_asked(name)]
    head = [
        "# Oldest supported versions",
        "",
        f"Python {platform.python_version()}, torch {version('torch')}; one package at a time is exchanged, the others",
        "are those of `constraints.txt`. `make versions` ran the tests that are neither `slow` nor `processes` of",
        f"{', '.join(f'`{test}`' for test in TESTS)}.",
        "",
        "| package | version | tests |",
        "| --- | --- | --- |",
    ]
    print("\n".join(rows))
    if len(rows) == len(oldest):
        PAGE.write_text("\n".join([*head, *rows, ""]), encoding="utf-8")


def is_asked(name: str) -> bool:
    """Whether the command line names this package, or none."""
    return name in sys.argv[1:] or len(sys.argv) == 1


def outcome(name: str, bound: str) -> str:
    """The last line of pytest with this version, and the names of tests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, f"{name}=={bound}"], check=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT / "src"), str(ROOT)])}
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not processes"]
        run = subprocess.run([*pytest, *TESTS], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = run.stdout.splitlines() or ["no output"]
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "; ".join([re.sub(r" in [\d.]+s.*", "", lines[-1]).strip("= "), *failed])


if __name__ == "__main__":
    main()
