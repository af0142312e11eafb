"""Rounds in which all ways take turns, and statistics of their figures."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypedDict, TypeVar

from benchmarks.ways import Outcome, RawLoop, Way
from benchmarks.work import Job

Number = TypeVar("Number", int, float)
Measured = TypeVar("Measured")
Rounds = dict[str, list[float]]


@dataclass(frozen=True)
class Setting:
    """The settings of a case.

    Attributes:
        repeats: rounds of every way.
        is_quick: whether to check only that everything runs.
        peers: the other libraries, lean and with their defaults.
        folder: a folder for large files, on the same disk as the results.
    """

    repeats: int
    is_quick: bool
    peers: Sequence[Way]
    folder: Path

    @property
    def lean_peers(self) -> list[Way]:
        return [peer for peer in self.peers if peer.is_lean]

    def size(self, full: Number, *, quick: Number) -> Number:
        """`full`, or a small size if nobody looks at the figures."""
        return quick if self.is_quick else full


@dataclass(frozen=True)
class Target:
    """A target of a way: a bound for the compared value, or for the figure itself without a baseline.

    Attributes:
        way: the name of the way.
        at_most: an upper bound.
        at_least: a lower bound.
        below: names of ways, each of which should have a greater figure.
    """

    way: str
    at_most: float = math.inf
    at_least: float = -math.inf
    below: Collection[str] = ()

    def __str__(self) -> str:
        words = [f"at most {self.at_most:g}" if self.at_most < math.inf else ""]
        words += [f"at least {self.at_least:g}" if self.at_least > -math.inf else ""]
        words += ["below every other library" if self.below else ""]
        return " and ".join(filter(None, words))


@dataclass(frozen=True)
class Result:
    """One table: a figure per way and round.

    Attributes:
        title: what was measured, and under which circumstances.
        unit: the unit of the figures.
        rounds: figures by way; the n-th ones of all ways were measured in turn.
        baseline: the way that others are compared with, round by round.
        compared_as: how they are compared.
        targets: the targets.
        final_losses: by way, if the ways did the same work.
        processor_rounds: the processor time of the same rounds, loader processes included.
        more_is_better: whether the figure is a speed.
        note: what one must know to read it.
        is_pictured: whether it belongs in the picture.
    """

    title: str
    unit: str
    rounds: Rounds
    baseline: str | None = None
    compared_as: Literal["difference", "ratio"] = "ratio"
    targets: Sequence[Target] = ()
    final_losses: Mapping[str, float] = field(default_factory=dict)
    processor_rounds: Mapping[str, list[float]] = field(default_factory=dict)
    more_is_better: bool = False
    note: str = ""
    is_pictured: bool = False

    def median(self, way: str) -> float:
        """The median figure of a way."""
        return statistics.median(self.rounds[way])

    def compared(self, way: str) -> float:
        """The median, over the rounds, of the difference or ratio to the baseline in the same round."""
        return self.median(way) if self.baseline is None else self._compared(self.rounds, way, self.baseline)

    def processor_compared(self, way: str) -> float:
        """The same of the processor time."""
        assert self.baseline is not None
        return self._compared(self.processor_rounds, way, self.baseline)

    def _compared(self, rounds: Mapping[str, list[float]], way: str, baseline: str) -> float:
        pairs = zip(rounds[way], rounds[baseline], strict=True)
        if self.compared_as == "ratio":
            return statistics.median(figure / base if base else math.nan for figure, base in pairs)
        return statistics.median(figure - base for figure, base in pairs)

    def best_first(self) -> list[str]:
        """The ways in the order of tables and pictures."""
        return sorted(self.rounds, key=self.compared, reverse=self.more_is_better)

    def is_reached(self, target: Target) -> bool:
        """Whether the figures of this run meet `target`."""
        reached = self.compared(target.way)
        is_below = all(reached < self.compared(way) for way in target.below)
        return target.at_least <= reached <= target.at_most and is_below


class Measurements(TypedDict):
    """Fields of a `Result` that are measured together."""

    rounds: Rounds
    processor_rounds: Rounds
    final_losses: dict[str, float]


def take_turns(measures: Mapping[str, Callable[[], Measured]], repeats: int) -> dict[str, list[Measured]]:
    """Call every function once per round. Every other round is reversed, so that no function always comes first."""
    rounds: dict[str, list[Measured]] = {name: [] for name in measures}
    for round_ in range(repeats):
        for name in reversed(list(measures)) if round_ % 2 else measures:
            rounds[name].append(measures[name]())
    return rounds


def seconds_per_step(way: Way, short: Job, long: Job) -> float:
    """The slope between two runs, which cancels their fixed costs."""
    return _slope(way, short, long).seconds


def _slope(way: Way, short: Job, long: Job) -> Outcome:
    steps, after_long, after_short = long.steps - short.steps, way.run(long), way.run(short)
    return Outcome(
        (after_long.seconds - after_short.seconds) / steps,
        after_long.loss,
        (after_long.processor_seconds - after_short.processor_seconds) / steps,
    )


def measure_steps(
    ways: Sequence[Way], short: Job, long: Job, repeats: int, *, units_per_second: float, tolerance: float = 1e-5
) -> Measurements:
    """Time and processor time per step, from the slope between two runs.

    Raises:
        RuntimeError: if final losses differ by more than `tolerance`.
    """
    losses = losses_of_same_work(ways, short, tolerance=tolerance)
    slopes = take_turns({way.name: partial(_slope, way, short, long) for way in ways}, repeats)
    return _measurements(slopes, losses, units_per_second)


def _measurements(
    outcomes: Mapping[str, list[Outcome]], losses: dict[str, float], units_per_second: float = 1
) -> Measurements:
    return {
        "rounds": {way: [one.seconds * units_per_second for one in each] for way, each in outcomes.items()},
        "processor_rounds": {
            way: [one.processor_seconds * units_per_second for one in each] for way, each in outcomes.items()
        },
        "final_losses": losses,
    }


def losses_of_same_work(ways: Iterable[Way], job: Job, *, tolerance: float = 1e-5) -> dict[str, float]:
    """The final losses of all ways, which are also warmed up afterwards.

    Raises:
        RuntimeError: if they differ by more than `tolerance`: then some way has done less, or different work.
    """
    losses = {way.name: way.run(job).loss for way in ways}
    _refuse_different(losses, job, tolerance)
    return losses


def compare(
    title: str,
    job: Job,
    ways: Sequence[Way],
    repeats: int,
    *,
    tolerance: float,
    baselines: Sequence[str] = (RawLoop.library,),
    targets: Sequence[Target] = (),
    note: str = "",
    is_pictured: bool = False,
) -> Result:
    """Time and processor time of a whole job, compared with the fastest of `baselines`, after a short warm-up.

    Raises:
        RuntimeError: if final losses differ by more than `tolerance` in any round. Ways with clipping and a schedule
            are compared with one another.
    """
    for way in ways:
        way.run(dataclasses.replace(job, samples=2 * job.batch_size))
    outcomes = take_turns({way.name: partial(way.run, job) for way in ways}, repeats)
    losses = {name: [outcome.loss for outcome in of_way] for name, of_way in outcomes.items()}
    for is_scheduled in {way.is_scheduled for way in ways}:
        alike = [way.name for way in ways if way.is_scheduled == is_scheduled]
        for round_ in range(repeats):
            _refuse_different({name: losses[name][round_] for name in alike}, job, tolerance)
    measured = _measurements(outcomes, {name: statistics.median(of_way) for name, of_way in losses.items()})
    return Result(
        title=title,
        unit="s",
        **measured,
        baseline=min(baselines, key=lambda name: statistics.median(measured["rounds"][name])),
        targets=targets,
        note=note,
        is_pictured=is_pictured,
    )


def _refuse_different(losses: Mapping[str, float], job: Job, tolerance: float) -> None:
    if max(losses.values()) - min(losses.values()) > tolerance:
        raise RuntimeError(f"The ways did not do the same work; the final losses of {job} are {losses}.")
