"""Where two runs part: what they were given, their records, their states, and the first update that differs.

All is compared to the bit, except for what says how long something took, where it was written, or on which host.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.proving.rewind import states_in, trained_again
from pytorch_accelerated.extras.proving.trace import (
    PARTS,
    ROW_CHARACTERS,
    SCHEDULED,
    TIMES,
    Parting,
    Trace,
    UpdateTrace,
    digest,
    first_parting,
    named_weights,
)
from pytorch_accelerated.facts import require
from pytorch_accelerated.facts.trees import leaves_by_path
from pytorch_accelerated.ranks import kept
from pytorch_accelerated.record.text import aligned
from pytorch_accelerated.states import part_names, read_optimizer_file, read_state
from pytorch_accelerated.states.verify import read_manifest
from pytorch_accelerated.utils import read_run_history

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer
    from pytorch_accelerated.tracking import RunHistory

MakeRun = Callable[[], "tuple[Trainer, Mapping[str, Any]]"]
Position = tuple[int, ...]  # the numbers of _POSITION
Records = dict[tuple[str, int, int], dict[str, Any]]  # by kind, where they begin, and the last update

_POSITION = ("updates", "epochs", "samples_in_epoch")
_STEP_FIELDS = ("samples", "train_loss", "learning_rates", "gradient_norm")
_NOT_COMPARED = ("run", "extra")  # parts of states with times, and with entries of the user's own
_DESCRIBED = "described"
_PLACES = ("host", "folder")  # in the environment of a run
_WEIGHTS = {"model", "training_weights", "held"}  # parts of states
_WORDS = {"model": "the weights", "training_weights": "the weights", "held": "what else the trainer holds"}
_WORDS |= {"optimizer": "the optimizer", "scheduler": "the schedule", "scaler": "the gradient scaler"}
_MOST_SHOWN, _MOST_CHARACTERS = 4, 40


class RecordDifference(NamedTuple):
    """The first value that two runs have recorded differently.

    Attributes:
        update: the last one that the value is about.
        name: of a metric, or of a field of `StepRecord`.
        a: the value of the first run.
        b: the same of the second one.
    """

    update: int
    name: str
    a: Any
    b: Any


class PartDifference(NamedTuple):
    """What differs between two training states in one of their parts.

    Attributes:
        part: its name in the state, such as "model", "optimizer" or, for the generators of a process, "rank_0".
        names: of the values that differ.
        size: how many values the part has.
        distance: the largest difference between two numbers in tensors of one shape; 0 if there are none.
    """

    part: str
    names: list[str]
    size: int
    distance: float

    def __str__(self) -> str:
        distance = f", up to {self.distance:.2g} apart" if self.distance else ""
        names = f"{', '.join(self.names[:_MOST_SHOWN])}{', ...' * (len(self.names) > _MOST_SHOWN)}"
        return f"{_WORDS.get(self.part, self.part)}: {len(self.names)} of {self.size} values ({names}){distance}"


@dataclasses.dataclass(frozen=True, repr=False)
class RunDifference:
    """The result of `diff`; ``print(difference)`` shows it.

    Attributes:
        a: the first run.
        b: the second run.
        settings: what the runs were given, by name: a pair of values where they differ.
        updates: how far each was saved.
        step: the first difference in the step records; None if there is none.
        metric: the first difference in the metrics; None if there is none.
        equal_state: the update of the last state before any difference; None if there is none.
        differing_state: the update of the first state that differs; None if there is none.
        parts: what differs in it.
        incomparable: why the runs have nothing in common; "" if they have.
        trained_from: after which update both were trained again; None if they were not.
        parting: where they parted then; None if they did not.
        parted: that update of both runs; None if they did not part.
        changed_rows: the rows of the update with other contents, if these parted; None if they are unknown.
        is_reproduced: whether training again gave what each has recorded and saved, as far as it went; None if they
            were not trained again.
    """

    a: Path
    b: Path
    settings: dict[str, tuple[Any, Any]]
    updates: tuple[int, int]
    step: RecordDifference | None
    metric: RecordDifference | None
    equal_state: int | None
    differing_state: int | None
    parts: list[PartDifference]
    incomparable: str
    trained_from: int | None = None
    parting: Parting | None = None
    parted: tuple[UpdateTrace, UpdateTrace] | None = None
    changed_rows: list[int] | None = None
    is_reproduced: tuple[bool, bool] | None = None

    @property
    def first_update(self) -> int | None:
        """The first update that is known to differ from what is on disk; None if the runs are equal.

        Runs are equal if no record and no state differs in the updates that both have; settings may differ.
        """
        records = [each and each.update for each in (self.step, self.metric)]
        return min((each for each in (*records, self.differing_state) if each is not None), default=None)

    @property
    def is_equal(self) -> bool | None:
        """Whether nothing differs in what both have; None if they have nothing in common."""
        return None if self.incomparable else self.first_update is None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        values = dict(vars(self))
        for name in ("step", "metric", "parting"):
            values[name] = values[name] and values[name]._asdict()
        for name in ("parts", "parted"):
            values[name] = values[name] and [each._asdict() for each in values[name]]
        return {**values, "a": str(self.a), "b": str(self.b), "is_equal": self.is_equal}

    def __repr__(self) -> str:
        lines = [self._verdict(), f"  A  {self.a}", f"  B  {self.b}"]
        rows = [(f"    {name}", *short_pair(*pair)) for name, pair in self.settings.items()]
        lines += ["  Settings that differ:", *aligned(rows)] if rows else []
        for title, first in (("step record", self.step), ("metric", self.metric)):
            if first is not None:
                lines.append(f"  First {title}: {first.name} after update {first.update} is {first.a} and {first.b}")
        if self.differing_state is not None:
            lines.append(f"  First state: after update {self.differing_state}, in")
            lines += [f"    {part}" for part in self.parts]
        if self.is_reproduced is None:
            return "\n".join(lines)
        lines.append(f"  Trained again from update {self.trained_from}: {self.parting or 'they do not part'}")
        for name, update in zip("AB", self.parted or (), strict=False):
            lines.append(f"    {name}  loss {', '.join(update.losses)} of the rows {_short(list(update.rows or ()))}")
        given = [name for name, is_same in zip("AB", self.is_reproduced, strict=True) if is_same]
        if len(given) < 2:
            lines.append(f"  The code as it is now gives {f'only {given[0]}' if given else 'neither'} as it was saved.")
        return "\n".join(lines)

    def _verdict(self) -> str:
        end = min(self.updates)
        if self.parting is not None:
            rows = f" of the rows {_short(self.changed_rows)}" if self.changed_rows else ""
            return f"The runs part in update {self.parting.update}: {PARTS[self.parting.part]}{rows}"
        if self.incomparable:
            return f"The runs have nothing in common: {self.incomparable}"
        if self.first_update is not None:
            return f"The runs part after update {self.equal_state or 0}, in update {self.first_update} at the latest"
        return f"The runs are equal{f' up to update {end}, where one ends' * (end < max(self.updates))}"


def diff(a: str | Path, b: str | Path, make_a: MakeRun | None = None, make_b: MakeRun | None = None) -> RunDifference:
    """Where two runs part, to the bit: in what they were given, in their records and in their training states.

    With functions that make the runs, both are also trained again from the last state that is equal, and the first
    update in which they part is named, with what parted in it. Nothing is written. Must be called by all ranks.

    Args:
        a: the folder of a run: of its training states, or one with its report page and the folder of its states.
        b: the same of another run.
        make_a: returns a new trainer and the arguments of `train` of the first run, as its script makes them.
        make_b: the same for the second run; default: `make_a`, to see which of the two the code as it is now gives.

    Returns:
        What was found; print it.

    Raises:
        ConfigurationError: if there are no training states.
        RunFileError: if a page is damaged.
    """
    one, other = _Run(Path(a)), _Run(Path(b))
    equal: list[Position] = []
    parts: list[PartDifference] = []
    position = None
    for position in (each for each in one.states if each in other.states):
        parts = list(_differences(one.states[position], other.states[position]))
        if parts:
            break
        equal.append(position)
    found = RunDifference(
        a=Path(a),
        b=Path(b),
        settings={**_differing(one.settings, other.settings), **_differing_groups(one, other, position)},
        updates=(one.updates, other.updates),
        step=first_difference(one.records, other.records, "step"),
        metric=first_difference(one.records, other.records, "metric"),
        equal_state=None,
        differing_state=position[0] if position and parts else None,
        parts=parts,
        incomparable="" if equal else _obstacle(one, other),
    )
    first, make = found.first_update, make_a or make_b
    if found.incomparable and first is None:  # trained again they can be compared
        first = min(found.updates)
    start = next((each for each in reversed(equal) if first is None or each[0] < first), None)
    more: dict[str, Any] = {"equal_state": start and start[0]}
    if first is not None and make is not None:
        a_again, gives_a = _trained(one, make_a or make, start, first)
        b_again, gives_b = _trained(other, make_b or make, start, first)
        parting = first_parting(a_again.values(), b_again.values(), list(PARTS)[2:])  # an evaluation may be before it
        more |= {"trained_from": start[0] if start else 0, "is_reproduced": (gives_a, gives_b), "parting": parting}
        if parting is not None:
            parted = a_again[parting.update], b_again[parting.update]
            more |= {"parted": parted, "changed_rows": _changed_rows(*parted) if parting.part == "batch" else None}
    return dataclasses.replace(found, **more)


class _Run:
    """What is on disk of a run.

    Attributes:
        states: its training states by their position, in order.
        begin: the position of the state with which it begins, if it is a branch: before it, it was another run.
        updates: how far it was saved.
        records: values of the step records and metrics.
        settings: what the run was given, in groups, which are empty if they are unknown.
    """

    def __init__(self, place: Path) -> None:
        states = {folder: states_in(folder) for folder in [place, *sorted(place.glob("*/"))]}
        found = [folder for folder in states if states[folder]]
        if not found:
            raise ConfigurationError(
                f"There are no training states in {place}. Check the path; SaveTrainingStateCallback writes them."
            )
        if place not in found and len(found) > 1:
            names = ", ".join(folder.name for folder in found)
            raise ConfigurationError(f"{place} has training states of several runs: {names}. Give the folder of one.")
        saved = states[found[0]]
        by_position = {tuple(facts.get(name, 0) for name in _POSITION): folder for folder, facts in saved}
        self.states: dict[Position, Path] = dict(sorted(by_position.items()))
        begins = {folder for folder, facts in saved if _begins_branch(facts)}
        self.begin = next((position for position, folder in self.states.items() if folder in begins), None)
        newest, facts = saved[-1]
        self.updates = max(self.states)[0]
        self.records = records_of(read_run_history(newest))
        run = read_state(newest, ["run"])[1]["run"]
        pages = sorted(place.glob("*.html"))
        reading = require("pytorch_accelerated.extras.report.reading", needed_by="The page of a run") if pages else None
        page = reading and reading.read_run(pages[0])
        environment = page.environment if page else {}
        self.settings = {
            "": {"seed": facts["seed"], "ranks": facts["ranks"], **(run.get("config") or {})},
            _DESCRIBED: run.get("described", {}),  # missing in older states
            "data": facts.get("data", {}),
            "model": page.model if page else {},
            "environment": {name: value for name, value in environment.items() if name not in _PLACES},
        }


def records_of(history: RunHistory) -> Records:
    """What is compared of the records of a run."""
    found: Records = {}
    start = 0
    for step in history.step_records:
        found["step", start, step.update] = {name: getattr(step, name) for name in _STEP_FIELDS}
        start = step.update
    for metric in history.records:
        if metric.is_scalar and not TIMES.search(metric.name):
            found.setdefault(("metric", metric.epoch, metric.update), {})[metric.name] = metric.value
    return found


def first_difference(one: Records, other: Records, kind: str) -> RecordDifference | None:
    """The first value that differs in the records of one kind, "step" or "metric", that both have."""
    places = sorted((place for place in one.keys() & other.keys() if place[0] == kind), key=lambda place: place[-1])
    for place in places:
        for name, a in one[place].items():
            b = other[place].get(name)
            if None not in (a, b) and repr(a) != repr(b):  # None: not measured
                return RecordDifference(place[-1], name, a, b)
    return None


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs in the groups of settings that both have, by name."""
    known = [group for group in one if one[group] and other[group]]
    a, b = (_by_name({group: side[group] for group in known}) for side in (one, other))
    differing = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return {name.removeprefix(f"{_DESCRIBED}."): (a.get(name), b.get(name)) for name in differing}


