"""Training states in object storage, or anywhere else that fsspec reaches by a URL.

A state is committed to a local folder first, as all states are. While the run continues, one thread copies it to the
URL, with its manifest last: without one, a state is incomplete and never read. No state is overwritten there: a second
``final`` becomes ``final.<serial>``, and then the first is deleted. Deleting begins with the manifest.

To resume, the newest complete state is copied to the local folder, where everything else reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pytorch_accelerated.errors import (
    CheckpointError,
    ConfigurationError,
    InvalidCheckpointError,
    MissingCheckpointError,
)
from pytorch_accelerated.facts import require
from pytorch_accelerated.ranks import Ranks
from pytorch_accelerated.states import Retention, disk, judged_states, layout, publish
from pytorch_accelerated.states.layout import MANIFEST_NAME, STATE_NAME, Manifest, dump_manifest, parse_manifest
from pytorch_accelerated.states.verify import list_named_states, list_states, verify

Result = TypeVar("Result")

# How long a request to the storage is repeated, and may go without moving a byte.
TIMEOUT_SECONDS = 120.0
FIRST_WAIT_SECONDS = 0.5  # before a request is repeated; the next ones double
# Waiting does not heal these.
_LASTING = (FileNotFoundError, PermissionError, NotImplementedError, TypeError, ValueError)
# They have no folders; asked to make one, they may make a bucket.
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"}
_REMOTE_NAME = re.compile(rf"(?P<name>{STATE_NAME.pattern})(\.\d+)?")
_OWNER = "owner.txt"  # at the URL: which run has saved there last


def default_local_folder(url: str) -> Path:
    """The folder on this machine for the states of a URL: the same for each process of the user."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    url = url.rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9]+", "_", url)[-60:]
    return cache / "pytorch_accelerated" / "states" / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


class Store:
    """The folder behind a URL. Its methods repeat requests that fail, and all names are relative to it.

    Args:
        url: of the folder.
        timeout: seconds for which a request is repeated, and may go without moving a byte.

    Raises:
        ConfigurationError: if fsspec knows no such URL, or needs a package for it that is not installed.
        MissingDependencyError: if fsspec is not installed.
    """

    def __init__(self, url: str, timeout: float = TIMEOUT_SECONDS) -> None:
        fsspec = require("fsspec", needed_by=f"The folder {url}")
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._make_callback = fsspec.callbacks.Callback
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"fsspec cannot reach {url}: {error}.") from error
        self._root = root.rstrip("/")
        self._needs_folders = url.partition("://")[0] not in _WITHOUT_FOLDERS

    def states(self) -> dict[str, set[str]]:
        """The files of the folders that hold any, by name. The name of the URL's own folder is empty."""
        self._files.invalidate_cache()
        states: dict[str, set[str]] = {}
        try:
            paths = self._done("listing", "it", lambda *_: list(self._files.find(self._root)))
        except InvalidCheckpointError as error:  # a folder would be an empty one
            raise MissingCheckpointError(f"{error} Make the bucket, or check its name and the endpoint.") from error
        for path in paths:
            folder, _, file = path.removeprefix(f"{self._root}/").rpartition("/")
            states.setdefault(folder, set()).add(file)
        return states

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return self._done("reading", name, lambda there, _: bytes(self._files.cat_file(there)))

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        self._done("writing", name, lambda there, _: self._files.pipe_file(there, data))

    def get(self, name: str, path: Path) -> None:
        """Copy a file to `path`."""
        self._done("reading", name, lambda there, moved: self._files.get_file(there, str(path), callback=moved))

    def put(self, path: Path, name: str) -> None:
        """Copy the file at `path` here."""
        self._done("writing", name, lambda there, moved: self._files.put_file(str(path), there, callback=moved))

    def delete(self, name: str) -> None:
        """Delete a file, or all of a folder, if it is there."""
        self._files.invalidate_cache()
        with contextlib.suppress(InvalidCheckpointError):
            self._done("deleting", name, lambda there, _: self._files.rm(there, recursive=True))

    def _done(self, doing: str, name: str, work: Callable[[str, Any], Result]) -> Result:
        """The result of `work`, which is given the full name, and a callback of fsspec to report progress to.

        Raises:
            InvalidCheckpointError: if a file is missing.
            CheckpointError: if it failed in another way, each time it was tried.
        """
        there = f"{self._root}/{name.lstrip('/')}"

        def in_folder(moved: Any) -> Result:
            if doing == "writing" and self._needs_folders:
                self._files.makedirs(there.rpartition("/")[0], exist_ok=True)
            return work(there, moved)

        deadline, pause = time.monotonic() + self._timeout, FIRST_WAIT_SECONDS
        while True:
            try:
                return self._unless_stalled(in_folder)
            except Exception as error:  # each kind of storage has its own
                if isinstance(error, _LASTING) or time.monotonic() + pause > deadline:
                    kind = InvalidCheckpointError if isinstance(error, FileNotFoundError) else CheckpointError
                    raise kind(f"{self.url}: {doing} {name} failed ({type(error).__name__}: {error}).") from error
            time.sleep(pause)
            pause *= 2

    def _unless_stalled(self, work: Callable[[Any], Result]) -> Result:
        outcome: Future[Result] = Future()
        moved = [time.monotonic()]

        def run() -> None:
            try:
                outcome.set_result(work(callback))
            except BaseException as error:
                outcome.set_exception(error)

        callback = self._make_callback(hooks={"moved": lambda *_, **__: moved.append(time.monotonic())})
        threading.Thread(target=run, daemon=True).start()  # a pool would be waited for when the process ends
        while not wait([outcome], moved[-1] + self._timeout - time.monotonic()).done:
            if time.monotonic() > moved[-1] + self._timeout:
                raise TimeoutError(f"no byte has moved for {self._timeout:g} seconds, the `storage_timeout`")
        return outcome.result()


