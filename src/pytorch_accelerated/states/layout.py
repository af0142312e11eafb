"""The layout of a state folder: file names and the manifest. Nothing here touches the disk.

A folder holds ``<part>.json`` and ``<part>.safetensors`` for each part, and ``manifest.json``, which lists the other
files with size and SHA-256 and ends with a checksum of itself. While a folder is being written or deleted, it has a
hidden name next to its final one, which identifies the process at work.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.states.codec import decode, dump_json, encode, load_json

FORMAT = 1
PREDICTIONS_FORMAT = "predictions_format"  # a fact of folders that hold predictions instead of a run
PARTS = "parts"  # a fact of folders to which others than the run have added files: the names of its parts
MANIFEST_NAME = "manifest.json"
STATE_NAME = re.compile(r"epoch_\d+|step_\d+|final")  # names that `SaveTrainingStateCallback` gives to states
SHARDS_NAME = "shards.json"  # lists the sharded tensors
SHARDS_FILE = re.compile(r"shards_\d+\.safetensors")  # holds one rank's pieces of them
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
# The last number makes it unique.
_HIDDEN_NAME = re.compile(r"\.(.+)\.([0-9a-f]{8})-([0-9]{1,9})-([0-9a-f]{8})-[0-9a-f]{8}\.(partial|replaced)", re.S)


def is_file_name(name: Any) -> bool:
    """Whether a manifest may list a file of that name; one in a folder within has a name with slashes."""
    steps = name.split("/") if isinstance(name, str) else [""]
    return all(map(_FILE_NAME.fullmatch, steps)) and name != MANIFEST_NAME


@dataclass(frozen=True)
class FileEntry:
    """A file in the manifest's list."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a complete training state.

    Attributes:
        serial: how many states were saved before it in its parent folder. The newest state has the highest one:
            clocks jump, and the number of updates decreases when a run is resumed from an older state.
        facts: values that can be read without the parts.
        files: every file of the state, except the manifest.
    """

    serial: int
    facts: dict[str, Any]
    files: tuple[FileEntry, ...]


def dump_manifest(manifest: Manifest) -> bytes:
    """The content of the file `MANIFEST_NAME`.

    Raises:
        CheckpointError: if the facts hold anything that cannot be stored.
    """
    facts = encode(manifest.facts, path="facts").structure
    files = [asdict(entry) for entry in manifest.files]
    return _with_checksum({"format": FORMAT, "serial": manifest.serial, "facts": facts, "files": files})


def parse_manifest(data: bytes, *, what: str) -> Manifest:
    """The inverse of `dump_manifest`. Any changed byte is detected.

    Raises:
        InvalidCheckpointError: if the manifest is damaged, or in a format that this version does not know.
    """
    content = load_json(data, what=what)
    written = content.get("format") if isinstance(content, dict) else None
    if isinstance(written, int) and written != FORMAT:
        raise InvalidCheckpointError(
            f"{what} has format {written}; this version reads format {FORMAT}. Install the version that wrote it."
        )
    try:
        del content["sha256"]
        if _with_checksum(content) != data:
            raise ValueError("its checksum does not match its content")
        files = tuple(FileEntry(**entry) for entry in content["files"])
        return Manifest(content["serial"], decode(content["facts"], {}, path="facts"), files)
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(f"{what} is damaged ({type(error).__name__}: {error}).") from error


def identity_of(manifest: Manifest) -> str:
    """A name for the content of a state, which no other state has: its serial number and a digest."""
    return f"{manifest.serial}-{hashlib.sha256(dump_manifest(manifest)).hexdigest()[:16]}"


def _with_checksum(content: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(dump_json(content)).hexdigest()
    return dump_json({**content, "sha256": digest}, indent=1)


class HiddenName(NamedTuple):
    """The parts of the temporary name of a folder or file that is being written, replaced or deleted.

    Attributes:
        final: the name that it will have, or had.
        host, pid: the process at work; the host includes its process namespace.
        process: distinguishes processes that had the same pid one after the other.
        kind: ``partial`` is being written or deleted and is never read. ``replaced`` is a complete state whose
            successor is taking its name; while no state has that name, it is still the valid one.
    """

    final: str
    host: str
    pid: int
    process: str
    kind: str

    @classmethod
    def parse(cls, name: str) -> HiddenName | None:
        """The parts of `name`, or None if it is not a hidden name."""
        match = _HIDDEN_NAME.fullmatch(name)
        return cls(match[1], match[2], int(match[3]), match[4], match[5]) if match else None

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process is at work on it."""
        return (self.host, self.pid, self.process) == (this_host(), os.getpid(), _process_token(os.getpid()))


def hidden_sibling(final: Path, kind: Literal["partial", "replaced"]) -> Path:
    """A new hidden path of this process next to `final`."""
    pid = os.getpid()
    own = f"{this_host()}-{pid}-{_process_token(pid)}-{secrets.token_hex(4)}"
    return final.with_name(f".{final.name}.{own}.{kind}")


@functools.cache
def this_host() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # containers may share the host's name, but not its pids
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


_tokens: dict[int, str] = {}


def _process_token(pid: int) -> str:
    # Keyed by pid, so that a forked child gets its own. In a container every run may have the same pid. Two threads may
    # ask at the same time, and must get the same: one of them would clean up after the other.
    return _tokens.get(pid) or _tokens.setdefault(pid, secrets.token_hex(4))
