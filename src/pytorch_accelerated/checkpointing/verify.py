"""Finds state folders and verifies that they match their manifest. Nothing here changes the disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import warnings
from collections.abc import Callable, Collection, Iterator
from io import FileIO
from pathlib import Path

import torch

from pytorch_accelerated.checkpointing.accelerate_states import refuse_accelerate_states
from pytorch_accelerated.checkpointing.layout import (
    MANIFEST_NAME,
    PREDICTIONS_FORMAT,
    FileEntry,
    HiddenName,
    Manifest,
    parse_manifest,
)
from pytorch_accelerated.checkpointing.reading import children_of, is_folder, kind_of, resolved
from pytorch_accelerated.checkpointing.strict_json import MAX_SIZE_BYTES
from pytorch_accelerated.checkpointing.tensor_file import read_layout
from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError

_CHUNK_BYTES = 2**20
_FILE_OF_RUN = re.compile(r"(?:run|rank_\d+)\.(?:json|safetensors)")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a state folder; the other files are not read.

    Raises:
        InvalidCheckpointError: if the manifest is missing or damaged.
    """
    path = folder / MANIFEST_NAME
    with open_plain_file(path) as file:
        return parse_manifest(file.read(MAX_SIZE_BYTES + 1), what=str(path))


@contextlib.contextmanager
def open_verified(folder: Path, entry: FileEntry) -> Iterator[Callable[[memoryview], None]]:
    """A function that fills a buffer with the next bytes of a file. The end of the block verifies all that was read.

    The file must be read to its end, and its content must not be used before the end of the block.

    Raises:
        InvalidCheckpointError: if the file is missing, is not a regular file, or does not match `entry`.
    """
    path = folder / entry.name
    digest = hashlib.sha256()

    with open_plain_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != entry.size_bytes:
            raise InvalidCheckpointError(f"{path} has {size_bytes} bytes; its manifest says {entry.size_bytes}.")

        def read_into(buffer: memoryview) -> None:
            rest = buffer
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise InvalidCheckpointError(f"{path} ended while it was read.")
                rest = rest[count:]
            digest.update(buffer)

        yield read_into
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
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for entry in manifest.files:
        if names is not None and entry.name not in names:
            continue
        try:
            with open_verified(folder, entry) as read_into:
                for position in range(0, entry.size_bytes, _CHUNK_BYTES):
                    read_into(buffer[: entry.size_bytes - position])
        except InvalidCheckpointError as error:
            complaints.append(str(error))
    return complaints


def list_states(parent: Path) -> list[tuple[Path, Manifest]]:
    """The state folders in `parent` with a readable manifest, oldest first. Their other files are not read."""
    states, _ = _read_manifests(state_folders(parent))
    return states


def newest_valid(parent: Path) -> Path | None:
    """The last saved state folder in `parent` that matches its manifest, or None if there are no states.

    Reads every byte of that folder. If newer or unreadable states had to be skipped, one warning says which and why.

    Raises:
        InvalidCheckpointError: if there are states, but none is valid.
    """
    return _newest_valid_of(state_folders(parent), parent)


def find_state(path: str | os.PathLike[str]) -> Path | None:
    """The state folder to resume from: `path` itself if it is a state, else the newest valid state in it.

    None if there is no state, or `path` does not exist. If a process died while it replaced `path`, the old state is
    found under its temporary name.

    Raises:
        CheckpointError: if `path` is a file.
        InvalidCheckpointError: if `path` is a damaged state, cannot be read, or holds states but no valid one.
    """
    folder = resolved(path)
    kind = kind_of(folder)
    if kind == "folder":
        children_of(folder)  # raises if it cannot be read: it must not pass for an empty folder
    refuse_accelerate_states(folder)
    if looks_like_state(folder):
        verify(folder)
        return folder
    if kind in ("file", "other"):
        raise CheckpointError(
            f"{folder} is a file; a training state is a folder. To read a '.pt' file use `load_checkpoint`."
        )
    return newest_valid(folder) if kind == "folder" else _newest_valid_of(_replaced(folder), folder)


def _newest_valid_of(folders: list[Path], place: Path) -> Path | None:
    states, complaints = _read_manifests(folders)
    for folder, manifest in reversed(states):
        if PREDICTIONS_FORMAT in manifest.facts:
            continue  # complete and valid, but not a state to resume from
        try:
            verify(folder)
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
            states.append((folder, read_manifest(folder)))
        except InvalidCheckpointError as error:
            complaints.append(str(error))
    states.sort(key=lambda state: state[1].serial)
    return states, complaints


def state_folders(parent: Path) -> list[Path]:
    """All folders in `parent` that look like states, readable or not, except those being written or deleted.

    Raises:
        InvalidCheckpointError: if `parent` cannot be read.
    """
    if not is_folder(parent):
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


def _replaced(final: Path) -> list[Path]:
    """States that had the name `final` when a process died while it replaced them."""
    hidden_names = ((folder, HiddenName.parse(folder.name)) for folder in state_folders(final.parent))
    return [folder for folder, hidden in hidden_names if hidden is not None and hidden.final == final.name]


def looks_like_state(folder: Path, *, may_be_link: bool = True) -> bool:
    """Whether `folder` has files that only states have.

    A state that lost its manifest must not be overlooked, nor one that cannot be read, for example because another
    user wrote it. Any unreadable folder may be such a state. Weights of a model alone are none.
    """
    try:
        mode = (os.stat if may_be_link else os.lstat)(folder).st_mode
        return stat.S_ISDIR(mode) and any(
            child.name == MANIFEST_NAME or _FILE_OF_RUN.fullmatch(child.name) for child in folder.iterdir()
        )
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

        def read_into(buffer: memoryview) -> None:
            if file.readinto(buffer) != len(buffer):
                raise InvalidCheckpointError(f"{path} ended while it was read.")

        return read_layout(read_into, os.fstat(file.fileno()).st_size, what=str(path))


@contextlib.contextmanager
def open_plain_file(path: Path) -> Iterator[FileIO]:
    """A regular file, opened for reading.

    Raises:
        InvalidCheckpointError: if `path` is a link or not a regular file, or cannot be read.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise InvalidCheckpointError(f"{path} is not a regular file; training states hold nothing else.")
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise InvalidCheckpointError(f"{path} cannot be read: {error.strerror}.") from error
