"""Finds state folders and verifies that they match their manifest. Nothing here changes the disk.

What matches its manifest counts as written by a run: whoever can write to the folder could forge both.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import stat
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError, MissingCheckpointError
from pytorch_accelerated.states.codec import read_layout
from pytorch_accelerated.states.disk import children_of, explained_reading, kind_of, resolved
from pytorch_accelerated.states.layout import (
    MANIFEST_NAME,
    PREDICTIONS_FORMAT,
    STATE_NAME,
    FileEntry,
    HiddenName,
    Manifest,
    parse_manifest,
)

# Hashing less takes no longer than starting a thread for it.
WORTH_A_THREAD = 1 << 20
CHUNK_BYTES = 2**22
_FILES_OF_ACCELERATE = ("random_states_*.pkl", "optimizer.bin")
_FILE_OF_RUN = re.compile(r"(?:run|rank_\d+)\.(?:json|safetensors)")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a state folder; the other files are not read.

    Raises:
        InvalidCheckpointError: if the manifest is missing or damaged.
    """
    path = folder / MANIFEST_NAME
    with open_plain_file(path) as file:
        return parse_manifest(file.readall(), what=str(path))


@contextlib.contextmanager
def open_verified(folder: Path, entry: FileEntry) -> Iterator[Callable[[memoryview], None]]:
    """A function that fills a buffer with the next bytes of a file. The end of the block verifies all that was read.

    The file must be read to its end, and its content must not be used or replaced before the end of the block:
    another thread hashes a large one while the next bytes are read.

    Raises:
        InvalidCheckpointError: if the file is missing, is not a regular file, or does not match `entry`.
    """
    path = folder / entry.name
    with _comparing(path, entry) as (file, digest), ThreadPoolExecutor(1) as hashing:
        is_large = entry.size_bytes >= WORTH_A_THREAD
        yield filling_from(file, path, functools.partial(hashing.submit, digest.update) if is_large else digest.update)


def filling_from(file: FileIO, path: Path, note: Callable[[memoryview], object] = len) -> Callable[[memoryview], None]:
    """A function that fills a buffer with the next bytes of a file, and calls `note` with each part that was read."""

    def fill(buffer: memoryview) -> None:
        while buffer:
            count = file.readinto(buffer[:CHUNK_BYTES])
            if not count:
                raise InvalidCheckpointError(f"{path} ended while it was read. Use another checkpoint.")
            note(buffer[:count])
            buffer = buffer[count:]

    return fill


@contextlib.contextmanager
def _comparing(path: Path, entry: FileEntry) -> Iterator[tuple[FileIO, Any]]:
    """A file and a digest to add its content to; the end of the block compares both with `entry`."""
    digest = hashlib.sha256()
    with open_plain_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != entry.size_bytes:
            raise InvalidCheckpointError(f"{path} has {size_bytes} bytes; its manifest says {entry.size_bytes}.")
        yield file, digest
        if file.read(1) or digest.hexdigest() != entry.sha256:
            raise InvalidCheckpointError(
                f"{path} was changed: its SHA-256 is {digest.hexdigest()}, its manifest says {entry.sha256}."
            )


def verify(folder: Path, names: Collection[str] | None = None) -> Manifest:
    """The manifest of a state folder, after comparing every byte of the files in `names` (default: all) with it.

    Files that the manifest does not list are ignored.

    Raises:
        InvalidCheckpointError: names every file that differs, and how.
    """
    manifest = read_manifest(folder)
    complaints = find_damage(folder, manifest, names)
    if complaints:
        raise InvalidCheckpointError(
            f"The training state {folder} is damaged:\n  " + "\n  ".join(complaints) + "\nUse another one."
        )
    return manifest


