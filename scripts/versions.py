"""Runs a part of the tests with other versions than those of `constraints.txt`, and writes what came of it.

    make versions                             # the oldest of each dependency, one at a time; the newest torch, too
    python scripts/versions.py numpy tqdm     # of these only
    python scripts/versions.py --environment  # what is installed beside this Python

The first and the last write to benchmarks/results/versions.md. An exchanged version gets a folder of its own, first on
the path; torch, with the torchvision that fits, an environment that sees all other packages of this one. For another
Python, make an environment, install `.[test]` in it, and let its Python run the last command.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results" / "versions.md"
TESTS = ["tests/checkpointing", "tests/prediction", "tests/progress", "tests/steps", "tests/seeding"]
FURTHER_TESTS = ["tests/callbacks", "tests/data", "tests/training"]
SHOWN = ("torch", "accelerate", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="dependencies; default: all")
    parser.add_argument("--environment", action="store_true", help="run the tests with what is installed")
    arguments = parser.parse_args()
    if arguments.environment:
        cells = [platform.python_version(), *map(version, SHOWN)]
        row = f"| {' | '.join(cells)} | {outcome([*TESTS, *FURTHER_TESTS])} |"
        exchanged, environments = rows_of_page()
        write(exchanged, sorted({**{key(one): one for one in environments}, key(row): row}.values(), key=key))
        print(row)
        return
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    oldest = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', block))
    asked = arguments.packages or oldest
    with_ = f"{platform.python_version()} | {version('torch')}"
    rows = [
        f"| {name} | {oldest[name]} | {with_} | {outcome_with(name, oldest[name])} |"
        for name in asked
        if name != "torch"
    ]
    print("\n".join(rows))
    if not arguments.packages:
        write(rows, rows_of_page()[1])
    if "torch" in asked:
        for requirement in (f"torch=={oldest['torch']}.*", "torch"):
            add_row_of_torch(requirement)


def outcome_with(name: str, bound: str) -> str:
    """The outcome of the tests with one package exchanged for the version `bound`."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, f"{name}=={bound}"], check=True)
        return outcome(TESTS, folder)


def add_row_of_torch(requirement: str) -> None:
    """Run the tests with another torch, in an environment of its own: what needs this one too comes with it."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        (packages,) = Path(folder).glob("lib/python*/site-packages")
        (packages / "others.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
        python = str(Path(folder, "bin", "python"))
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", requirement, "torchvision"], check=True)
        subprocess.run([python, __file__, "--environment"], check=True)


def outcome(tests: list[str], *folders: str) -> str:
    """The last line of pytest with these folders first on the path, and the names of tests that failed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, str(ROOT / "src"), str(ROOT)])}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not processes"]
    run = subprocess.run([*pytest, *tests], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = run.stdout.splitlines() or ["no output"]
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "; ".join([re.sub(r" in [\d.]+s.*", "", lines[-1]).strip("= "), *failed])


def rows_of_page() -> tuple[list[str], list[str]]:
    """The rows of both tables as they are now."""
    tables = re.findall(r"(?:^\| --- .*\n)((?:^\|.*\n)*)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    exchanged, environments = (table.splitlines() for table in tables)
    return exchanged, environments


def key(row: str) -> tuple[int, ...]:
    """What the rows of environments are sorted by: the versions of Python and torch."""
    return tuple(int(number) for number in re.findall(r"\d+", " ".join(row.split("|")[1:3]))[:6])


def write(exchanged: list[str], environments: list[str]) -> None:
    """Write the page."""
    lines = [
        "# Other versions",
        "",
        "The tests that are neither `slow` nor `processes` of",
        f"{', '.join(f'`{test}`' for test in TESTS)}.",
        "",
        "## The oldest supported dependencies",
        "",
        "`make versions` exchanged one package at a time; the others are those of `constraints.txt`.",
        "",
        "| package | version | Python | torch | tests |",
        "| --- | --- | --- | --- | --- |",
        *exchanged,
        "",
        "## Environments",
        "",
        "`python scripts/versions.py --environment`, by the Python of each environment; it also ran those of",
        f"{', '.join(f'`{test}`' for test in FURTHER_TESTS)}.",
        "",
        f"| Python | {' | '.join(SHOWN)} | tests |",
        f"|{' --- |' * (len(SHOWN) + 2)}",
        *environments,
    ]
    PAGE.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
