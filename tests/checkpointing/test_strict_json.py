from typing import Any

import pytest

from pytorch_accelerated.checkpointing.strict_json import MAX_DEPTH, MAX_SIZE_BYTES, dump_json, load_json
from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError

HOSTILE = {
    "nan": b"[NaN]",
    "infinity": b"[-Infinity]",
    "a number beyond all floats": b"[1e999]",
    "an int that takes hours to read": b"1" * 100_000,
    "a repeated key": b'{"a": 1, "a": 2}',
    "a repeated key far inside": b'[{"x": {"a": 1, "a": 2}}]',
    "two documents": b"{} {}",
    "half a document": b'{"a": [1, 2',
    "nothing": b"",
    "no utf-8": b'"\xff"',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "too deep": b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    "deep enough to end the interpreter": b"[" * 1_000_000,
    "too large": b'"' + b"x" * MAX_SIZE_BYTES + b'"',
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_json_is_refused(data):
    with pytest.raises(InvalidCheckpointError, match=r"^the file"):
        load_json(data, what="the file")


def test_written_values_can_be_read():
    deepest: list[Any] = []
    for _ in range(MAX_DEPTH - 1):
        deepest = [deepest]
    value = {"a": [1, -0.0, 1e-320, None, True, "é\ud800\n"], "deepest": deepest[0], "large": 2**62}
    for indent in (None, 1):
        assert repr(load_json(dump_json(value, what="it", indent=indent), what="it")) == repr(value)


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1])
def test_writer_and_reader_agree_on_the_deepest_nesting(depth):
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    data = b"[" * depth + b"]" * depth
    if depth <= MAX_DEPTH:
        assert dump_json(value, what="it") == data
        assert load_json(data, what="it") == value
    else:
        with pytest.raises(CheckpointError, match="deeper than 32"):
            dump_json(value, what="it")
        with pytest.raises(InvalidCheckpointError, match="deeper than 32"):
            load_json(data, what="it")


def test_values_too_large_to_be_read_are_not_written():
    with pytest.raises(CheckpointError, match="in tensors"):
        dump_json("x" * MAX_SIZE_BYTES, what="it")
