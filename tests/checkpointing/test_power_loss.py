"""When the power goes off at any moment of a save, the old state or the new one is on the disk, whole.

A disk may then hold everything that was flushed, and any part of what was not.
"""

import contextlib
import copy
import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.states import disk
from pytorch_accelerated.states.publish import remove_state
from pytorch_accelerated.states.state_folder import read_state
from pytorch_accelerated.states.verify import find_state
from tests.chaos.record import record
from tests.chaos.size import size
from tests.checkpointing.writing import write_state


@dataclasses.dataclass
class File:
    """Its content now, and that at the last flush."""

    content: bytes = b""
    flushed: bytes = b""


@dataclasses.dataclass
class Folder:
    """Its entries now and at the last flush, and how the former came from the latter."""

    entries: dict[str, "File | Folder"] = dataclasses.field(default_factory=dict)
    flushed: dict[str, "File | Folder"] = dataclasses.field(default_factory=dict)
    changes: list[tuple[str | None, str | None, "File | Folder"]] = dataclasses.field(default_factory=list)

    def change(self, old: str | None, new: str | None, what: "File | Folder") -> None:
        """Rename the entry `old` to `new`; None: it was not there before, or is not any more."""
        _change(self.entries, old, new, what)
        self.changes.append((old, new, what))

    def flush(self) -> None:
        self.flushed = dict(self.entries)
        self.changes.clear()


Choice = Callable[[int], int]
"""Of so many things that were not flushed, in order: how many are on the disk all the same."""


def nothing(pending: int) -> int:
    return 0


def everything(pending: int) -> int:
    return pending


def by_dice(seed: int) -> Choice:
    dice = random.Random(seed)
    return lambda pending: dice.randint(0, pending)


class RecordingDisk:
    """Does what `disk` does, and keeps what would be on the disk after each operation.

    Args:
        root: the folder that everything happens in.

    Attributes:
        moments: the tree after each operation, and the number of saves that had been reported complete by then.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = Folder()
        self.moments: list[tuple[Folder, int]] = []
        self.saves_reported = 0
        self._files: dict[int, tuple[Any, File]] = {}
        self._one_at_a_time = threading.Lock()

    @contextlib.contextmanager
    def installed(self) -> Iterator["RecordingDisk"]:
        with pytest.MonkeyPatch.context() as patch:
            for name in disk.OPERATIONS:
                patch.setattr(disk, name, self._recording(getattr(disk, name), getattr(self, f"_{name}")))
            yield self

    def _recording(self, operation: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self._one_at_a_time:
                result = operation(*args)
                note(*args, result)
                self.moments.append((copy.deepcopy(self.tree), self.saves_reported))
                return result

        return run

    def _folder(self, path: Path) -> Folder:
        folder = self.tree
        for name in path.relative_to(self.root).parts:
            inner = folder.entries[name]
            assert isinstance(inner, Folder)
            folder = inner
        return folder

    def _create_folder(self, path: Path, _: None) -> None:
        self._folder(path.parent).change(None, path.name, Folder())

    def _create_file(self, path: Path, opened: Any) -> None:
        file = File()
        self._files[id(opened)] = opened, file
        self._folder(path.parent).change(None, path.name, file)

    def _write(self, opened: Any, data: bytes | memoryview, _: None) -> None:
        self._files[id(opened)][1].content += bytes(data)

    def _flush(self, opened: Any, _: None) -> None:
        file = self._files[id(opened)][1]
        file.flushed = file.content

    def _flush_folder(self, path: Path, _: None) -> None:
        if path.is_relative_to(self.root):
            self._folder(path).flush()

    def _move(self, source: Path, target: Path, _: None) -> None:
        assert source.parent == target.parent
        folder = self._folder(source.parent)
        folder.change(source.name, target.name, folder.entries[source.name])

    def _remove(self, path: Path, _: None) -> None:
        folder = self._folder(path.parent)
        folder.change(path.name, None, folder.entries[path.name])


def restore(tree: Folder, target: Path, choose: Choice) -> None:
    """Make `target` what is on the disk when the power comes back."""
    target.mkdir()
    entries = dict(tree.flushed)
    for old, new, what in tree.changes[: choose(len(tree.changes))]:
        _change(entries, old, new, what)
    for name, what in entries.items():
        if isinstance(what, Folder):
            restore(what, target / name, choose)
        else:
            lost = what.content[len(what.flushed) :]
            (target / name).write_bytes(what.flushed + lost[: choose(len(lost))])


def _change(entries: dict[str, File | Folder], old: str | None, new: str | None, what: File | Folder) -> None:
    if old is not None:
        entries.pop(old, None)
    if new is not None:
        entries[new] = what


def save(folder: Path, version: int) -> None:
    write_state(folder, {"version": version}, {"model": {"weight": torch.full((50,), float(version))}, "run": version})


def save_three_times_the_same(states: Path, report: Callable[[int], None]) -> None:
    for version in (1, 2, 3):
        save(states / "state", version)
        report(version)


def save_three_and_keep_one(states: Path, report: Callable[[int], None]) -> None:
    for version in (1, 2, 3):
        save(states / f"step_{version}", version)
        report(version)
        if version > 1:
            remove_state(states / f"step_{version - 1}")


@pytest.mark.parametrize("saves", [save_three_times_the_same, save_three_and_keep_one])
def test_the_power_may_go_off_after_any_operation(saves: Callable[[Path, Callable[[int], None]], None], tmp_path: Path):
    root = tmp_path / "disk"
    root.mkdir()
    recording = RecordingDisk(root)

    def report(version: int) -> None:
        recording.saves_reported = version

    with recording.installed():
        saves(root / "states", report)
    choices = [nothing, everything, *map(by_dice, range(size(2, 100)))]
    for number, (tree, reported) in enumerate(recording.moments):
        for index, choose in enumerate(choices):
            after = tmp_path / f"{number} {index}"
            restore(tree, after, choose)
            state = find_state(after / "states")
            if state is None:
                assert reported == 0
                continue
            facts, parts = read_state(state)
            version = facts["version"]
            assert version in (reported, reported + 1)
            assert parts["run"] == version
            assert torch.equal(parts["model"]["weight"], torch.full((50,), float(version)))
    figures = {
        "operations": len(recording.moments),
        "disks": len(recording.moments) * len(choices),
        "states lost": 0,
    }
    record(f"power loss, {saves.__name__.replace('_', ' ')}", figures)
