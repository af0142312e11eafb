"""A strict reader for the zip archives that ``torch.save`` writes: every byte must be accounted for.

Most zip readers are lenient, each in its own way: a record marked as a folder passes the checksum test of one and is
empty for the next, which leaves memory uninitialised. This reader accepts only archives whose records are stored
uncompressed, follow each other from the first byte on, and have the same description in their own headers and in the
directory. One flipped bit is therefore always noticed, and all records together are not larger than the file.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO

from pytorch_accelerated.errors import InvalidCheckpointError

_LOCAL = struct.Struct("<4s5HIIIHH")
_ENTRY = struct.Struct("<4s6HIIIHHHHHII")
_END = struct.Struct("<4s4HIIH")
_LARGE_END = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_IN_DESCRIPTOR, _UTF_8 = 0x8, 0x800  # flags: sizes follow the data; the name is UTF-8
_LARGE_FIELD, _PADDING_FIELD = 0x0001, 0x4246  # extra fields: numbers of 64 bits; torch's alignment
_UNIX, _REGULAR_FILE = 3, 0o10
_CHUNK_BYTES = 2**20


def is_archive(file: FileIO) -> bool:
    """Whether the file begins like a zip archive."""
    file.seek(0)
    return file.read(4) == b"PK\x03\x04"


@dataclass(frozen=True)
class _Entry:
    """The description of a record in the directory."""

    name: bytes
    header: tuple[int, ...]
    """Version, flags, method, time and date; the record's own header repeats them."""
    crc32: int
    size_bytes: int
    offset: int


