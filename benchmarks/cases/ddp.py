"""Two processes on one machine: our step compared with a step of a raw DDP loop."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measuring import Result, Setting, Target
from benchmarks.ways import OURS
from benchmarks.work import Job


def run(setting: Setting) -> list[Result]:
    short = Job(samples=64 * setting.size(100, quick=5), kind="tensors")
    long = Job(samples=64 * setting.size(600, quick=10), kind="tensors")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        worker = ["-m", "benchmarks.ddp_ranks", short.samples, long.samples, setting.repeats, file]
        subprocess.run([sys.executable, *launcher, *map(str, worker)], check=True)
        measured = json.loads(file.read_text())
    return [
        Result(
            title=(
                f"A step on two processes (gloo, MLP 32-64-10, batch 32 on each, slope between {short.steps // 2} and "
                f"{long.steps // 2} steps)"
            ),
            unit="µs per step",
            **measured,
            baseline="raw DDP loop, ready batches",
            compared_as="difference",
            targets=[Target(OURS[0], at_most=60)],
            note=(
                "Each update has the same samples everywhere. Batches are ready for each way but the DataLoader and "
                "ours with data in memory, which load them in that time."
            ),
        )
    ]
