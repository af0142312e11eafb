"""Tables that most kinds of data have in common: training and evaluation of whole jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.measuring import Result, Setting, compare
from benchmarks.ways import AccelerateByHand, Ours, RawLoop, Way
from benchmarks.work import Job


def training_on(
    what: str, job: Job, setting: Setting, *, faces: Sequence[Way] = (), tolerance: float = 0.1, **kwargs: Any
) -> Result:
    """The time of `job`, for the hand-written loops, ours, `faces`, and the other libraries."""
    return compare(
        f"Training on {what} ({shape(job)})",
        job,
        _able([RawLoop(), AccelerateByHand(), Ours(), Ours(is_lean=False), *faces, *setting.peers], job),
        setting.repeats,
        tolerance=setting.size(
            tolerance, quick=0.5
        ),  # other orders: ten seeds of the raw loop give losses that differ by up to 0.064
        **kwargs,
    )


def evaluation_of(what: str, job: Job, setting: Setting, *, faces: Sequence[Way] = (), **kwargs: Any) -> Result:
    """The time to evaluate the data of `job` in batches of 256."""
    evaluation = dataclasses.replace(job, batch_size=256, is_evaluation=True, epochs=1)
    return compare(
        f"Evaluation of {what} ({shape(evaluation)})",
        evaluation,
        _able([RawLoop(), AccelerateByHand(), Ours(), Ours(is_lean=False), *faces, *setting.lean_peers], job),
        setting.repeats,
        tolerance=setting.size(0.01, quick=0.1),  # one library counts the short last batch as a whole one
        **kwargs,
    )


def shape(job: Job) -> str:
    """The size of a job, for titles."""
    facts = [f"{job.samples:,} samples", f"batch {job.batch_size}"]
    facts += [f"{job.epochs} epochs"] if job.epochs > 1 else []
    facts += [] if job.workers is None else [f"{job.workers} workers"]
    return ", ".join(facts)


def _able(ways: Sequence[Way], job: Job) -> list[Way]:
    return [way for way in ways if way.takes(job)]
