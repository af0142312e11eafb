"""JSON and safetensors as training states have them."""

import functools
import io
import json
import struct

import pytest
import safetensors.torch
import torch

from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.states.codec import DTYPE_NAMES, chunks, load_json, read_tensors
from tests.checkpointing.same_state import assert_same_state


@pytest.mark.parametrize("data", [b"", b'{"a": [1, 2', b"{} {}", b'"\xff"', b"[" * 1_000_000])
def test_damaged_json_is_refused(data):
    with pytest.raises(InvalidCheckpointError, match=r"^the file is not JSON"):
        load_json(data, what="the file")


def one_of_each_dtype() -> dict[str, torch.Tensor]:
    octets = torch.arange(48, dtype=torch.uint8)
    tensors = {name: octets.clone().view(dtype) for dtype, name in DTYPE_NAMES.items() if dtype != torch.bool}
    return {
        **tensors,
        "BOOL": torch.tensor([True, False]),
        "0-dim": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "ä 'b'": torch.ones(2, 3, 1),
    }


def written(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(bytes(chunk) for chunk in chunks(tensors))


def read(data: bytes) -> dict[str, torch.Tensor]:
    stream = io.BytesIO(data)

    def read_into(buffer: memoryview) -> None:
        assert stream.readinto(buffer) == len(buffer)

    return dict(read_tensors(read_into, len(data), what="the file"))


def file_with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("write", "load"),
    [
        (written, read),
        (written, safetensors.torch.load),
        (functools.partial(safetensors.torch.save, metadata={"format": "pt"}), read),
    ],
    ids=["by ourselves", "read by the safetensors package", "written by the safetensors package"],
)
@pytest.mark.parametrize("tensors", [one_of_each_dtype(), {}], ids=["every dtype", "nothing"])
def test_tensors_come_back_as_they_were(tensors, write, load):
    found = load(write(tensors))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_state(found[name], tensor, name)


def test_tensors_are_aligned_for_readers_that_map_the_file():
    data = written(
        {"octet": torch.ones(3, dtype=torch.uint8), "float": torch.ones(5), "double": torch.ones(1).double()}
    )
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes])
    assert header_bytes % 8 == 0
    assert {name: facts["data_offsets"] for name, facts in header.items()} == {
        "double": [0, 8],
        "float": [8, 28],
        "octet": [28, 31],
    }


def test_tensors_are_given_one_at_a_time(monkeypatch):
    """A model on a device needs room for its largest tensor on the host, not for all of them."""
    copied: list[int] = []
    cpu = torch.Tensor.cpu

    def record(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.numel())
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", record)
    pieces = chunks({"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)})
    progress = [list(copied) for _ in pieces]
    assert progress == [[], [1], [1, 2], [1, 2, 3]]


FLOATS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "no file": b"",
    "three bytes": b"abc",
    "a header of a gigabyte": struct.pack("<Q", 2**30) + b"{}",
    "a header that is a list": file_with_header([]),
    "a header that is not JSON": file_with_header(b"\x80\x04K\x01."),
    "a tensor that is a number": file_with_header({"a": 3}),
    "an unknown dtype": file_with_header({"a": {**FLOATS, "dtype": "F33"}}, bytes(8)),
    "no offsets": file_with_header({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "a size that is text": file_with_header({"a": {**FLOATS, "shape": "2"}}, bytes(8)),
    "a petabyte": file_with_header({"a": {"dtype": "F32", "shape": [2**48], "data_offsets": [0, 2**50]}}, bytes(8)),
    "a gap before": file_with_header({"a": {**FLOATS, "data_offsets": [4, 12]}}, bytes(12)),
    "bytes behind": file_with_header({"a": FLOATS}, bytes(9)),
    "bytes missing": file_with_header({"a": FLOATS}, bytes(7)),
    "two tensors in one place": file_with_header({"a": FLOATS, "b": FLOATS}, bytes(8)),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused(data):
    with pytest.raises(InvalidCheckpointError, match="the file"):
        read(data)
