"""Where two runs part: what they were given, their records, their states, and the first update that differs.

All is compared to the bit, except for what says how long something took, where it was written, or on which host.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytorch_accelerated.checkpointing.layout import SHARDS_NAME
from pytorch_accelerated.checkpointing.state_folder import part_names, read_state
from pytorch_accelerated.checkpointing.verify import read_manifest
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.models.kept import kept
from pytorch_accelerated.optional import require
from pytorch_accelerated.progress.text import aligned
from pytorch_accelerated.proving.replay import states_in, trained_again
from pytorch_accelerated.proving.trace import PARTS, Parting, Trace, UpdateTrace, digest, first_parting, named_weights
from pytorch_accelerated.trees import leaves_by_path

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer

MakeRun = Callable[[], "tuple[Trainer, Mapping[str, Any]]"]
Position = tuple[int, int, int]  # updates, epochs, samples in the epoch
Records = dict[tuple[int, int], dict[str, Any]]  # by a place that ends with an update

_STEP_FIELDS = ("samples", "train_loss", "learning_rates", "gradient_norm")
_TIMES = re.compile(r"_(runtime|seconds|(samples|steps|tokens)_per_second)$")
_PLACES = ("host", "folder")  # in the environment of a run
_WEIGHTS = "the weights"
_WORDS = {
    "model": _WEIGHTS,
    "training_weights": _WEIGHTS,
    "optimizer": "the optimizer",
    "scheduler": "the schedule",
    "scaler": "the gradient scaler",
}
_MOST_SHOWN = 4
_MOST_CHARACTERS = 40


class RecordDifference(NamedTuple):
    """The first value that two runs have recorded differently.

    Attributes:
        update: the last one that the value is about.
        name: of a metric, or of a field of `StepRecord`.
        a: the value of the first run.
        b: that of the second one.
    """

    update: int
    name: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.name} of update {self.update}: {self.a} against {self.b}"


class PartDifference(NamedTuple):
    """What differs between two training states in one thing.

    Attributes:
        part: what it is, in words.
        names: of the values that differ in it.
        size: how many values it has.
        distance: the largest difference between two numbers; NaN if there is none, or not of the same shape.
    """

    part: str
    names: list[str]
    size: int
    distance: float

    def __str__(self) -> str:
        if self.part.startswith("the generators"):
            return self.part
        more = f" and {len(self.names) - _MOST_SHOWN} more" if len(self.names) > _MOST_SHOWN else ""
        distance = "" if math.isnan(self.distance) else f", up to {self.distance:.2g} apart"
        names = ", ".join(self.names[:_MOST_SHOWN])
        return f"{self.part}: {len(self.names)} of {self.size} values ({names}{more}){distance}"


@dataclasses.dataclass(frozen=True, repr=False)
class RunDifference:
    """The result of `diff`; ``print(difference)`` shows it.

    Attributes:
        a: the first run.
        b: the second run.
        settings: what the runs were given, and in what environment, by name: a pair of values where they differ.
        updates: how far each was saved or recorded.
        step: the first difference in the step records; None if there is none.
        metric: the first difference in the metrics; None if there is none.
        equal_state: the update of the last state before any difference; None if there is none.
        differing_state: the update of the first state that differs; None if there is none.
        parts: what differs in it.
        trained_from: after which update both were trained again; None if they were not.
        parting: where they parted then; None if they did not.
        parted: that update of both runs; None if they did not part.
        is_reproduced: whether training again gave what each has recorded and saved, as far as it went; None if they
            were not trained again.
    """

    a: Path
    b: Path
    settings: dict[str, tuple[Any, Any]]
    updates: tuple[int, int]
    step: RecordDifference | None = None
    metric: RecordDifference | None = None
    equal_state: int | None = None
    differing_state: int | None = None
    parts: list[PartDifference] = dataclasses.field(default_factory=list)
    trained_from: int | None = None
    parting: Parting | None = None
    parted: tuple[UpdateTrace, UpdateTrace] | None = None
    is_reproduced: tuple[bool, bool] | None = None

    @property
    def is_equal(self) -> bool:
        """Whether no record and no state differs in the updates that both have. Settings may differ."""
        return self.step is None and self.metric is None and self.differing_state is None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("step", "metric", "parting"):
            values[name] = values[name] and values[name]._asdict()
        values |= {"a": str(self.a), "b": str(self.b), "parts": [each._asdict() for each in self.parts]}
        values |= {"parted": self.parted and [each._asdict() for each in self.parted]}
        return {"is_equal": self.is_equal, **values}

    def __repr__(self) -> str:
        lines = [self._verdict(), f"  A  {self.a}", f"  B  {self.b}"]
        rows = [(f"    {name}", _short(a), _short(b)) for name, (a, b) in self.settings.items()]
        lines += ["  What they were given, where it differs:", *aligned(rows)] if rows else []
        firsts = [("step record", self.step), ("metric", self.metric)]
        lines += [f"  The first {what} that differs: {first}" for what, first in firsts if first is not None]
        equal = "" if self.equal_state is None else f"equal after update {self.equal_state}"
        if self.differing_state is not None:
            lines += [f"  States: {equal}{', ' * bool(equal)}different after update {self.differing_state}:"]
            lines += [f"    {part}" for part in self.parts]
        elif equal:
            lines += [f"  States: {equal}"]
        return "\n".join([*lines, *self._words_of_training()])

    def _verdict(self) -> str:
        if self.is_equal:
            end = min(self.updates)
            further = "" if end == max(self.updates) else f", where {'AB'[self.updates.index(end)]} ends"
            return f"The runs are equal up to update {end}{further}"
        if self.parting is not None:
            return f"The runs part in update {self.parting.update}: {PARTS[self.parting.part]}"
        known = [first.update for first in (self.step, self.metric) if first is not None]
        known += [] if self.differing_state is None else [self.differing_state]
        after = "" if self.equal_state is None else f", and after update {self.equal_state}"
        return f"The runs part in update {min(known)} at the latest{after}"

    def _words_of_training(self) -> Iterator[str]:
        if self.is_reproduced is None:
            return
        start = f"from update {self.trained_from}" if self.trained_from else "from the beginning"
        result = "they do not part" if self.parting is None else f"they part in {self.parting}"
        yield f"  Trained again {start}, {result}"
        if self.parted is not None:
            yield from (f"    {name}  {_words_of_update(each)}" for name, each in zip("AB", self.parted, strict=True))
        given = [name for name, is_same in zip("AB", self.is_reproduced, strict=True) if is_same]
        if len(given) < 2:
            other = "" if not given else f", not {'B' if given == ['A'] else 'A'}"
            yield f"  The code as it is now gives {given[0] if given else 'neither A nor B'}{other} as it was recorded"


def diff(a: str | Path, b: str | Path, make_a: MakeRun | None = None, make_b: MakeRun | None = None) -> RunDifference:
    """Where two runs part, to the bit: in what they were given, in their records and in their training states.

    With functions that make the runs anew, both are also trained again from the last state that is equal, and the first
    update in which they part is named, with what parted in it. Nothing is written. Must be called by all ranks.

    Args:
        a: the folder of a run: of its training states, or one with its report page, its states, or both.
        b: that of another run.
        make_a: returns a new trainer and the arguments of `train` of the first run, as its script makes them.
        make_b: the same for the second run; default: `make_a`, to see which of the two the code as it is now gives.

    Returns:
        What was found; print it.

    Raises:
        ConfigurationError: if there is nothing to compare.
        RunFileError: if a page or a history is damaged.
    """
    one, other = sides = _Run(Path(a)), _Run(Path(b))
    common = [position for position in one.states if position in other.states]
    if not (common or one.steps.keys() & other.steps.keys() or one.metrics.keys() & other.metrics.keys()):
        raise ConfigurationError(
            f"{a} and {b} have no records and no training states of the same updates, so there is nothing to compare. "
            "Give folders with training states, or with pages of ReportCallback."
        )
    found: dict[str, Any] = {
        "step": _first_difference(one.steps, other.steps),
        "metric": _first_difference(one.metrics, other.metrics),
    }
    firsts = [each.update for each in found.values() if each is not None]
    equal: list[Position] = []
    for position in common:
        parts = list(_differences(one.states[position], other.states[position]))
        if parts:
            found |= {"differing_state": position[0], "parts": parts}
            firsts.append(position[0])
            break
        equal.append(position)
    before = [position for position in equal if position[0] < min(firsts, default=math.inf)]
    found |= {"equal_state": before[-1][0] if before else None, "settings": _differing(one.settings, other.settings)}
    make_a, make_b = make_a or make_b, make_b or make_a
    if make_a is not None and make_b is not None and firsts:
        start = before[-1] if before else None
        (first, is_first), (second, is_second) = (
            _trained(side, make, start, min(firsts)) for side, make in zip(sides, (make_a, make_b), strict=True)
        )
        parting = first_parting(first.values(), second.values())
        parted = None if parting is None else (first[parting.update], second[parting.update])
        found |= {"trained_from": start[0] if start else 0, "is_reproduced": (is_first, is_second)}
        found |= {"parting": parting, "parted": parted}
    return RunDifference(Path(a), Path(b), updates=(one.updates, other.updates), **found)


class _Run:
    """What is on disk of a run.

    Attributes:
        states: its training states by their position, in order.
        steps: values of the step records by their first and last update.
        metrics: values by epoch and update.
        settings: what the run was given, in groups, which are empty if they are unknown.
        updates: how far it went.
    """

    def __init__(self, place: Path) -> None:
        if not place.exists():
            raise ConfigurationError(f"There is no run {place}. Check the path.")
        self.states, facts = _states_of(place)
        newest = list(self.states.values())[-1:]
        pages = [place] if place.is_file() else sorted(place.glob("*.html"))
        if not (newest or pages):
            raise ConfigurationError(f"There are no training states and no page of a run in {place}. Check the path.")
        reading = require("pytorch_accelerated.report.reading", needed_by="`diff`")
        page = reading.read_run(pages[0]).to_json() if pages else {}
        contents = reading.read_run(newest[0]).to_json() if newest else page
        self.steps, self.metrics = _steps_of(contents), _metrics_of(contents)
        places = [position[0] for position in self.states]
        self.updates = max([*places, *(place[-1] for place in (*self.steps, *self.metrics))], default=0)
        config = read_state(newest[0], ["run"])[1]["run"].get("config") if newest else page["config"]
        environment = page.get("environment", {})
        self.settings = {
            "config": {name: facts[name] for name in ("seed", "ranks") if name in facts} | (config or {}),
            "data": {**facts.get("data", {}), **facts.get("evaluation_sets", {})},
            "model": page.get("model", {}),
            "environment": {name: value for name, value in environment.items() if name not in _PLACES},
        }


def _states_of(place: Path) -> tuple[dict[Position, Path], dict[str, Any]]:
    """The training states of a run, in its folder or in one of the folders there, and the facts of the newest one."""
    inside = [] if place.is_file() else [place, *sorted(each for each in place.iterdir() if each.is_dir())]
    found = {
        folder: saved for folder in inside if (saved := [each for each in states_in(folder) if "updates" in each[1]])
    }
    states = found.get(place, [])
    if not states and len(found) > 1:
        raise ConfigurationError(
            f"{place} has training states in {' and '.join(each.name for each in found)}. Give the folder of one run."
        )
    states = states or next(iter(found.values()), [])
    by_position = {
        (facts["updates"], facts["epochs"], facts["samples_in_epoch"]): (folder, facts) for folder, facts in states
    }
    ordered = {position: by_position[position] for position in sorted(by_position)}
    newest = list(ordered.values())[-1:]
    return {position: folder for position, (folder, _) in ordered.items()}, newest[0][1] if newest else {}


def _steps_of(contents: Mapping[str, Any]) -> Records:
    columns = contents["steps"]
    ends, by_group = columns["update"], columns["learning_rates"]
    columns = {**columns, "learning_rates": list(zip(*by_group, strict=True)) if by_group else [()] * len(ends)}
    places = zip([0, *ends], ends, strict=False)
    return {place: {name: columns[name][row] for name in _STEP_FIELDS} for row, place in enumerate(places)}


def _metrics_of(contents: Mapping[str, Any]) -> Records:
    found: Records = {}
    for metric in contents["metrics"]:
        if not _TIMES.search(metric["name"]):
            for epoch, update, value in zip(metric["epoch"], metric["update"], metric["value"], strict=True):
                found.setdefault((epoch, update), {})[metric["name"]] = value
    return found


def _first_difference(one: Records, other: Records) -> RecordDifference | None:
    for place in sorted(one.keys() & other.keys(), key=lambda place: place[-1]):
        for name in one[place]:
            a, b = one[place][name], other[place].get(name)
            if None not in (a, b) and repr(a) != repr(b):  # None: not measured
                return RecordDifference(place[-1], name, a, b)
    return None


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs in the groups of settings that both have, by name."""
    known = [group for group in one if one[group] and other[group]]
    a, b = (
        {_plain(path): value for path, value in leaves_by_path({group: side[group] for group in known}).items()}
        for side in (one, other)
    )
    return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}


