"""Publishing a folder of files atomically: it appears whole or not at all. `replacing` does so for a single file.

One process calls `begin`; every rank may then add files; after all have reported success, one process calls `commit`.
The files are written into a hidden sibling, flushed and listed in a manifest, and the sibling is renamed. A folder that
already has the name is moved aside first and deleted last, so one of the two is complete at any moment, and
`verify.find_state` finds it. The next `begin` in the same place cleans up after processes that died.

A run that continues while a thread writes uses the same code in the same order, so a crash has the same effects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.states import disk
from pytorch_accelerated.states.disk import resolved
from pytorch_accelerated.states.layout import (
    MANIFEST_NAME,
    FileEntry,
    HiddenName,
    Manifest,
    dump_manifest,
    hidden_sibling,
    is_file_name,
    this_host,
)
from pytorch_accelerated.states.verify import (
    CHUNK_BYTES,
    WORTH_A_THREAD,
    add_rest,
    list_states,
    note_manifest,
    open_plain_file,
    read_manifest,
)

_STALE_AFTER_SECONDS = 3600.0
_FLUSHES_AT_ONCE = 4
_PIECES_AHEAD = 64  # how far writing may be ahead of hashing: copies of a device's tensors stay in memory until then

# The highest serial number of states that were uploaded from a folder, by folder: they may be gone from the disk, and
# what is saved next must count as newer.
highest_serials: dict[Path, int] = {}


@dataclass(frozen=True)
class StagedFolder:
    """An unpublished folder. It can be sent to other ranks, which may add their own files.

    Its files are in `staging` until it is published as `final`.
    """

    staging: Path
    final: Path

    def write_files(self, files: Iterable[tuple[str, Iterable[bytes | memoryview]]]) -> list[FileEntry]:
        """Write files, by name, and flush each while the next ones are written; the entries are for `commit`.

        May be called by any rank.

        Raises:
            CheckpointError: if writing fails; says at which position.
        """
        written, hashes, flushes = [], [], []
        with (
            explained(self.final),
            contextlib.ExitStack() as opened,
            ThreadPoolExecutor(_FLUSHES_AT_ONCE) as flushing,
            ThreadPoolExecutor(1) as hashing,
        ):
            for name, chunks in files:
                file = opened.enter_context(disk.create_file(self.staging / name))
                digest = hashlib.sha256()
                for piece in filter(None, _pieces(chunks)):
                    # Hashing takes about as long as writing and flushing, and all three release the interpreter's lock.
                    hashes.append(hashing.submit(digest.update, piece))
                    if len(hashes) > _PIECES_AHEAD:
                        hashes.pop(0).result()
                    with explained(self.final, f"writing {len(piece)} bytes at position {file.tell()} of {name!r}"):
                        disk.write(file, piece)
                written.append((name, file.tell(), digest))
                flushes.append(flushing.submit(disk.flush, file))
            # After a power cut a file may have its name and not its content, so all contents are flushed before the
            # folder gets its name.
            for each in (*hashes, *flushes):
                each.result()
        return [FileEntry(name, size_bytes, digest.hexdigest()) for name, size_bytes, digest in written]

    def add_files(self) -> list[FileEntry]:
        """Flush and hash the files that others have written, to this folder or `final`; the entries are for `commit`.

        To be called before `write_files`. Links, and files whose names a manifest cannot list, are left out.
        """
        with explained(self.final, "adding its files"):
            # `final` may hold files of this save that other code wrote there, still without a manifest. They join the
            # unpublished files, so the folder appears whole.
            if self.final.exists() and not is_replaceable(self.final):
                for path in self.final.iterdir():
                    disk.move(path, self.staging / path.name)
                disk.remove(self.final)
            for path in filter(Path.is_dir, self.staging.rglob("*")):
                disk.flush_folder(path)
        return [self._read_back(name) for name in plain_files(self.staging)]

    def _read_back(self, name: str) -> FileEntry:
        with explained(self.final, f"reading {name!r} back"), open_plain_file(self.staging / name) as file:
            disk.flush(file)
            add_rest(digest := hashlib.sha256(), file)
            return FileEntry(name, os.fstat(file.fileno()).st_size, digest.hexdigest())

    def commit(self, facts: dict[str, Any], files: Iterable[FileEntry]) -> None:
        """Publish the folder, with the `files` of all ranks, under its final name. To be called by one rank.

        `facts` are plain values that can be read without the files.

        Raises:
            CheckpointError: if a file is missing here, or the disk fails; an earlier state then keeps the name.
        """
        files = tuple(sorted(files, key=lambda entry: entry.name))
        missing = [
            entry.name
            for entry in files
            if not (path := self.staging / entry.name).is_file() or path.stat().st_size != entry.size_bytes
        ]
        if missing:
            raise CheckpointError(
                f"The process that publishes {self.staging} cannot see {', '.join(missing)} there, although the ranks "
                "have written these files. Save to a folder that all machines share."
            )
        # The newest state is the one that was saved last. Clocks jump, and a run that resumes from an older state
        # counts its updates from there again, so the folder counts the saves.
        parent = self.final.parent
        known = [highest_serials.get(parent, 0), *(manifest.serial for _, manifest in list_states(parent))]
        self.publish(Manifest(1 + max(known), facts, files))

    def publish(self, manifest: Manifest) -> None:
        """Publish the folder, with a manifest that lists its files. To be called by one rank.

        Raises:
            CheckpointError: if the disk fails; an earlier state then keeps the name.
        """
        self.write_files([(MANIFEST_NAME, [dump_manifest(manifest)])])
        with explained(self.final):
            note_manifest(self.staging, self.final, manifest)
            disk.flush_folder(self.staging)  # else a power cut may leave a published folder without some of its files
            replaced = hidden_sibling(self.final, "replaced") if self.final.exists() else None
            # A folder can't replace another one in one step. Between these two moves nothing has the final name, but
            # the name of the old state says what it was, so a reader takes it, and the next save restores it.
            if replaced is not None:
                disk.move(self.final, replaced)
            try:
                disk.move(self.staging, self.final)
            except OSError:
                if replaced is not None:
                    disk.move(replaced, self.final)
                raise
            disk.flush_folder(self.final.parent)  # before that, a power cut may undo the moves
        if replaced is not None:
            # The new state is safe; if the old one cannot be deleted now, a later save will do it.
            with contextlib.suppress(CheckpointError):
                remove_state(replaced)

    def abort(self) -> None:
        """Delete what was written so far. To be called by one rank if any has failed; no effect after `commit`."""
        if self.staging.exists():
            # The error that caused the abort is the one to report; a later save will delete what is left.
            with contextlib.suppress(OSError):
                _remove_tree(self.staging)


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces that are worth a call: small chunks joined, large ones cut."""
    joined = bytearray()
    for chunk in chunks:
        if len(joined) + len(chunk) > WORTH_A_THREAD:
            yield memoryview(joined)
            joined = bytearray()
            yield from (memoryview(chunk)[start : start + CHUNK_BYTES] for start in range(0, len(chunk), CHUNK_BYTES))
        else:
            joined += chunk
    yield memoryview(joined)