def _differing_groups(one: _Run, other: _Run, position: Position | None) -> dict[str, tuple[Any, Any]]:
    """The settings of the optimizers that differ in a state that both have, or else in their first ones."""
    groups = []
    for run in (one, other):
        leaves = _by_name(_read(run.states[position or min(run.states)], ["optimizer"]))
        known = [name.split(".param_groups.") for name in leaves if ".param_groups." in name]
        groups.append({f"{a}.{b}": leaves[f"{a}.param_groups.{b}"] for a, b in known if ".params." not in b})
    return _differing({"": groups[0]}, {"": groups[1]})


def _obstacle(one: _Run, other: _Run) -> str:
    """What keeps two runs without an equal state from being compared."""
    folders = [run.states[min(run.states)] for run in (one, other)]
    shapes = [{(name, each.shape) for name, each in weights_in(folder).items()} for folder in folders]
    if all(shapes) and shapes[0].isdisjoint(shapes[1]):
        return "no weight of the one has the name and the shape of a weight of the other"
    is_shared = one.states.keys() & other.states.keys() or one.records.keys() & other.records.keys()
    return "" if is_shared else "no state and no record is after the same updates in both"


def _changed_rows(a: UpdateTrace, b: UpdateTrace) -> list[int] | None:
    """The rows with other contents in two updates; None if they are unknown, or shared with other ranks."""
    rows, size = a.rows or (), ROW_CHARACTERS
    if a.contents.keys() != b.contents.keys():  # other shapes, as of padded rows
        return None
    pairs = [(text, b.contents[place]) for place, text in a.contents.items() if len(text) == size * len(rows)]
    parts = [slice(size * at, size * (at + 1)) for at in range(len(rows))]
    return [row for row, at in zip(rows, parts, strict=True) if any(x[at] != y[at] for x, y in pairs)] or None