def find_damage(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> list[str]:
    """A sentence for each file that does not match `manifest`, of those in `names` (default: all). Reads every byte."""
    complaints = []
    for entry in manifest.files:
        if names is not None and entry.name not in names:
            continue
        try:
            check_file(folder / entry.name, entry)
        except InvalidCheckpointError as error:
            complaints.append(str(error))
    return complaints


def check_file(path: Path, entry: FileEntry) -> None:
    """Raise an `InvalidCheckpointError` if a file does not match its `entry`. Reads every byte."""
    with _comparing(path, entry) as (file, digest):
        add_rest(digest, file)


def add_rest(digest: Any, file: FileIO) -> None:
    """Add the rest of a file to a digest."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])


def list_states(parent: Path) -> list[tuple[Path, Manifest]]:
    """The state folders in `parent` with a readable manifest, oldest first. Their other files are not read."""
    states, _ = _read_manifests(state_folders(parent))
    return states


def list_named_states(parent: Path) -> list[tuple[Path, Manifest]]:
    """The states in `parent` with names that `SaveTrainingStateCallback` gives, oldest first; see `list_states`."""
    return [state for state in list_states(parent) if STATE_NAME.fullmatch(state[0].name)]


def find_state(path: str | os.PathLike[str], check: Callable[[Path], Any] = verify) -> Path | None:
    """The state folder to resume from: `path` itself if it is a state, else the last saved valid state in it.

    None if there is no state, or `path` does not exist. If newer or unreadable states had to be skipped, one warning
    says which and why. If a process died while it replaced `path`, the old state is found under its temporary name.
    `check` is called with a folder, and raises an `InvalidCheckpointError` if that is damaged; `verify` reads every
    byte of it.

    Raises:
        MissingCheckpointError: if `path` does not exist, and has the name of a state, not of a folder of states.
        CheckpointError: if `path` is a file.
        InvalidCheckpointError: if `path` is a damaged state, cannot be read, or holds states but no valid one.
    """
    folder = resolved(path)
    kind = kind_of(folder)
    if kind == "folder":
        children_of(folder)  # raises if it cannot be read: it must not pass for an empty folder
    if looks_like_state(folder):
        check(folder)
        return folder
    if kind in ("file", "other"):
        raise CheckpointError(
            f"{folder} is a file; a training state is a folder. To read a '.pt' file use `load_checkpoint`."
        )
    folders = state_folders(folder if kind == "folder" else folder.parent)
    if kind is None:  # a process may have died while it replaced `folder`
        hidden = {each: HiddenName.parse(each.name) for each in folders}
        folders = [each for each, name in hidden.items() if name is not None and name.final == folder.name]
    found = _newest_valid(folders, folder, check)
    if found is None and kind == "folder":
        _refuse_states_of_accelerate(folder)
    elif found is None and STATE_NAME.fullmatch(folder.name):
        raise MissingCheckpointError(
            f"There is no training state {folder}. Check the path; to start a new run, give the folder of the states."
        )
    return found


def _refuse_states_of_accelerate(folder: Path) -> None:
    """Refuse a folder that accelerate's `save_state` wrote, or one that holds such folders."""
    places = {path.parent for name in _FILES_OF_ACCELERATE for path in (*folder.glob(name), *folder.glob(f"*/{name}"))}
    if places:
        raise InvalidCheckpointError(
            f"{max(places)} is a training state of accelerate's `save_state`, as pytorch-accelerated 0.1 writes them: "
            "pickles, which can run any code, so they are not read. In the version that wrote the state, load it and "
            "call `trainer.save_checkpoint('model.pt')`, here `trainer.load_checkpoint('model.pt')`."
        )


def _newest_valid(folders: list[Path], place: Path, check: Callable[[Path], Any]) -> Path | None:
    states, complaints = _read_manifests(folders)
    for folder, manifest in reversed(states):
        if PREDICTIONS_FORMAT in manifest.facts:
            continue  # complete and valid, but not a state to resume from
        try:
            check(folder)
        except InvalidCheckpointError as error:
            complaints.append(str(error))
            continue
        if complaints:
            warnings.warn(f"Resuming from {folder}; skipped:\n" + "\n".join(complaints), stacklevel=3)
        return folder
    if complaints:
        raise InvalidCheckpointError(
            f"{place} holds training states, but none of them is valid:\n" + "\n".join(complaints) + "\n"
            "Pass the folder of a valid one, or an empty or missing folder to start from the beginning."
        )
    return None


def _read_manifests(folders: list[Path]) -> tuple[list[tuple[Path, Manifest]], list[str]]:
    states = []
    complaints = []
    for folder in folders:
        try:
            with explained_reading(folder / MANIFEST_NAME):
                facts = os.lstat(folder / MANIFEST_NAME)
            states.append((folder, _manifest_as_of(folder, facts.st_ino, facts.st_mtime_ns, facts.st_size)))
        except InvalidCheckpointError as error:
            complaints.append(str(error))
    states.sort(key=lambda state: state[1].serial)
    return states, complaints


_written: dict[tuple[Any, ...], Manifest] = {}  # the last manifest that this process has written


def note_manifest(staging: Path, final: Path, manifest: Manifest) -> None:
    """Note the manifest of a folder that will be called `final`, so that nobody has to read it back."""
    _written.clear()
    facts = os.lstat(staging / MANIFEST_NAME)
    _written[final, facts.st_ino, facts.st_mtime_ns, facts.st_size] = manifest


@functools.lru_cache(maxsize=4096)
def _manifest_as_of(folder: Path, *identity: int) -> Manifest:
    """The manifest of a folder, which is read at most once: each save and each retention asks for all of them."""
    return _written.pop((folder, *identity), None) or read_manifest(folder)


def state_folders(parent: Path) -> list[Path]:
    """All folders in `parent` that look like states, readable or not, except those being written or deleted.

    Raises:
        InvalidCheckpointError: if `parent` cannot be read.
    """
    if kind_of(parent) != "folder":
        return []
    children = children_of(parent)
    names = {child.name for child in children}
    folders = []
    for child in children:
        hidden = HiddenName.parse(child.name)
        is_current = hidden is None or (hidden.kind == "replaced" and hidden.final not in names)
        if is_current and looks_like_state(child, may_be_link=False):
            folders.append(child)
    return folders


def looks_like_state(folder: Path, *, may_be_link: bool = True) -> bool:
    """Whether `folder` has files that only states have.

    A state that lost its manifest must not be overlooked, nor one that cannot be read, for example because another
    user wrote it. Any unreadable folder may be such a state. Weights of a model alone are none.
    """
    try:
        mode = (os.stat if may_be_link else os.lstat)(folder).st_mode
        if not stat.S_ISDIR(mode):
            return False
        if os.path.lexists(folder / MANIFEST_NAME):  # asked first: each save asks about all states
            return True
        return any(name == MANIFEST_NAME or _FILE_OF_RUN.fullmatch(name) for name in os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False  # just deleted
    except OSError:
        is_of_the_system = folder.name == "lost+found" or folder.name.startswith(".")
        return HiddenName.parse(folder.name) is not None or not is_of_the_system


def tensors_of_file(path: Path) -> list[tuple[str, torch.dtype, list[int]]]:
    """Name, dtype and shape of the tensors of a safetensors file, which is not verified.

    Raises:
        InvalidCheckpointError: if the file cannot be read, or is not a safetensors file.
    """
    with open_plain_file(path) as file:
        return read_layout(filling_from(file, path), os.fstat(file.fileno()).st_size, what=str(path))


@contextlib.contextmanager
def open_plain_file(path: Path) -> Iterator[FileIO]:
    """A regular file, opened for reading.

    Raises:
        InvalidCheckpointError: if `path` is a link or not a regular file, or cannot be read.
    """
    with explained_reading(path):
        # A link may point to a file that somebody changes while we read it, and a pipe would keep us waiting.
        if not stat.S_ISREG(path.lstat().st_mode):
            raise InvalidCheckpointError(f"{path} is not a regular file; training states hold nothing else.")
        with open(path, "rb", buffering=0) as file:
            yield file
