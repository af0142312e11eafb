"""``python -m pytorch_accelerated checkpoints``: inspects and cleans up folders of training states.

Folders may be damaged or come from others, so their contents are displayed, but never trusted or executed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pytorch_accelerated.checkpointing.layout import MANIFEST_NAME, PREDICTIONS_FORMAT, SHARDS_FILE, Manifest
from pytorch_accelerated.checkpointing.policy import Retention
from pytorch_accelerated.checkpointing.publish import remove_state
from pytorch_accelerated.checkpointing.saved_metrics import judged_states, read_metric_records
from pytorch_accelerated.checkpointing.state_folder import part_names
from pytorch_accelerated.checkpointing.verify import (
    find_damage,
    looks_like_state,
    read_manifest,
    state_folders,
    tensors_of_file,
)
from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError
from pytorch_accelerated.progress.screen import Screen, format_bytes, printable

_SHOWN_CHARACTERS = 100


@dataclass(frozen=True)
class Found:
    """A training state found on disk. If its manifest cannot be read, that is None, and `complaint` says why.

    `saved_at` is when the manifest was written (the last step of a save), in seconds since the epoch.
    """

    folder: Path
    saved_at: float
    manifest: Manifest | None
    complaint: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def when(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.saved_at))

    @property
    def size(self) -> str:
        return "?" if self.manifest is None else format_bytes(sum(entry.size_bytes for entry in self.manifest.files))

    @property
    def epochs(self) -> str:
        """The finished epochs, with the part of the current one where that is known."""
        facts = {} if self.manifest is None else self.manifest.facts
        rows = (facts.get("data", {}).get("train") or {}).get("rows")
        if not rows or "samples_in_epoch" not in facts:
            return self.fact("epochs")
        return f"{facts['epochs'] + facts['samples_in_epoch'] % rows / rows:.2f}".removesuffix(".00")

    def fact(self, name: str) -> str:
        """One of its facts as text; ``?`` if unknown."""
        return "?" if self.manifest is None or name not in self.manifest.facts else _fact(self.manifest.facts[name])


def find_states(place: Path) -> list[Found]:
    """The training state at `place`, or all states in it: first those that cannot be read, then the others by age.

    Raises:
        CheckpointError: if `place` is not a folder.
    """
    if not place.is_dir():
        raise CheckpointError(f"There is no folder {str(place)!r}.")
    folders = [place] if looks_like_state(place) else state_folders(place)
    states = [_found(folder) for folder in folders]
    runs = [state for state in states if state.manifest is None or PREDICTIONS_FORMAT not in state.manifest.facts]
    return sorted(runs, key=lambda state: -1 if state.manifest is None else state.manifest.serial)


def list_states(place: Path, screen: Screen) -> int:
    """Show the training states in `place`, oldest first. Only their manifests are read."""
    states = find_states(place)
    if not states:
        screen.line(f"No training states in {place}.")
        return 0
    rows = [
        (
            *(one.name, one.when, one.fact("updates"), one.epochs, one.fact("ranks"), one.size),
            "damaged" if one.manifest is None else "ok",
        )
        for one in states
    ]
    numbers = ("updates", "epochs", "ranks", "size")
    screen.table(("name", "saved", *numbers, "manifest"), rows, numbers=numbers)
    return 0


def verify_states(place: Path, screen: Screen) -> int:
    """Read every byte of the states in `place`, and name each damaged file. Returns 0 only if there is none."""
    states = _at_least_one(place)
    number_damaged = 0
    for state in states:
        manifest = state.manifest
        complaints = [state.complaint] if manifest is None else find_damage(state.folder, manifest)
        number_damaged += bool(complaints)
        screen.line(f"{'damaged' if complaints else 'ok':<7}  {state.name}")
        for complaint in complaints:
            screen.line(f"         {complaint}")
    screen.line(f"{len(states) - number_damaged} of {len(states)} valid")
    return 1 if number_damaged else 0


def show_state(place: Path, screen: Screen) -> int:
    """Show the contents of the state `place`, or of the newest state in it. Checksums of files are not compared.

    Raises:
        InvalidCheckpointError: if the manifest, or a part that is read, is damaged.
    """
    state = _at_least_one(place)[-1]
    manifest = state.manifest
    if manifest is None:
        raise InvalidCheckpointError(state.complaint)
    facts = [("saved", state.when), ("size", f"{state.size} in {len(manifest.files)} files")]
    facts += [
        (str(name), state.epochs if name == "epochs" else _fact(value))
        for name, value in manifest.facts.items()
        if value != {}
    ]
    names = part_names(manifest)
    parts = [_part_row(state.folder, manifest, name) for name in names]
    for entry in manifest.files:
        if SHARDS_FILE.fullmatch(entry.name):
            number = len(tensors_of_file(state.folder / entry.name))
            parts.append((f"pieces in {entry.name}", str(number), format_bytes(entry.size_bytes)))
    latest = {record.name: record for record in read_metric_records(state.folder)} if "run" in names else {}
    metrics = [(record.name, repr(record.value), str(record.epoch), str(record.update)) for record in latest.values()]
    screen.line(str(state.folder))
    screen.line()
    screen.table(("fact", "value"), facts)
    screen.line()
    screen.table(("part", "tensors", "size"), parts, numbers=("tensors", "size"))
    if metrics:
        screen.line()
        screen.table(("metric", "last value", "epoch", "update"), metrics, numbers=("epoch", "update"))
    return 0


@dataclass(frozen=True)
class PrunePlan:
    """The effect of a retention on a folder.

    Attributes:
        kept: valid states that stay; every byte of them has been read.
        doomed: states that no rule keeps.
        left_alone: damaged states, and those that no run has saved. The rules ignore them.
    """

    kept: list[Found]
    doomed: list[Found]
    left_alone: list[Found]


def plan_prune(place: Path, retention: Retention, metric_name: str | None) -> PrunePlan:
    """Plan the deletion of all *valid* states in `place` that `retention` does not keep; the metric ranks the best.

    Raises:
        CheckpointError: if `place` is itself a state, or none of its states has a value of the metric.
    """
    states = find_states(place)
    if looks_like_state(place):
        raise CheckpointError(f"{str(place)!r} is one training state. Give the folder that holds the states.")
    readable = [(one.folder, one.manifest) for one in states if one.manifest is not None]
    # States to keep must be valid, or they would take the place of valid ones.
    complete = [one for one in readable if "updates" in one[1].facts and not find_damage(*one)]
    judged = judged_states(complete, metric_name=metric_name)
    if metric_name is not None and judged and all(one.value is None for one in judged):
        known = ", ".join(sorted({record.name for record in read_metric_records(complete[-1][0])})) or "none"
        raise CheckpointError(
            f"No state in {str(place)!r} has a value of {metric_name!r} that belongs to its own model. Metrics there: "
            f"{known}."
        )
    doomed_names = {one.name for one in retention.states_to_delete(judged)}
    plan = PrunePlan([], [], [])
    folders = {folder for folder, _ in complete}
    for one in states:
        verdict = plan.doomed if one.name in doomed_names else plan.kept
        (verdict if one.folder in folders else plan.left_alone).append(one)
    return plan


def prune(plan: PrunePlan, screen: Screen, *, is_agreed: Callable[[str], bool]) -> int:
    """Show `plan`, and carry it out if the user agrees. Returns 1 if not.

    Raises:
        CheckpointError: if a state cannot be deleted.
    """
    verdicts = {"delete": plan.doomed, "keep": plan.kept, "left alone": plan.left_alone}
    rows = [
        (state.name, state.when, state.fact("updates"), state.size, verdict)
        for verdict, states in verdicts.items()
        for state in states
    ]
    if not rows:
        screen.line("No training states here.")
        return 0
    screen.table(("name", "saved", "updates", "size", "verdict"), rows, numbers=("updates", "size"))
    if not plan.doomed:
        screen.line("Nothing to delete.")
        return 0
    size_bytes = sum(entry.size_bytes for one in plan.doomed if one.manifest for entry in one.manifest.files)
    what = f"{len(plan.doomed)} of {len(rows)} training states, {format_bytes(size_bytes)}"
    if not is_agreed(f"Delete {what}?"):
        screen.line("Nothing was deleted.")
        return 1
    for state in plan.doomed:
        remove_state(state.folder)
    screen.line(f"Deleted {what}.")
    return 0


def _at_least_one(place: Path) -> list[Found]:
    states = find_states(place)
    if not states:
        raise CheckpointError(f"There is no training state in {str(place)!r}.")
    return states


def _found(folder: Path) -> Found:
    manifest_path = folder / MANIFEST_NAME
    saved_at = (manifest_path if manifest_path.is_file() else folder).lstat().st_mtime
    try:
        return Found(folder, saved_at, read_manifest(folder))
    except InvalidCheckpointError as error:
        return Found(folder, saved_at, None, str(error))


def _part_row(folder: Path, manifest: Manifest, name: str) -> tuple[str, str, str]:
    tensors = f"{name}.safetensors"
    size_bytes = sum(entry.size_bytes for entry in manifest.files if entry.name in (tensors, f"{name}.json"))
    return name, str(len(tensors_of_file(folder / tensors))), format_bytes(size_bytes)


def _fact(value: object) -> str:
    """A fact as one line of limited length."""
    text = ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)
    shown = printable(text)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."