def _by_name(tree: Any) -> dict[str, Any]:
    """Leaves by paths without brackets: ``['optimizer']['state'][0]`` becomes ``optimizer.state.0``."""
    return {re.sub(r"\['?(.*?)'?\]", r".\1", path).lstrip("."): leaf for path, leaf in leaves_by_path(tree).items()}


def _differences(a: Path, b: Path) -> Iterator[PartDifference]:
    """What differs between two training states. Nothing is read of parts whose files have the same checksums."""
    manifests = read_manifest(a), read_manifest(b)
    begins_branch = any(_begins_branch(manifest.facts) for manifest in manifests)
    entries, others = ({(entry.name, entry.sha256) for entry in manifest.files} for manifest in manifests)
    changed = {name.partition(".")[0] for name, _ in entries ^ others}
    names = [name for name in part_names(manifests[0]) if name in part_names(manifests[1]) and name != "optimizer"]
    names += ["optimizer"]
    are_pieces = any(name.startswith("shard") for name in changed)
    chosen = [name for name in names if name not in _NOT_COMPARED and (are_pieces or name in changed)]
    parts, parts_of_other = (_read(folder, chosen) for folder in (a, b))
    for name in chosen:
        one, other = _compared(name, parts[name]), _compared(name, parts_of_other[name])
        paths = [path for path in {**one, **other} if name != "callbacks" or (path in one and path in other)]
        if begins_branch:  # whose settings count from the next update on
            paths = [path for path in paths if name != "scheduler" and "param_groups" not in path]
        pairs = {path: (one.get(path), other.get(path)) for path in paths}
        differing = {path: pair for path, pair in pairs.items() if digest(pair[0]) != digest(pair[1])}
        if differing:
            yield PartDifference(name, list(differing), len(pairs), max(map(_distance, differing.values())))