def _plain(path: str) -> str:
    """A path without brackets: ``['model']['0.weight']`` becomes ``model.0.weight``."""
    return re.sub(r"\['?(.*?)'?\]", r".\1", path).removeprefix(".")


def _differences(a: Path, b: Path) -> Iterator[PartDifference]:
    """What differs between two training states. Of parts whose checksums are the same, nothing is read."""
    manifests = read_manifest(a), read_manifest(b)
    sums, others = ({entry.name: entry.sha256 for entry in manifest.files} for manifest in manifests)
    has_shards = SHARDS_NAME in sums or SHARDS_NAME in others
    names = [
        name for name in part_names(manifests[0]) if name in part_names(manifests[1]) and name not in ("run", "extra")
    ]
    files = {name: (f"{name}.json", f"{name}.safetensors") for name in names}
    changed = [name for name in names if has_shards or any(sums[file] != others[file] for file in files[name])]
    things, things_of_other = (dict(_things_in(read_state(folder, changed)[1])) for folder in (a, b))
    for thing, value in things.items():
        if thing in things_of_other:
            values, values_of_other = leaves_by_path(value), leaves_by_path(things_of_other[thing])
            both = [(path, values.get(path), values_of_other.get(path)) for path in {**values, **values_of_other}]
            pairs = {path: (x, y) for path, x, y in both if digest(x) != digest(y)}
            if pairs:
                distance = max((_distance(*pair) for pair in pairs.values()), default=math.nan)
                yield PartDifference(thing, [_plain(path) for path in pairs], len(both), distance)