# ------------------------------------------------------------------------------------------------------------ uploading


class Uploads:
    """Copies the training states of a local folder to a URL, in one thread, while the run continues.

    The states get there in the order in which they were saved, but one that `retention` would delete at once is left
    out. A local state is deleted when it is there, except the newest. Only one rank calls `connect`; on the others,
    nothing is done.

    Args:
        store: where to.
        folder: the local folder.
        retention: which states to keep there.
        metric_name: by whose values `retention` ranks them, if it does.

    Attributes:
        folder: the local folder, without links.
        earlier: the names of the states that were there before this run, oldest first.
    """

    def __init__(self, store: Store, folder: Path, retention: Retention, metric_name: str | None) -> None:
        self.folder = disk.resolved(folder)
        self.earlier: list[str] = []
        self._store = store
        self._owner = f"Process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S.%f}"
        self._retention = retention
        self._metric_name = metric_name
        self._thread: ThreadPoolExecutor | None = None
        self._round: Future[None] | None = None
        self._known: dict[Path, Manifest] = {}  # the states that are complete there, by name

    def connect(self) -> None:
        """Look at what is there, and delete what a killed run left incomplete.

        Raises:
            CheckpointError: if the storage cannot be reached, or written to.
        """
        states = self._store.states()
        self._store.write(_OWNER, self._owner.encode())
        for name in filter(_REMOTE_NAME.fullmatch, states):
            if MANIFEST_NAME not in states[name]:
                self._store.delete(name)
                continue
            with contextlib.suppress(InvalidCheckpointError):  # resuming names it
                manifest = self._store.read(f"{name}/{MANIFEST_NAME}")
                self._known[Path(name)] = parse_manifest(manifest, what=f"The manifest of {name}")
        self.earlier = [folder.name for folder, _ in self._complete()]
        serials = (manifest.serial for manifest in self._known.values())
        publish.highest_serials[self.folder] = max(serials, default=0)
        self._thread = ThreadPoolExecutor(1, "uploads")

    def start(self) -> None:
        """Begin to upload what is new. Failures are warnings, and the next call tries again."""
        if self._thread is not None and (self._round is None or self._round.running() or self._round.done()):
            self._round = self._thread.submit(self._upload_all, warns=True)

    def finish(self) -> None:
        """Upload what is not there yet, and end the thread.

        Raises:
            CheckpointError: if not all states are there; says where they are.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with thread:
            last = thread.submit(self._upload_all)
        last.result()

    def _upload_all(self, *, warns: bool = False) -> None:
        try:
            while pending := self._pending():
                self._upload(*pending[0])
                self._delete_outdated()
        except (CheckpointError, OSError) as error:
            message = (
                f"A training state could not be uploaded. {error} Nothing is lost: it is in {self.folder}, and "
                f"resuming from {self._store.url} on this machine finds it."
            )
            if not warns:
                raise CheckpointError(message) from error
            warnings.warn(f"{message} The next save tries again.", stacklevel=2)

    def _pending(self) -> list[tuple[Path, Manifest]]:
        """The local states to upload, oldest first. Those that would be deleted there at once are deleted here."""
        uploaded = publish.highest_serials[self.folder]
        pending = [state for state in list_named_states(self.folder) if state[1].serial > uploaded]
        outdated = self._outdated([*self._complete(), *pending])
        for folder, _ in pending:
            if folder in outdated:
                publish.remove_state(folder)
        return [state for state in pending if state[0] not in outdated]

    def _complete(self) -> list[tuple[Path, Manifest]]:
        """The states that are complete there, oldest first."""
        return sorted(self._known.items(), key=lambda state: state[1].serial)

    def _outdated(self, states: list[tuple[Path, Manifest]]) -> list[Path]:
        return self._retention.states_to_delete(judged_states(states, metric_name=self._metric_name))

    def _upload(self, folder: Path, manifest: Manifest) -> None:
        name = f"{folder.name}.{manifest.serial}" if Path(folder.name) in self._known else folder.name
        try:
            self._check_owner()
            for entry in manifest.files:
                self._store.put(folder / entry.name, f"{name}/{entry.name}")
        except (CheckpointError, OSError):
            if (folder, manifest) in list_named_states(self.folder):
                raise
        if (folder, manifest) not in list_named_states(self.folder):
            return  # the run has replaced it by a newer state meanwhile
        self._check_owner()
        self._store.write(f"{name}/{MANIFEST_NAME}", dump_manifest(manifest))
        self._known[Path(name)] = manifest
        publish.highest_serials[self.folder] = manifest.serial
        for local, each in list_named_states(self.folder)[:-1]:
            if each in self._known.values():
                publish.remove_state(local)

    def _check_owner(self) -> None:
        """Notice another run that saves to the URL. Two would replace and delete each other's states."""
        with contextlib.suppress(InvalidCheckpointError):  # somebody has emptied the folder
            owner = self._store.read(_OWNER).decode()
            if owner == self._owner:
                return
            raise CheckpointError(
                f"Another run saves to {self._store.url}, too: {owner}. End one of them; this one uploads nothing more."
            )
        self._store.write(_OWNER, self._owner.encode())

    def _delete_outdated(self) -> None:
        """Delete states there: those that no rule keeps, and those whose name a newer one has."""
        states = self._complete()
        newest = states[-1][0]
        replaced = [folder for folder, _ in states if _local_name(folder.name) == _local_name(newest.name)]
        for folder in {*replaced, *self._outdated(states)} - {newest}:
            try:
                self._store.delete(f"{folder.name}/{MANIFEST_NAME}")
                self._store.delete(folder.name)
                del self._known[folder]
            except CheckpointError as error:
                warnings.warn(f"A training state that is no longer needed cannot be deleted. {error}", stacklevel=2)


