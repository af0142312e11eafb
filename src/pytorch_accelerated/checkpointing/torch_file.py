"""Reads files of ``torch.save``: a pickle and the data of its tensors, in an archive or (before torch 1.6) in a row.

Everything is loaded to the CPU. Memory is limited to the data of the tensors, which is not larger than the file, and a
small multiple of the rest.
"""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from collections.abc import Mapping
from io import FileIO
from typing import Any

import torch

from pytorch_accelerated.checkpointing.archive import Archive, is_archive
from pytorch_accelerated.checkpointing.pickled import read_pickle
from pytorch_accelerated.checkpointing.pickled_values import Maker, Storage, dtype_of_storage
from pytorch_accelerated.errors import InvalidCheckpointError

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001


def read_saved(file: FileIO, makers: Mapping[str, Maker] | None = None) -> Any:
    """The value in a file that is open for reading, unbuffered. For `makers` see `read_pickle`.

    Raises:
        InvalidCheckpointError: if the file is damaged, or holds more than plain values and tensors.
    """
    if is_archive(file):
        return _read_archive(file, makers)
    file.seek(0)
    reader: io.BufferedReader[Any] = io.BufferedReader(file)
    try:
        return _Row(reader, os.fstat(file.fileno()).st_size).read(makers)
    finally:
        reader.detach()  # otherwise it would close the file


def _read_archive(file: FileIO, makers: Mapping[str, Maker] | None) -> Any:
    archive = Archive(file)
    storages: dict[str, Storage] = {}

    def find_storage(identification: tuple[Any, ...]) -> Storage:
        dtype, key, size_bytes = _identified(*identification)
        if key not in storages:
            name = f"data/{key}"
            if archive.size_of(name) != size_bytes:
                raise InvalidCheckpointError(f"its record {name!r} does not have the size that its tensors need")
            octets = torch.empty(size_bytes, dtype=torch.uint8)
            archive.read_into(name, octets.numpy().data)
            storages[key] = Storage(octets, dtype)
        octets = storages[key].octets
        if octets.numel() != size_bytes:
            raise InvalidCheckpointError(f"its data {key!r} has two sizes")
        return Storage(octets, dtype)

    if archive.has("byteorder") and archive.read("byteorder") != sys.byteorder.encode():
        raise InvalidCheckpointError("it was written on a machine with another order of bytes")
    program = archive.read("data.pkl")
    contents = read_pickle(io.BytesIO(program), len(program), find_storage, makers)
    archive.check_unread()
    return contents


class _Row:
    """The old format: pickles in a row, then for each tensor the number of its elements and their data."""

    def __init__(self, reader: io.BufferedReader[Any], size_bytes: int) -> None:
        self._reader = reader
        self._size_bytes = size_bytes
        self._storages: dict[str, Storage] = {}

    def read(self, makers: Mapping[str, Maker] | None) -> Any:
        """The third value before the data; the others identify the format."""
        if (self._value(), self._value()) != (_MAGIC_NUMBER, _PROTOCOL):
            raise InvalidCheckpointError("torch.save did not write it")
        machine = self._value()
        if not isinstance(machine, dict) or machine.get("little_endian") is not (sys.byteorder == "little"):
            raise InvalidCheckpointError("it was written on a machine with another order of bytes")
        contents, keys = self._value(makers), self._value()
        if not isinstance(keys, list) or Counter(map(str, keys)) != Counter(list(self._storages)):
            raise InvalidCheckpointError("its data does not belong to its tensors")
        for key in map(str, keys):
            self._fill(key)
        if self._left:
            raise InvalidCheckpointError("it has bytes after its end")
        return contents

    @property
    def _left(self) -> int:
        return self._size_bytes - self._reader.tell()

    def _value(self, makers: Mapping[str, Maker] | None = None) -> Any:
        return read_pickle(self._reader, self._left, self._find_storage, makers)

    def _find_storage(self, identification: tuple[Any, ...]) -> Storage:
        """Reserve memory for data that follows later, no more than what is left of the file."""
        if len(identification) != 6 or identification[5] is not None:
            raise InvalidCheckpointError("its data has a layout that only very old versions of torch wrote")
        dtype, key, wanted_bytes = _identified(*identification[:5])
        if key not in self._storages:
            reserved_bytes = sum(storage.octets.numel() for storage in self._storages.values())
            if wanted_bytes + reserved_bytes > self._left:
                raise InvalidCheckpointError("it ends before the data of its tensors does")
            self._storages[key] = Storage(torch.empty(wanted_bytes, dtype=torch.uint8), dtype)
        storage = self._storages[key]
        if storage.dtype != dtype or storage.octets.numel() != wanted_bytes:
            raise InvalidCheckpointError(f"its data {key!r} has two descriptions")
        return storage

    def _fill(self, key: str) -> None:
        octets, dtype = self._storages[key]
        count = int.from_bytes(self._reader.read(8), "little")
        if count * dtype.itemsize != octets.numel():
            raise InvalidCheckpointError(f"its data {key!r} has another size than its tensors need")
        if self._reader.readinto(octets.numpy().data) != octets.numel():
            raise InvalidCheckpointError("it ended while it was read")


def _identified(*identification: Any) -> tuple[torch.dtype, str, int]:
    """Dtype, key and size in bytes of the data that a pickle identifies."""
    kind, storage, key, _, count = identification if len(identification) == 5 else (None,) * 5
    if kind != "storage" or type(key) is not str or type(count) is not int or count < 0:
        raise InvalidCheckpointError(f"it identifies data by {identification!r:.200}")
    dtype = dtype_of_storage(storage)
    return dtype, key, count * dtype.itemsize
