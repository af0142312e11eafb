"""The cost of a program before its first step."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

from benchmarks.measuring import Result, Setting, Target, losses_of_same_work, take_turns
from benchmarks.ways import OURS, AccelerateByHand, Ours, RawLoop, Way
from benchmarks.work import Job, ordinary_job

_AT_MOST_20_MS = [Target(name, at_most=20) for name in OURS]


def run(setting: Setting) -> list[Result]:
    with_workers = ordinary_job(32, workers=2)
    evaluation = dataclasses.replace(with_workers, is_evaluation=True)
    return [
        *_fresh_processes(setting),
        _whole_call("A whole training run of one step", Job(samples=32), setting, targets=_AT_MOST_20_MS),
        _whole_call("A whole training run of one step with two workers", with_workers, setting),
        _whole_call("A whole evaluation of one batch with two workers", evaluation, setting),
    ]


def _fresh_processes(setting: Setting) -> list[Result]:
    ways = [RawLoop(), Ours(), *setting.lean_peers]
    rounds = [{way.name: facts_of_start(way) for way in ways} for _ in range(min(setting.repeats, 3))]
    ours = OURS[0]
    tables = {
        "import_seconds": ("Import, after torch and accelerate", "s", Target(ours, at_most=0.15)),
        "import_megabytes": ("Memory of the import, after torch and accelerate", "MB", Target(ours, at_most=15)),
        "first_step_seconds": ("A new process, from its start to its first optimizer step", "s", None),
    }
    return [
        Result(
            title=title,
            unit=unit,
            rounds={way.name: [facts[way.name][fact] for facts in rounds] for way in ways},
            targets=[] if target is None else [target],
            is_pictured=fact == "import_seconds",
        )
        for fact, (title, unit, target) in tables.items()
    ]


def facts_of_start(way: Way) -> dict[str, float]:
    """The measurements of benchmarks/first_step.py in a separate process."""
    command = [sys.executable, "-m", "benchmarks.first_step", way.name]
    environment = {**os.environ, **way.fresh_environment()}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each process would compile everything again
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    facts: dict[str, float] = json.loads(output)
    return facts


def _whole_call(title: str, job: Job, setting: Setting, **kwargs: Any) -> Result:
    ways = [RawLoop(), AccelerateByHand(), Ours(), Ours(is_lean=False), *setting.peers]
    return Result(
        title=f"{title}, above the raw loop's",
        unit="ms",
        final_losses=losses_of_same_work(ways, job),
        rounds=take_turns({way.name: partial(_milliseconds, way, job) for way in ways}, setting.repeats),
        baseline=RawLoop.library,
        compared_as="difference",
        **kwargs,
    )


def _milliseconds(way: Way, job: Job) -> float:
    return way.run(job).seconds * 1e3