def _local_name(name: str) -> str:
    """The name of the local folder for a state, from its name there."""
    return re.sub(r"\.\d+$", "", name)


# ------------------------------------------------------------------------------------------------------------- resuming


@dataclass(frozen=True)
class _Found:
    """A state to resume from: its manifest, its local name, and its name at the URL, or None if it is not there."""

    manifest: Manifest
    name: str
    source: str | None


def fetch_state(store: Store, folder: Path, ranks: Ranks, check: Callable[[Path], Any]) -> Path | None:
    """The newest valid state in `store` or in `folder`, which has it in the end. Must be called by all ranks.

    One rank of each machine copies it there, unless it is there already; a local state counts if all machines have it.
    If newer or incomplete states had to be skipped, one warning says which and why.

    Args:
        store: of one state, or of a folder of states.
        folder: the local folder.
        ranks: the processes.
        check: called on the first rank with a local state; raises an `InvalidCheckpointError` if that is damaged.

    Returns:
        The local folder of the state, on this rank's machine; None if there is none.

    Raises:
        MissingCheckpointError: if there is none, and its URL ends with the name of a state.
        InvalidCheckpointError: if there are states, but no valid one.
        CheckpointError: if the storage cannot be reached.
    """
    found, complaints, incomplete = ranks.do_on_first(lambda: _find(store, folder))
    for one in found:
        try:
            _obtain_everywhere(store, one, folder / one.name, ranks, check)
        except InvalidCheckpointError as error:
            complaints.append(str(error))
            continue
        skipped = [*complaints, *incomplete]
        if skipped and ranks.is_first:
            warnings.warn(f"Resuming from {one.name} of {store.url}; skipped:\n" + "\n".join(skipped), stacklevel=2)
        return folder / one.name
    if complaints:
        raise InvalidCheckpointError(f"{store.url} holds training states, but no valid one:\n" + "\n".join(complaints))
    if _REMOTE_NAME.fullmatch(store.url.rpartition("/")[2]):
        raise MissingCheckpointError(f"There is no training state {store.url}. Check the URL.")
    if incomplete and ranks.is_first:  # the run was ended before its first upload was
        warnings.warn("\n".join(incomplete), stacklevel=2)
    return None


