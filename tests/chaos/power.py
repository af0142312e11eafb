"""What a disk may hold after the power went off: everything that was flushed, and any part of what was not."""

import contextlib
import copy
import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.checkpointing import disk


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
