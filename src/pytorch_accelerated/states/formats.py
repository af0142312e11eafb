"""The two formats of files in a training state: JSON, and safetensors, written and read as a stream.

The package `safetensors` reads and writes the same files: eight bytes with the length of a JSON header, the header, the
bytes of all tensors without gaps (https://huggingface.co/docs/safetensors, "Format"). Streaming allows us to hash a
tensor while it is written or read, to copy device tensors to the host one at a time, and to write through `disk`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import InvalidCheckpointError

DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""The names of dtypes in safetensors."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""The inverse of `DTYPE_NAMES`."""

_PREFIX_BYTES = 8


def dump_json(value: Any, *, indent: int | None = None) -> bytes:
    """`value` as ASCII JSON without spaces, or with `indent` spaces per level, for files that people read."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode("ascii")


def load_json(data: bytes, *, what: str) -> Any:
    """The value of a JSON document; an `InvalidCheckpointError` that calls it `what` if it is damaged."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpointError(f"{what} is not JSON: {error}") from error


def chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a file with `tensors`, in chunks, which keep their memory.

    Waits for the device of each tensor. Large elements come first, so that all are aligned in a memory-mapped file.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = dump_json(header)
    text += b" " * (-len(text) % _PREFIX_BYTES)
    yield len(text).to_bytes(_PREFIX_BYTES, "little") + text
    for _, tensor in ordered:
        yield _octets(tensor.detach().contiguous().cpu())


def read_tensors(
    read_into: Callable[[memoryview], None], size_bytes: int, *, what: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file with their names, on the CPU, each in its own memory.

    Args:
        read_into: fills a buffer with the next bytes of the file, or raises.
        size_bytes: size of the file; nothing larger is allocated, whatever the header says.
        what: the name of the file in errors.

    Raises:
        InvalidCheckpointError: if the header does not describe a complete file without gaps and overlaps.
    """
    for name, dtype, shape in read_layout(read_into, size_bytes, what=what):
        tensor = torch.empty(shape, dtype=dtype)
        read_into(_octets(tensor))
        yield name, tensor


def read_layout(
    read_into: Callable[[memoryview], None], size_bytes: int, *, what: str
) -> list[tuple[str, torch.dtype, list[int]]]:
    """Name, dtype and shape of all tensors of a file, in the order of their bytes. Reads only the header.

    Arguments and errors are those of `read_tensors`.
    """
    prefix = bytearray(min(_PREFIX_BYTES, size_bytes))
    read_into(memoryview(prefix))
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > size_bytes - _PREFIX_BYTES:
        raise InvalidCheckpointError(f"{what} is not a safetensors file: its header would have {header_bytes} bytes.")
    text = bytearray(header_bytes)
    read_into(memoryview(text))
    header = load_json(bytes(text), what=f"The header of {what}")  # may be anything
    layout, position = [], 0
    try:
        header.pop("__metadata__", None)
        for name, facts in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = DTYPES[facts["dtype"]], facts["shape"]
            start, position = position, position + math.prod(shape) * dtype.itemsize
            if facts["data_offsets"] != [start, position]:
                raise ValueError(f"{name!r} is not where the tensor before it ends")
            layout.append((name, dtype, shape))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(f"{what} has an invalid header ({type(error).__name__}: {error}).") from error
    if position != size_bytes - _PREFIX_BYTES - header_bytes:
        raise InvalidCheckpointError(f"{what} has {size_bytes} bytes, which is not what its header describes.")
    return layout


def _octets(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