def _find(store: Store, folder: Path) -> tuple[list[_Found], list[str], list[str]]:
    """The states to try, the newest first, what is wrong with others, and which were not uploaded completely."""
    found, complaints, incomplete = [], [], []
    states = store.states()
    for name in [""] if MANIFEST_NAME in states.get("", ()) else states:
        try:
            if MANIFEST_NAME in states[name] and "/" not in name:
                data = store.read(f"{name}/{MANIFEST_NAME}")
                manifest = parse_manifest(data, what=f"The manifest of {store.url}/{name}")
                found.append(_Found(manifest, _local_name(name or store.url.rpartition("/")[2]), name))
            elif _REMOTE_NAME.fullmatch(name):
                incomplete.append(f"{store.url}/{name} has no manifest: it was not uploaded completely.")
        except InvalidCheckpointError as error:
            complaints.append(str(error))
    known = [one.manifest for one in found]
    found += [_Found(manifest, path.name, None) for path, manifest in list_states(folder) if manifest not in known]
    found.sort(key=lambda one: (one.manifest.serial, one.source is not None), reverse=True)
    found = [one for one in found if layout.PREDICTIONS_FORMAT not in one.manifest.facts]
    return found, complaints, incomplete


def _obtain_everywhere(store: Store, one: _Found, target: Path, ranks: Ranks, check: Callable[[Path], Any]) -> None:
    """Have a state in `target` on each machine; an error of one is raised on all. Must be called by all ranks."""
    # The first machine goes alone, because the others may share its disk.
    ranks.do_on_first(lambda: _obtain(store, one, target, check))
    is_next = ranks.is_first_of_node and not ranks.is_first
    ranks.do_on_all(lambda: _obtain(store, one, target, verify) if is_next else None)


def _obtain(store: Store, one: _Found, target: Path, check: Callable[[Path], Any]) -> None:
    if (target, one.manifest) in list_states(target.parent):
        try:
            check(target)
            return
        except InvalidCheckpointError:
            if one.source is None:
                raise
    if one.source is None:
        raise InvalidCheckpointError(f"{target} is not at {store.url}, and not the same on all machines.")
    staged = publish.begin(target)
    try:
        for entry in one.manifest.files:
            if not layout.is_file_name(entry.name):
                raise InvalidCheckpointError(f"{store.url}/{one.source} lists {entry.name!r}, which is outside of it.")
            publish.make_folders((staged.staging / entry.name).parent)
            store.get(f"{one.source}/{entry.name}", staged.staging / entry.name)
        if differing := set(one.manifest.files).symmetric_difference(staged.add_files()):
            names = ", ".join(sorted({entry.name for entry in differing}))
            raise InvalidCheckpointError(f"{store.url}/{one.source} is damaged: {names} differ from its manifest.")
        staged.publish(one.manifest)
    finally:
        staged.abort()  # has no effect once it is published
