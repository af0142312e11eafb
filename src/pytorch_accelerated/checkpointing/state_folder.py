"""Nested state to a folder and back: what `codec`, `tensor_file`, `publish` and `verify` do together."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pytorch_accelerated.checkpointing.codec import Encoded, decode, encode
from pytorch_accelerated.checkpointing.layout import FileEntry, Manifest
from pytorch_accelerated.checkpointing.publish import StagedFolder, begin
from pytorch_accelerated.checkpointing.strict_json import MAX_SIZE_BYTES, dump_json, load_json
from pytorch_accelerated.checkpointing.tensor_file import chunks, read_tensors
from pytorch_accelerated.checkpointing.verify import open_verified, read_manifest
from pytorch_accelerated.errors import InvalidCheckpointError


def write_state(final: str | os.PathLike[str], facts: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Write a state folder from one process. It appears whole or not at all; a state of that name is replaced.

    Args:
        final: the folder to write.
        facts: plain values that `verify.read_manifest` finds without reading the parts.
        parts: nested state by name, as `codec.encode` takes it; each becomes ``<name>.json`` and
            ``<name>.safetensors``.

    Raises:
        CheckpointError: names every value that cannot be stored, before any file is made; or says what the disk
            refused. What was saved before is still there.
    """
    write_encoded(final, facts, encode_parts(parts))


def encode_parts(parts: Mapping[str, Any]) -> dict[str, Encoded]:
    """Nested state by name, ready to be written; its tensors are the live ones.

    Raises:
        CheckpointError: names every value that cannot be stored.
    """
    return {name: encode(value, path=name) for name, value in parts.items()}


def write_encoded(final: str | os.PathLike[str], facts: dict[str, Any], encoded: Mapping[str, Encoded]) -> None:
    """`write_state` for parts that `encode_parts` has encoded."""
    staged = begin(final)
    try:
        files = [entry for name, part in encoded.items() for entry in write_part(staged, name, part)]
        staged.commit(facts, files)
    except BaseException:
        staged.abort()
        raise


def write_part(staged: StagedFolder, name: str, part: Encoded) -> list[FileEntry]:
    """Write the two files of one part into a folder in the making; the entries are for `StagedFolder.commit`.

    Tensors on other devices are copied to the host one at a time.
    """
    return [
        staged.write_file(f"{name}.json", [dump_json(part.structure, what=f"The state of {name}")]),
        staged.write_file(f"{name}.safetensors", chunks(part.tensors)),
    ]


def read_state(
    folder: str | os.PathLike[str], parts: Collection[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The facts and the parts of a state folder. Everything returned is as it was written, to the bit.

    Args:
        folder: a state folder, as `verify.find_state` returns it.
        parts: the names of those to read; the files of others are not looked at. Left out: all.

    Returns:
        The facts, and the parts by name, with their tensors on the CPU.

    Raises:
        InvalidCheckpointError: names a file that is missing or differs from what was written, or a part that the
            state does not have.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    names = part_names(manifest)
    unknown = [name for name in parts or () if name not in names]
    if unknown:
        raise InvalidCheckpointError(
            f"The training state {folder} has no part {', '.join(unknown)}; it has {', '.join(names)}."
        )
    entries = {entry.name: entry for entry in manifest.files}
    encoded = {
        name: Encoded(
            _read_structure(folder, entries[f"{name}.json"]), _read_tensors(folder, entries[f"{name}.safetensors"])
        )
        for name in (names if parts is None else parts)
    }
    return manifest.facts, {name: decode(part.structure, part.tensors, path=name) for name, part in encoded.items()}


def part_names(manifest: Manifest) -> list[str]:
    """The names of the parts that `write_part` wrote."""
    files = {entry.name for entry in manifest.files}
    stems = [name.removesuffix(".json") for name in sorted(files) if name.endswith(".json")]
    return [stem for stem in stems if f"{stem}.safetensors" in files]


def _read_structure(folder: Path, entry: FileEntry) -> Any:
    if entry.size_bytes > MAX_SIZE_BYTES:
        raise InvalidCheckpointError(f"{folder / entry.name} has {entry.size_bytes} bytes, too many for its kind.")
    data = bytearray(entry.size_bytes)
    with open_verified(folder, entry) as read_into:
        read_into(memoryview(data))
    return load_json(bytes(data), what=str(folder / entry.name))


def _read_tensors(folder: Path, entry: FileEntry) -> dict[str, Any]:
    with open_verified(folder, entry) as read_into:
        return read_tensors(read_into, entry.size_bytes, what=str(folder / entry.name))