class Archive:
    """The records of an archive, by their names inside its only folder.

    Args:
        file: open for reading, unbuffered.

    Raises:
        InvalidCheckpointError: if ``torch.save`` would not have written it like this.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.size_bytes = os.fstat(file.fileno()).st_size
        try:
            self._records = self._read_records()
        except (UnicodeDecodeError, struct.error) as error:
            raise InvalidCheckpointError(f"its directory cannot be read: {error}") from error
        self._unread = set(self._records)

    def has(self, name: str) -> bool:
        """Whether there is a record of this name."""
        return name in self._records

    def size_of(self, name: str) -> int:
        """The size of a record; an `InvalidCheckpointError` if there is none of this name."""
        return self._record(name)[1].size_bytes

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Fill `buffer`, which must be as large as the record, and compare the checksum."""
        self._read(name, (buffer[start : start + _CHUNK_BYTES] for start in range(0, len(buffer), _CHUNK_BYTES)))

    def read(self, name: str) -> bytes:
        """The content of a record."""
        content = bytearray(self.size_of(name))
        self.read_into(name, memoryview(content))
        return bytes(content)

    def check_unread(self) -> None:
        """Compare the checksums of all records that have not been read."""
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for name in sorted(self._unread):
            size_bytes = self.size_of(name)
            pieces = (buffer[: size_bytes - position] for position in range(0, size_bytes, _CHUNK_BYTES))
            self._read(name, pieces)

    def _read(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Fill `pieces`, which must together be as large as the record."""
        start, entry = self._record(name)
        self._file.seek(start)
        crc32 = 0
        for piece in pieces:
            _fill(self._file, piece)
            crc32 = zlib.crc32(piece, crc32)
        _require(crc32 == entry.crc32, f"its record {name!r} was changed")
        self._unread.discard(name)

    def _record(self, name: str) -> tuple[int, _Entry]:
        if name not in self._records:
            raise InvalidCheckpointError(f"it has no record {name!r}")
        return self._records[name]

    def _read_records(self) -> dict[str, tuple[int, _Entry]]:
        count, directory_start, directory_bytes = self._read_end()
        self._file.seek(directory_start)
        directory = bytearray(directory_bytes)
        _fill(self._file, memoryview(directory))
        records: dict[str, tuple[int, _Entry]] = {}
        folder = None
        position = 0
        for entry in _entries(bytes(directory), count):
            _require(entry.offset == position, "its records do not follow each other")
            start, position = self._read_header(entry, directory_start)
            first, _, name = entry.name.decode("utf-8").partition("/")
            folder = first if folder is None else folder
            _require(bool(first == folder and name and name not in records), f"the name {entry.name!r} is invalid")
            records[name] = start, entry
        _require(position == directory_start, "there is a gap between its records and its directory")
        return records

    def _read_end(self) -> tuple[int, int, int]:
        """The number of records, and the start and size of the directory, as the end of the file states them."""
        tail_bytes = min(self.size_bytes, _LARGE_END.size + _LOCATOR.size + _END.size)
        self._file.seek(self.size_bytes - tail_bytes)
        tail = bytearray(tail_bytes)
        _fill(self._file, memoryview(tail))
        _require(tail_bytes >= _END.size, "it is too short")
        mark, *disks, count_here, count, size, start, comment = _END.unpack(tail[-_END.size :])
        _require(mark == b"PK\x05\x06" and not any(disks) and not comment, "its end is invalid")
        end = self.size_bytes - _END.size
        numbers = [count_here, count, size, start]
        if tail[-_END.size - _LOCATOR.size :][:4] == b"PK\x06\x07":
            _, disk, offset, disks_in_all = _LOCATOR.unpack(tail[-_END.size - _LOCATOR.size : -_END.size])
            end -= _LOCATOR.size + _LARGE_END.size
            _require((disk, offset, disks_in_all) == (0, end, 1), "its end is invalid")
            mark, rest, *facts = _LARGE_END.unpack(tail[: _LARGE_END.size])
            versions, disks, large = facts[:2], facts[2:4], facts[4:]
            _require(mark == b"PK\x06\x06" and rest == _LARGE_END.size - 12 and not any(disks), "its end is invalid")
            _require(versions in ([45, 45], [0x31E, 45]), "torch did not write it")
            limits = [0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF]
            _require(
                all(few in (many, limit) for few, many, limit in zip(numbers, large, limits, strict=True)),
                "its end states two different sizes",
            )
            numbers = large
        count_here, count, size, start = numbers
        _require(count_here == count and start + size == end, "its directory is not where it should be")
        return count, start, size

    def _read_header(self, entry: _Entry, limit: int) -> tuple[int, int]:
        """Where the data of a record begins, and where the next record begins. Its own header must match `entry`."""
        self._file.seek(entry.offset)
        head = bytearray(_LOCAL.size)
        _fill(self._file, memoryview(head))
        mark, *header, crc32, stored, size, name_bytes, extra_bytes = _LOCAL.unpack(head)
        text = bytearray(name_bytes + extra_bytes)
        _fill(self._file, memoryview(text))
        same = mark == b"PK\x03\x04" and tuple(header) == entry.header and text[:name_bytes] == entry.name
        _require(same, f"its record {entry.name!r} has two descriptions")
        fields = _extra_fields(bytes(text[name_bytes:]))
        _require(set(fields.pop(_PADDING_FIELD, b"")) <= {ord("Z")}, "its padding was changed")
        large = fields.pop(_LARGE_FIELD, None)
        known = {0, entry.size_bytes, entry.offset}
        _require(not fields and set(_large_numbers(large)) <= known, f"its record {entry.name!r} has an invalid header")
        start = entry.offset + _LOCAL.size + len(text)
        end = start + entry.size_bytes
        described = [entry.crc32, entry.size_bytes, entry.size_bytes]
        if entry.header[1] & _IN_DESCRIPTOR:
            layout = struct.Struct("<4sIII" if large is None else "<4sIQQ")
            _require([crc32, stored, size] in ([0, 0, 0], described), f"its record {entry.name!r} has two sizes")
            _require(end + layout.size <= limit, f"its record {entry.name!r} is too long")
            self._file.seek(end)
            descriptor = bytearray(layout.size)
            _fill(self._file, memoryview(descriptor))
            mark, *found = layout.unpack(descriptor)
            _require(mark == b"PK\x07\x08" and found == described, f"its record {entry.name!r} has two sizes")
            return start, end + layout.size
        if large is not None:
            described[1:] = [value if value < 0xFFFFFFFF else 0xFFFFFFFF for value in described[1:]]
        _require([crc32, stored, size] == described and end <= limit, f"its record {entry.name!r} has two sizes")
        return start, end


def _entries(directory: bytes, count: int) -> Iterator[_Entry]:
    position = 0
    for _ in range(count):
        mark, made_by, *header, crc32, stored, size, name_bytes, extra_bytes, comment, disk, kind, mode, offset = (
            _ENTRY.unpack_from(directory, position)
        )
        position += _ENTRY.size
        name = directory[position : position + name_bytes]
        fields = _extra_fields(directory[position + name_bytes : position + name_bytes + extra_bytes])
        position += name_bytes + extra_bytes
        _require(mark == b"PK\x01\x02" and not (comment or disk or kind), f"its record {name!r} has an invalid entry")
        _, flags, method, *_ = header
        _require(not flags & ~(_IN_DESCRIPTOR | _UTF_8), f"its record {name!r} has unknown flags ({flags:#x})")
        _require(method == 0 and stored == size, f"its record {name!r} is compressed, which torch.save never does")
        is_plain = mode == 0 if made_by == 0 else made_by >> 8 == _UNIX and mode >> 28 in (0, _REGULAR_FILE)
        _require(is_plain and not mode & 0xFFFF, f"its record {name!r} is not a regular file")
        numbers = iter(_large_numbers(fields.pop(_LARGE_FIELD, None)))
        sizes = [next(numbers, -1) if value == 0xFFFFFFFF else value for value in (size, stored, offset)]
        _require(not fields and sizes[0] == sizes[1] >= 0 <= sizes[2], f"its record {name!r} has invalid sizes")
        _require(next(numbers, None) is None, f"its record {name!r} has too many sizes")
        yield _Entry(name, tuple(header), crc32, sizes[0], sizes[2])
    _require(position == len(directory), "its directory does not have the length that it states")


def _extra_fields(data: bytes) -> dict[int, bytes]:
    fields: dict[int, bytes] = {}
    while data:
        kind, size = struct.unpack_from("<HH", data)
        _require(len(data) >= 4 + size and kind not in fields, "it has a truncated or repeated field")
        fields[kind], data = data[4 : 4 + size], data[4 + size :]
    return fields


def _large_numbers(field: bytes | None) -> list[int]:
    data = field or b""
    return list(struct.unpack(f"<{len(data) // 8}Q", data))


def _fill(file: FileIO, buffer: memoryview) -> None:
    while buffer:
        count = file.readinto(buffer)
        _require(bool(count), "it ends too early")
        buffer = buffer[count:]


def _require(is_fine: bool, complaint: str) -> None:
    if not is_fine:
        raise InvalidCheckpointError(complaint)
