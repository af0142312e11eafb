"""Two processes on one machine: our step compared with a step of a raw DDP loop."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measuring import Measurements, Result, Setting, Target
from benchmarks.ways import OURS, Ours
from benchmarks.work import Job


def run(setting: Setting) -> list[Result]:
    short = Job(samples=64 * setting.size(100, quick=5))
    long = Job(samples=64 * setting.size(600, quick=10))
    slope = f"slope between {short.steps // 2} and {long.steps // 2} steps"
    short_long = Job(samples=64 * setting.size(10, quick=3))
    long_long = Job(samples=64 * setting.size(60, quick=6))
    slope_of_long = f"slope between {short_long.steps // 2} and {long_long.steps // 2} steps"
    on = f"two processes (gloo, MLP 32-64-10, batch 32 on each, {slope})"
    return [
        Result(
            title=f"A step on {on}",
            unit="µs per step",
            **_measured("tensors", short, long, setting),
            baseline="raw DDP loop, ready batches",
            compared_as="difference",
            targets=[Target(OURS[0], at_most=60)],
            note=(
                "Each update has the same samples everywhere. Batches are ready for each way but the DataLoader and "
                "ours with loading, which load them from tensors in that time."
            ),
        ),
        Result(
            title=f"A step with loading of ordinary rows on {on}",
            unit="µs per step",
            **_measured("rows", short, long, setting),
            baseline="raw DDP loop, DataLoader",
            targets=[Target(f"ours, with loading{ending}", at_most=1.05) for ending in Ours.endings],
        ),
        Result(
            title=f"A step with lanes on two processes (MLP 512-768-768-768-10, batch 32 on each, {slope_of_long})",
            unit="µs per step",
            **_measured("lanes", short_long, long_long, setting),
            baseline="ours, with loading, no callbacks",
            targets=[Target("ours, lanes, no callbacks", at_most=1.1)],
        ),
    ]


def _measured(kind: str, short: Job, long: Job, setting: Setting) -> Measurements:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        worker = ["-m", "benchmarks.ddp_ranks", kind, short.samples, long.samples, setting.repeats, file]
        subprocess.run([sys.executable, *launcher, *map(str, worker)], check=True)
        measured: Measurements = json.loads(file.read_text())
        return measured
