"""Runs public scripts with this library and with the reference package, and writes a table of the results.

    make public-scripts

The scripts are the examples of the reference package. They are copied into a temporary folder, given small data, and
run with changed paths and sizes only, listed in `public_scripts_list.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from scripts.public_scripts_data import MAKERS  # noqa: E402
from scripts.public_scripts_list import SCRIPTS, PublicScript  # noqa: E402
from tests.differential.both import REFERENCE, VERSION  # noqa: E402
from tests.support import torchvision_on_cpu  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "public_scripts.md"
RUNNER = Path(__file__).with_name("public_script_runner.py")
RELATIVE_TOLERANCE = 1e-5  # both train in float32
_HEAD = f"""\
# Public scripts

Written by `make public-scripts`: the examples that pytorch-accelerated {VERSION} brings, run with that version and with
this library, on small data that is made on the spot. Changed is what the second column has, paths and sizes, and
nothing else; the data comes in the same order for both. Numbers are the same if every value of every run history
agrees to {RELATIVE_TOLERANCE:g}, relative; otherwise the last training loss is shown, with the reason.
"""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a script: its histories, or its last line of output."""

    histories: list[dict[str, Any]]
    error: str

    @property
    def shown(self) -> str:
        """The outcome in words, for the table."""
        return f"no: `{self.error}`" if self.error else "yes"


def main() -> int:
    """Run all scripts, or the named ones, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REFERENCE / "examples", help="the folder with the scripts")
    parser.add_argument("--packages", type=Path, default=Path(sys.prefix) / "public-scripts", help="what they import")
    parser.add_argument("--only", default="", help="run only scripts with this in their name; no table is written")
    arguments = parser.parse_args()
    torchvision_on_cpu.install()  # transformers imports it
    rows, failed = [], 0
    for script in SCRIPTS:
        if arguments.only not in script.path:
            continue
        ours = run(script, arguments.folder, arguments.packages, ROOT / "src")
        reference = run(script, arguments.folder, arguments.packages, REFERENCE)
        failed += bool(ours.error)
        rows.append(
            (f"`{script.path}`", script.shown_changes, ours.shown, reference.shown, compared(script, ours, reference))
        )
        print(" | ".join(rows[-1]), flush=True)
    if not arguments.only:
        table = _table(("script", "changed", "runs here", f"runs with {VERSION}", "numbers"), rows)
        PAGE.write_text("\n".join([_HEAD, *table, ""]), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 1 if failed else 0


def run(script: PublicScript, folder: Path, packages: Path, package: Path) -> Outcome:
    """Run `script` in a copy of `folder`, with the library that is in `package`."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "examples"
        shutil.copytree(folder, copy)
        for file, old, new in script.substitutions:
            text = (copy / file).read_text(encoding="utf-8")
            assert old in text, f"{file} has no {old!r}: {script.path} is another version than the list is for"
            (copy / file).write_text(text.replace(old, new), encoding="utf-8")
        for maker in script.data:
            MAKERS[maker](copy / "data")
        output = Path(temporary) / "histories.json"
        paths = [package, ROOT, ROOT / "tests" / "support", packages]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(Path(temporary) / "cache"),
            "NO_ALBUMENTATIONS_UPDATE": "1",
        }
        command = [sys.executable, str(RUNNER), str(output), str(copy / script.path), *script.arguments]
        process = subprocess.run(
            command, cwd=copy, env=env, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False
        )
        histories = json.loads(output.read_text(encoding="utf-8")) if output.exists() else []
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    error = "" if process.returncode == 0 else (lines[-1] if lines else f"exit code {process.returncode}")
    if error:
        print(process.stderr[-3000:], file=sys.stderr)
    return Outcome(histories, error)


def compared(script: PublicScript, ours: Outcome, reference: Outcome) -> str:
    """Whether both have the same histories; otherwise, where they end and why."""
    if not ours.histories or not reference.histories:
        return ""
    if _same(ours.histories, reference.histories):
        return "the same"
    return f"{_ending(ours)} here, {_ending(reference)} there: {script.why}"


def _ending(outcome: Outcome) -> str:
    losses = [history["train_loss_epoch"] for history in outcome.histories if "train_loss_epoch" in history][-1]
    return f"{losses[-1]:.4f} after {len(losses)} epochs"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE)
    return bool(one == other)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in [header, ["---"] * len(header), *rows]:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    sys.exit(main())
