"""Publishing a folder of files atomically: it appears whole or not at all. `replacing` does so for a single file.

One process calls `begin`; every rank may then add files; after all have reported success, one process calls `commit`.
The files are written into a hidden sibling, flushed and listed in a manifest, and the sibling is renamed. A folder that
already has the name is moved aside first and deleted last, so one of the two is complete at any moment, and
`verify.find_state` finds it. The next `begin` in the same place cleans up after processes that died.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from pytorch_accelerated.checkpointing import disk
from pytorch_accelerated.checkpointing.layout import (
    MANIFEST_NAME,
    FileEntry,
    HiddenName,
    Manifest,
    check_file_name,
    dump_manifest,
    hidden_sibling,
)
from pytorch_accelerated.checkpointing.reading import resolved
from pytorch_accelerated.checkpointing.verify import list_states, open_plain_file
from pytorch_accelerated.errors import CheckpointError

_STALE_AFTER_SECONDS = 3600.0
_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class StagedFolder:
    """An unpublished folder. It can be sent to other ranks, which may add their own files.

    Its files are in `staging` until it is published as `final`.
    """

    staging: Path
    final: Path

    def write_file(self, name: str, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        """Write and flush one file; the entry is for `commit`. May be called by any rank.

        Raises:
            CheckpointError: if writing fails; says at which position.
        """
        return self._write(check_file_name(name), chunks)

    def take_in(self, write_others: Callable[[Path], None]) -> list[FileEntry]:
        """Let a function write files into the folder, then flush and hash them; the entries are for `commit`.

        To be called before `write_file`, so that the function cannot replace those files.

        Raises:
            CheckpointError: if it wrote anything but regular files with valid names, or the disk fails.
        """
        before = set(self.staging.iterdir())
        write_others(self.staging)
        entries = []
        for path in sorted(set(self.staging.iterdir()) - before):
            with explained(self.final, f"reading {path.name!r} back"), open_plain_file(path) as file:
                check_file_name(path.name)
                disk.flush(file)
                entries.append(FileEntry(path.name, os.fstat(file.fileno()).st_size, _sha256(file)))
        return entries

    def commit(self, facts: dict[str, Any], files: Iterable[FileEntry]) -> None:
        """Publish the folder, with the `files` of all ranks, under its final name. To be called by one rank.

        `facts` are plain values that can be read without the files.

        Raises:
            CheckpointError: if a file is missing here, or the disk fails; an earlier state then keeps the name.
        """
        files = tuple(sorted(files, key=lambda entry: entry.name))
        self._check_complete(files)
        serial = 1 + max((manifest.serial for _, manifest in list_states(self.final.parent)), default=0)
        manifest = dump_manifest(Manifest(serial, facts, files))
        self._write(MANIFEST_NAME, [manifest])
        with explained(self.final):
            disk.flush_folder(self.staging)
            replaced = self._move_aside()
            try:
                disk.move(self.staging, self.final)
            except OSError:
                if replaced is not None:
                    disk.move(replaced, self.final)
                raise
            disk.flush_folder(self.final.parent)
        if replaced is not None:
            # The new state is safe; if the old one cannot be deleted now, a later `sweep` will do it.
            with contextlib.suppress(OSError):
                _remove_tree(_hide(replaced))

    def abort(self) -> None:
        """Delete what was written so far. To be called by one rank if any has failed; no effect after `commit`."""
        if self.staging.exists():
            # The error that caused the abort is the one to report; a later `sweep` will delete what is left.
            with contextlib.suppress(OSError):
                _remove_tree(self.staging)

    def _write(self, name: str, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        digest = hashlib.sha256()
        size_bytes = 0
        with explained(self.final), disk.create_file(self.staging / name) as file:
            for chunk in chunks:
                with explained(self.final, f"writing {len(chunk)} bytes at position {size_bytes} of {name!r}"):
                    disk.write(file, chunk)
                digest.update(chunk)
                size_bytes += len(chunk)
            disk.flush(file)
        return FileEntry(name, size_bytes, digest.hexdigest())

    def _check_complete(self, files: tuple[FileEntry, ...]) -> None:
        here = {path.name: path.stat().st_size for path in self.staging.iterdir()}
        missing = [entry.name for entry in files if here.get(entry.name) != entry.size_bytes]
        if missing:
            raise CheckpointError(
                f"The process that publishes {self.staging} cannot see {', '.join(missing)} there, although the ranks "
                "have written these files. Save to a folder that all machines share."
            )

    def _move_aside(self) -> Path | None:
        if not self.final.exists():
            return None
        replaced = hidden_sibling(self.final, "replaced")
        disk.move(self.final, replaced)
        return replaced


def begin(final: str | os.PathLike[str]) -> StagedFolder:
    """A new, empty, unpublished folder, which will be called `final`. To be called by one rank.

    Creates missing parents, and cleans up after dead processes in the same parent: after those of this host at once,
    after those of other hosts when nothing has changed for an hour.

    Raises:
        CheckpointError: if `final` exists and is neither a training state nor an empty folder, or if the disk fails.
    """
    final = resolved(final)
    with explained(final):
        is_in_the_way = final.exists() and not is_replaceable(final)
    if is_in_the_way:
        raise CheckpointError(
            f"{final} already exists and is not a training state, so it will not be replaced by one. "
            "Choose another name, or delete it yourself."
        )
    with explained(final):
        make_folders(final.parent)
        staging = hidden_sibling(final, "partial")
        disk.create_folder(staging)
        sweep(final.parent, now=staging.stat().st_mtime)  # the clock of the file system, which may be on another host
    return StagedFolder(staging, final)


def is_replaceable(final: Path) -> bool:
    """Whether `final` is a state or an empty folder, which a new state may replace."""
    return final.is_dir() and ((final / MANIFEST_NAME).is_file() or not any(final.iterdir()))


def remove_state(folder: Path) -> None:
    """Delete a state folder. A process that dies meanwhile leaves the whole state, or nothing that looks like one.

    Raises:
        CheckpointError: if the disk fails.
    """
    with explained(folder, "deleting it"):
        hidden = _hide(folder)
        # Otherwise a power cut could restore the name, but not the deleted files.
        disk.flush_folder(folder.parent)
        _remove_tree(hidden)


@contextlib.contextmanager
def replacing(final: Path) -> Iterator[FileIO]:
    """A new file, which replaces `final` when the block ends, or not at all. Creates missing parents. For one rank.

    Raises:
        OSError: if the disk fails; an earlier file is unchanged.
    """
    make_folders(final.parent)
    partial = hidden_sibling(final, "partial")
    try:
        with disk.create_file(partial) as file:
            sweep(final.parent, now=partial.stat().st_mtime)
            yield file
            disk.flush(file)
        disk.move(partial, final)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            disk.remove(partial)
        raise
    disk.flush_folder(final.parent)


def make_folders(folder: Path) -> None:
    """Create `folder` and its missing parents, and wait until they would survive a power cut."""
    if not folder.is_dir():
        make_folders(folder.parent)
        with contextlib.suppress(FileExistsError):  # another rank was faster
            disk.create_folder(folder)
        disk.flush_folder(folder.parent)


def sweep(parent: Path, *, now: float) -> None:
    """Clean up after dead processes in `parent`: delete unfinished files and folders, restore half-replaced states.

    `now` is the time by the clock of the file system.
    """
    for path in sorted(parent.iterdir()):
        hidden = HiddenName.parse(path.name)
        if hidden is None:
            continue
        with contextlib.suppress(OSError):  # it may belong to another user, or another process may sweep too
            if not _is_abandoned(path, hidden, now=now):
                continue
            if hidden.kind == "replaced" and not (parent / hidden.final).exists():
                disk.move(path, parent / hidden.final)
            else:
                _remove_tree(path)


@contextlib.contextmanager
def explained(final: Path, doing: str = "") -> Iterator[None]:
    """Turn an error of the operating system into a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Saving {final} failed{' while ' if doing else ''}{doing}: {error}. Earlier saves are unchanged. Check "
            "free space, quota and permissions of the disk, then save again."
        ) from error


def _hide(folder: Path) -> Path:
    """Rename `folder`, so that nobody reads it while it is being deleted."""
    hidden = HiddenName.parse(folder.name)
    partial = hidden_sibling(folder.with_name(hidden.final) if hidden else folder, "partial")
    disk.move(folder, partial)
    return partial


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for child in sorted(path.iterdir()):
            _remove_tree(child)
    disk.remove(path)


def _is_abandoned(path: Path, hidden: HiddenName, *, now: float) -> bool:
    if hidden.is_on_this_host and os.name == "posix":
        if hidden.is_of_this_process:
            return False
        return hidden.pid == os.getpid() or not _is_running(hidden.pid)
    children = path.iterdir() if path.is_dir() else ()
    last_change: float = max(one.lstat().st_mtime for one in (path, *children))
    return now - last_change > _STALE_AFTER_SECONDS


def _sha256(file: FileIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, but belongs to another user
    return True