def plain_files(folder: Path) -> list[str]:
    """The regular files in `folder`, and in folders within, that a manifest can list."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [name for path in paths if is_file_name(name := path.relative_to(folder).as_posix())]


def cover_changes(folder: Path) -> list[str]:
    """Bring the manifest of a state up to date with files that others have written since. To be called by one rank.

    Returns:
        The names of the files that were added, changed or deleted.
    """
    manifest, path = read_manifest(folder), folder / MANIFEST_NAME
    listed = {entry.name: entry for entry in manifest.files}
    written = _last_change(path)
    state = StagedFolder(folder, folder)
    entries = {
        name: listed[name] if name in listed and _last_change(folder / name) < written else state._read_back(name)
        for name in plain_files(folder)
    }
    changed = [name for name in (*entries, *(listed.keys() - entries)) if entries.get(name) != listed.get(name)]
    if changed:
        files = tuple(entries[name] for name in sorted(entries))
        write_whole(path, [dump_manifest(dataclasses.replace(manifest, files=files))])
    return changed


def _last_change(path: Path) -> int:
    """The time in nanoseconds. That of its inode is set by the system, also for a copy that keeps an older date."""
    facts = path.stat()
    return max(facts.st_mtime_ns, facts.st_ctime_ns)


def begin(final: str | os.PathLike[str], *, keeps_files: bool = False) -> StagedFolder:
    """A new, empty, unpublished folder, which will be called `final`. To be called by one rank.

    Creates missing parents, and cleans up after dead processes in the same parent: for this host at once, for other
    hosts when nothing has changed for an hour. With `keeps_files`, `final` may hold other files,
    and `StagedFolder.add_files` makes them a part of the state.

    Raises:
        CheckpointError: if `final` exists and is neither a training state nor an empty folder, or if the disk fails.
    """
    final = resolved(final)
    with explained(final):
        if final.exists() and not (keeps_files or is_replaceable(final)):
            raise CheckpointError(
                f"{final} already exists and is not a training state. Choose another name, or delete it yourself."
            )
        make_folders(final.parent)
        staging = hidden_sibling(final, "partial")
        disk.create_folder(staging)
        _sweep_beside(staging)
    return StagedFolder(staging, final)


def is_replaceable(final: Path) -> bool:
    """Whether `final` is a state or an empty folder, which a new state may replace."""
    return final.is_dir() and ((final / MANIFEST_NAME).is_file() or not any(final.iterdir()))


def remove_state(folder: Path) -> None:
    """Delete a state folder. A process that dies meanwhile leaves the complete state, or nothing that looks like one.

    Raises:
        CheckpointError: if the disk fails.
    """
    with explained(folder, "deleting it"):
        hidden = HiddenName.parse(folder.name)
        partial = hidden_sibling(folder.with_name(hidden.final) if hidden else folder, "partial")
        disk.move(folder, partial)
        # Otherwise a power cut could restore the name, but not the deleted files.
        disk.flush_folder(folder.parent)
        _remove_tree(partial)


def write_whole(path: Path, contents: Iterable[bytes | memoryview]) -> None:
    """Write or replace a file atomically, and create missing folders. For one rank.

    Raises:
        CheckpointError: if the disk fails; an earlier file is unchanged.
    """
    with explained(path), replacing(path.resolve()) as file:
        for data in contents:
            disk.write(file, data)


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
            _sweep_beside(partial)
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


def _sweep_beside(own: Path) -> None:
    """Clean up after dead processes next to `own`, a new file or folder of this one.

    Unfinished files and folders are deleted, half-replaced states restored.
    """
    # The file system may be on another host, so its own clock says how old the files of dead processes are.
    parent, now = own.parent, own.stat().st_mtime
    for name in sorted(os.listdir(parent)):
        hidden = HiddenName.parse(name)
        if hidden is None or name == own.name:
            continue
        path = parent / name
        with contextlib.suppress(OSError):  # it may belong to another user, or another process may sweep too
            if not _is_abandoned(path, hidden, now=now):
                continue
            if hidden.kind == "replaced" and not (parent / hidden.final).exists():
                disk.move(path, parent / hidden.final)
            else:
                _remove_tree(path)


@contextlib.contextmanager
def explained(final: Path, doing: str = "") -> Iterator[None]:
    """Turn an error of the operating system into a `CheckpointError`, which tells what we were `doing`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Saving {final} failed{' while ' if doing else ''}{doing}: {error}. Earlier saves are unchanged. Check "
            "free space, quota and permissions of the disk, then save again."
        ) from error


def _remove_tree(path: Path) -> None:
    for each in [*sorted(path.rglob("*"), reverse=True), path]:
        disk.remove(each)


def _is_abandoned(path: Path, hidden: HiddenName, *, now: float) -> bool:
    if hidden.host == this_host() and os.name == "posix":
        if hidden.pid == os.getpid():
            return not hidden.is_of_this_process  # in a container, each process may have the pid of the one before
        try:
            os.kill(hidden.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it runs, but belongs to another user
        return False
    children = path.iterdir() if path.is_dir() else ()
    last_change: float = max(one.lstat().st_mtime for one in (path, *children))
    return now - last_change > _STALE_AFTER_SECONDS
