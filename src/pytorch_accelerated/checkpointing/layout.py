"""The layout of a state folder: file names and the manifest. Nothing here touches the disk.

A folder holds ``<part>.json`` and ``<part>.safetensors`` for each part, and ``manifest.json``, which lists the other
files with size and SHA-256 and ends with a checksum of itself. While a folder is being written or deleted, it has a
hidden name beside its final one, which identifies the process at work.
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
from typing import Any, Literal

from pytorch_accelerated.checkpointing.codec import decode, encode
from pytorch_accelerated.checkpointing.strict_json import dump_json, load_json
from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError

FORMAT = 1
PREDICTIONS_FORMAT = "predictions_format"  # a fact of folders that hold predictions instead of a run
MANIFEST_NAME = "manifest.json"
SHARDS_NAME = "shards.json"  # lists the sharded tensors
SHARDS_FILE = re.compile(r"shards_\d+\.safetensors")  # holds one rank's pieces of them
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_file_name(name: Any) -> str:
    """`name`, if a training state may hold a file of that name; otherwise a `CheckpointError`."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
        raise CheckpointError(
            f"{name!r} cannot be the name of a file in a training state. Use up to 100 letters, digits, '_', '-' and "
            f"'.', not starting with '.' or '-', and not {MANIFEST_NAME!r}."
        )
    return name


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
        CheckpointError: if the facts hold a tensor, or anything else that cannot be stored.
    """
    facts = encode(manifest.facts, path="facts")
    if facts.tensors:
        raise CheckpointError(
            f"The facts of a training state hold a tensor at {', '.join(facts.tensors)}. Facts are read without the "
            "tensor files: give plain numbers, or put it into one of the parts."
        )
    return _with_checksum(
        {
            "format": FORMAT,
            "serial": manifest.serial,
            "facts": facts.structure,
            "files": [asdict(entry) for entry in manifest.files],
        }
    )


def parse_manifest(data: bytes, *, what: str) -> Manifest:
    """The inverse of `dump_manifest`. Any changed byte is detected.

    Raises:
        InvalidCheckpointError: if the manifest is damaged, or in a format that this version does not know.
    """
    content = load_json(data, what=what)
    written: Any = content.pop("format", None) if isinstance(content, dict) else None
    if _is_size(written) and written != FORMAT:
        reads, advice = "up to", "Update the package"
        if written < FORMAT:
            reads, advice = "format", "Install the version that wrote it"
        raise InvalidCheckpointError(
            f"{what} has format {written}; this version of pytorch-accelerated reads {reads} {FORMAT}. "
            f"{advice} to read this state."
        )
    try:
        content.pop("sha256")
        if type(written) is not int or written != FORMAT or _with_checksum({"format": written, **content}) != data:
            raise ValueError("its checksum does not match its content")
        files = tuple(FileEntry(**entry) for entry in content["files"])
        for entry in files:
            if check_file_name(entry.name) and not (_is_size(entry.size_bytes) and _SHA256.fullmatch(entry.sha256)):
                raise ValueError(f"it lists {entry}")
        if len({entry.name for entry in files}) != len(files) or not _is_size(content["serial"]):
            raise ValueError("it lists a file twice, or has no serial number")
        facts = decode(content["facts"], {}, path="facts")
        if not isinstance(facts, dict):
            raise TypeError(f"facts are a {type(facts).__name__}")
        return Manifest(content["serial"], facts, files)
    except (AttributeError, CheckpointError, LookupError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(f"{what} is damaged ({type(error).__name__}: {error}).") from error


def _with_checksum(content: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(dump_json(content, what="The manifest")).hexdigest()
    return dump_json({**content, "sha256": digest}, what="The manifest", indent=1)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


@dataclass(frozen=True)
class HiddenName:
    """The temporary name of a folder or file that is being written, replaced or deleted.

    Attributes:
        final: the name that it will have, or had.
        kind: ``partial`` is being written or deleted and is never read. ``replaced`` is a complete state whose
            successor is taking its name; while no state has that name, it is still the valid one.
        host, pid: of the process at work; the host includes its process namespace.
        process: distinguishes processes that had the same pid one after the other.
        nonce: makes the name unique.
    """

    final: str
    kind: Literal["partial", "replaced"]
    host: str
    pid: int
    process: str
    nonce: str

    _PATTERN = re.compile(r"\.(.+)\.([0-9a-f]{8})-([0-9]{1,9})-([0-9a-f]{8})-([0-9a-f]{8})\.(partial|replaced)", re.S)

    @classmethod
    def new(cls, final: str, kind: Literal["partial", "replaced"]) -> HiddenName:
        """An unused name for this process."""
        return cls(final, kind, _this_host(), os.getpid(), _process_token(os.getpid()), secrets.token_hex(4))

    @classmethod
    def parse(cls, name: str) -> HiddenName | None:
        """The parts of `name`, or None if it is not a hidden name."""
        match = cls._PATTERN.fullmatch(name)
        if match is None:
            return None
        final, host, pid, process, nonce, kind = match.groups()
        return cls(final, "partial" if kind == "partial" else "replaced", host, int(pid), process, nonce)

    def __str__(self) -> str:
        return f".{self.final}.{self.host}-{self.pid}-{self.process}-{self.nonce}.{self.kind}"

    @property
    def is_on_this_host(self) -> bool:
        """Whether `pid` means something here."""
        return self.host == _this_host()

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process is at work on it."""
        return self.is_on_this_host and (self.pid, self.process) == (os.getpid(), _process_token(os.getpid()))


@functools.cache
def _this_host() -> str:
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


def hidden_sibling(final: Path, kind: Literal["partial", "replaced"]) -> Path:
    """A new hidden path beside `final`."""
    return final.with_name(str(HiddenName.new(final.name, kind)))