def _begins_branch(facts: Mapping[str, Any]) -> bool:
    """Whether the facts are those of a state with which `Trainer.branch` has begun a run."""
    return [each["update"] for each in facts.get("branch_of", ())][-1:] == [facts["updates"]]


def _read(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Some parts of a training state; checkpoints for `transformers` have a file of its own for the optimizer."""
    known = part_names(read_manifest(folder))
    parts = read_state(folder, [name for name in names if name in known])[1]
    return {name: parts[name] if name in parts else read_optimizer_file(folder) for name in names}


def _compared(part: str, value: Any) -> dict[str, Any]:
    """What is compared in a part of a state, by name."""
    if part.startswith("rank_"):  # sums of losses depend on when they were read
        return _by_name({name: value[name] for name in ("generators", "stream")})
    if part == "callbacks":  # their text says where they write; the page of a report is one text
        value = {re.sub(r"[^(]*/", "", key): state for key, state in value.items() if "page" not in state}
        return {name: leaf for name, leaf in _by_name(value).items() if not isinstance(leaf, str)}
    leaves = _by_name(value)
    named = [name for name in leaves if part not in ("optimizer", "scheduler") or SCHEDULED.isdisjoint(name.split("."))]
    return {name: leaves[name] for name in sorted(named, key=lambda name: "param_groups" not in name)}  # settings first


def _distance(pair: tuple[Any, Any]) -> float:
    one, other = pair
    is_measured = all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in pair)
    return float((one - other).abs().max()) if is_measured and one.shape == other.shape else 0.0


def _trained(side: _Run, make: MakeRun, start: Position | None, last: int) -> tuple[dict[int, UpdateTrace], bool]:
    """The updates of a run that is trained again, to the one after `last`, and whether `last` gave what is on disk."""
    if side.begin is not None and side.begin[0] <= last:
        start = max(start or side.begin, side.begin)
    trace = Trace()
    with kept() as before:
        before.generators()  # so that the other run is made as this one is
        trainer, arguments = make()
        with trained_again(trainer, arguments, None if start is None else side.states[start], trace, until=last + 1):
            updates = {each.update: each._replace(first=None) for each in trace.updates}
            records = records_of(trainer.run_history)
    # A callback may have changed the weights between two updates, before the state was saved or after it.
    digests = {each.weights_after for each in updates.values() if each.update == last}
    digests |= {each.weights for each in updates.values() if each.update == last + 1}
    saved = [digest(weights_in(folder)) for position, folder in side.states.items() if position[0] == last]
    is_same = all(first_difference(side.records, records, kind) is None for kind in ("step", "metric"))
    return updates, is_same and digests.issuperset(saved)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters and buffers in a training state, by name, as `weights_of` has them."""
    names = [name for name in part_names(read_manifest(folder)) if name in _WEIGHTS]
    parts = read_state(folder, names)[1]
    held = parts.pop("held", {})
    return named_weights(next(iter(parts.values()), {}), held)


def short_pair(a: Any, b: Any) -> list[str]:
    """Two values as short texts, each from a little before the first difference."""
    texts = [str(a), str(b)]
    start = max(0, len(os.path.commonprefix(texts)) - _MOST_CHARACTERS // 2)
    start = 0 if max(map(len, texts)) <= _MOST_CHARACTERS else start
    return [_short(f"{'...' if start else ''}{text[start:]}") for text in texts]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