def _things_in(parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is compared in the parts of a state, by what it is called."""
    for name, value in parts.items():
        if name.startswith("rank_"):
            rank = "" if name == "rank_0" else f" of {name.replace('_', ' ')}"
            yield f"the generators{rank}", value["generators"]
            yield f"the position in the stream{rank}", value["stream"]
        elif name == "callbacks":  # text says where they write, and a report is one text
            for key, state in value.items():
                kept_values = {path: each for path, each in leaves_by_path(state).items() if not isinstance(each, str)}
                yield f"{re.sub(r'[^(]*[/]', '', key)}", {} if "['page']" in kept_values else kept_values
        elif name == "held":
            yield from ((f"`{path}` of the trainer", state) for path, state in value.items())
        else:
            yield _WORDS[name], value


def _distance(one: Any, other: Any) -> float:
    if not all(isinstance(each, (torch.Tensor, int, float)) for each in (one, other)):
        return math.nan
    a, b = torch.as_tensor(one), torch.as_tensor(other)
    if a.shape != b.shape or a.is_complex() or not a.numel():
        return math.nan
    return float((a.double() - b.double()).abs().max())


def _trained(side: _Run, make: MakeRun, start: Position | None, limit: int) -> tuple[dict[int, UpdateTrace], bool]:
    """The updates of a run that is trained again, to the one after `limit`, and whether that gave what is on disk."""
    trace = Trace(limit + 1)
    with kept() as before:
        before.generators()  # so that the other run is made as this one is
        trainer, arguments = make()
        with trained_again(trainer, arguments, None if start is None else side.states[start], trace):
            contents = require("pytorch_accelerated.report.contents", needed_by="`diff`").RunContents(name="")
            contents.read_history(trainer.run_history)
            updates = {each.update: each for each in trace.updates}
    # A callback may have changed the weights between two updates, before the state was saved or after it.
    seen = {updates[limit].weights_after} if limit in updates else set()
    seen |= {updates[limit + 1].weights} if limit + 1 in updates else set()
    saved = [_digest_of_weights(folder) for position, folder in side.states.items() if position[0] == limit]
    is_same = _first_difference(side.steps, _steps_of(contents.to_json())) is None
    return updates, is_same and limit in updates and all(each in seen for each in saved)


def _digest_of_weights(folder: Path) -> str:
    names = [name for name in part_names(read_manifest(folder)) if name == "held" or _WORDS.get(name) == _WEIGHTS]
    parts = read_state(folder, names)[1]
    held = parts.pop("held", {})
    return digest(named_weights(next(iter(parts.values()), {}), held))


def _words_of_update(update: UpdateTrace) -> str:
    rows = [] if update.rows is None else list(map(str, update.rows[: 2 * _MOST_SHOWN]))
    more = f" and {len(update.rows) - len(rows)} more" if update.rows and len(update.rows) > len(rows) else ""
    return f"{'rows ' * bool(rows)}{', '.join(rows)}{more}{'; ' * bool(rows)}loss {', '.join(update.losses)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
