"""Counts the lines of a script, and runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.jobs.jobs import SCRIPTS, Job, Start

ROOT = Path(__file__).parents[2]
MARK = "# --- job ---\n"
SECONDS = 600


class Row(NamedTuple):
    """What is known of a script.

    Attributes:
        lines: its lines below the mark, without blank ones and comments.
        imports: how many of them belong to imports.
        figure: what it printed, or None.
        complaint: why the job was not done, or "".
        is_missing: whether it could not be run here, because a library is not installed.
    """

    lines: int
    imports: int
    figure: float | None = None
    complaint: str = ""
    is_missing: bool = False


def counted_part(script: str) -> str:
    """The part of a script that counts, as ruff formats it."""
    path = SCRIPTS / f"{script}.py"
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(path), "-"]
    text = path.read_text(encoding="utf-8")
    done = subprocess.run(command, input=text, capture_output=True, text=True, encoding="utf-8", check=True)
    return done.stdout.partition(MARK)[2].strip() + "\n"


def count(script: str) -> tuple[int, int]:
    """The lines of the part that counts, and how many of them belong to imports."""
    lines = [line for line in counted_part(script).splitlines() if line.strip() and not line.strip().startswith("#")]
    text = "\n".join(lines)
    imports = re.findall(r"^(?:import|from) [^(\n]*(?:\([^)]*\))?$", text, re.MULTILINE)
    return len(lines), sum(each.count("\n") + 1 for each in imports)


def run(script: str, job: Job, peers: Path | None = None) -> Row:
    """Run a script in a fresh process and an empty folder, and check what it prints.

    Args:
        script: its name.
        job: what it has to do.
        peers: a folder with further packages.
    """
    row = Row(*count(script))
    start = job.starts.get(script, Start())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in job.files.get(script, {}).items():
            (folder / file).write_text(text, encoding="utf-8")
        command = [*start.before, str(SCRIPTS / f"{script}.py"), *start.after]
        if start.is_killed_first:
            code, output = _run_python(command, folder, peers)
            if code != -signal.SIGKILL and "No module named" not in output:
                return row._replace(complaint=f"the first process ended with {code}\n{output}")
        code, output = _run_python(command, folder, peers)
        if code:
            is_missing = re.search(r"^ModuleNotFoundError: No module named", output, re.MULTILINE) is not None
            return row._replace(complaint=output, is_missing=is_missing)
        found = re.findall(rf"\b{job.figure}: (\S+)", output)
        row = row._replace(figure=float(found[-1]) if found else None)
        if row.figure is None or not row.figure >= job.at_least:
            return row._replace(complaint=f"{job.figure} is {row.figure}, not {job.at_least} or more\n{output}")
        if job.expected not in output:
            return row._replace(complaint=f"it did not print {job.expected!r}\n{output}")
        try:
            if start.then and (after := _run_python(list(start.then), folder, peers))[0]:
                raise ValueError(after[1])
            if job.check is not None:
                job.check(script, folder)
        except (ValueError, OSError) as error:
            return row._replace(complaint=str(error))
    return row


def _run_python(arguments: list[str], folder: Path, peers: Path | None) -> tuple[int, str]:
    """The exit code, and all output."""
    paths = [ROOT / "src", ROOT, *([peers.absolute()] if peers else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "KERAS_BACKEND": "torch",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout.decode("utf-8", "replace")
