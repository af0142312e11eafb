"""The Hugging Face trainer on ordinary rows with a collate function: lean, and with all defaults of its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.comparing import evaluation_of, shape
from benchmarks.measuring import Result, Setting, Target, compare
from benchmarks.peers import Transformers
from benchmarks.ways import OursInHuggingFaceShape, RawLoop, RawLoopClippedAndScheduled, Way
from benchmarks.work import ordinary_job


def run(setting: Setting) -> list[Result]:
    job = dataclasses.replace(ordinary_job(setting.size(20_000, quick=320), workers=0), kind="rows to stack")
    lean = OursInHuggingFaceShape()
    as_it_comes = OursInHuggingFaceShape(is_lean=False, clips_and_schedules=True)
    peers_as_they_come = [
        Transformers(is_lean=False, clips_and_schedules=True) if isinstance(peer, Transformers) else peer
        for peer in setting.peers
        if not peer.is_lean
    ]
    what = "ordinary rows with a collate function"

    def training(name: str, ours: Way, by_hand: Sequence[Way], peers: Sequence[Way], at_most: float) -> Result:
        return compare(
            f"Training on {what}, {name} ({shape(job)})",
            job,
            [*by_hand, ours, *peers],
            setting.repeats,
            tolerance=setting.size(0.1, quick=0.5),  # other orders; see `training_on`
            targets=[Target(ours.name, at_most=at_most, below=[peer.name for peer in peers])],
        )

    return [
        training("lean", lean, [RawLoop()], setting.lean_peers, at_most=1.2),
        training(
            "as it comes", as_it_comes, [RawLoop(), RawLoopClippedAndScheduled()], peers_as_they_come, at_most=1.45
        ),
        evaluation_of(what, job, setting, faces=[lean, as_it_comes]),
    ]
