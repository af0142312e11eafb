"""Nested Python state as strict JSON plus named tensors, the bytes of both files, and back, without pickle.

`encode` takes the values that optimizers, schedulers, modules, random generators and callbacks keep in state dicts:

- None, bools, ints of any size, floats (NaN and infinities too), complex numbers, strings, bytes;
- lists, tuples, `torch.Size`, and dicts, `OrderedDict`s and `Counter`s with any hashable keys of these kinds;
- dense tensors of every dtype, sharded tensors (`DTensor`), numpy arrays and scalars with a dtype that torch has,
  `torch.dtype`, `torch.device`;
- enum members, which come back as their plain values: nothing is ever imported by a name in a file.

A value that JSON lacks is an object with the key ``"$"``, which names its type. Types are compared exactly: a subclass
may hold more than its base, so it is refused rather than flattened.

Tied tensors, which are the same part of memory in the same shape, are stored once and tied again when read. Dimension
order in memory (``channels_last``, transposed weights) is restored; tensors with gaps or repeats (``x[:, ::2]``,
``expand``) come back contiguous. Tensors come back on the CPU.

The files of tensors are those of the package `safetensors`: eight bytes with the length of a JSON header, the header,
the bytes of all tensors without gaps (https://huggingface.co/docs/safetensors, "Format"). We write and read them as a
stream, which allows us to hash a tensor meanwhile, to copy device tensors to the host one at a time, and to write
through `disk`.
"""

from __future__ import annotations

import enum
import json
import math
import re
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError
from pytorch_accelerated.ranks.compat.torch import module_versions, set_module_versions
from pytorch_accelerated.ranks.sharding import Shard, is_sharded, shard_of

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

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (*DTYPE_NAMES, torch.complex32, torch.complex128, torch.float8_e8m0fnu)
}
_MAX_DEPTH = 32
_PREFIX_BYTES = 8


@dataclass(frozen=True)
class Encoded:
    """The result of `encode`.

    Attributes:
        structure: for `dump_json`.
        tensors: by name, for `chunks`. They are the live tensors on their devices, copied only if they have
            gaps or repeats.
        sharded: by name, this rank's parts of sharded tensors, for `state_folder.write_shards`; not copies either.
    """

    structure: Any
    tensors: dict[str, torch.Tensor]
    sharded: dict[str, Shard] = field(default_factory=dict)


def encode(value: Any, *, path: str) -> Encoded:
    """`value` in two parts that can be written without pickle.

    Tensors are named by their place in `value`, so other readers of safetensors see a module's state dict as it is.
    The host never waits for a device, and nothing is copied but tensors with gaps or repeats.

    Args:
        value: nested state, see the top of this file.
        path: the name of `value` in errors, for example ``optimizer``.

    Raises:
        CheckpointError: names every value that cannot be stored, for example ``optimizer.param_groups[0].foo``.
    """
    encoder = _Encoder(path)
    structure = encoder.encode(value, "", 0)
    if encoder.complaints:
        raise CheckpointError(
            "Cannot be stored in a training state:\n  "
            + "\n  ".join(encoder.complaints)
            + "\nKeep plain values and tensors there, or leave these out of the state dict."
        )
    return Encoded(structure, encoder.tensors, encoder.sharded)


def decode(structure: Any, tensors: Mapping[str, torch.Tensor], *, path: str) -> Any:
    """The inverse of `encode`. Tensors of the result share memory with `tensors` wherever their layout allows.

    Raises:
        InvalidCheckpointError: names the invalid place, which starts with `path`.
    """
    return _Decoder(tensors, path).decode(structure, "")


def _is_json(value: Any) -> bool:
    """Whether `value` is a scalar that JSON has."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    return -(2**63) <= value < 2**63 if kind is int else value is None or kind is str or kind is bool


def _child(path: str, key: Any) -> str:
    if type(key) is str and re.fullmatch(r"[\w.]+", key):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def _place(root: str, path: str) -> str:
    return root + (path if path.startswith("[") or not path else f".{path}")


class _Encoder:
    def __init__(self, root: str) -> None:
        self.root = root
        self.tensors: dict[str, torch.Tensor] = {}
        self._nodes: dict[Any, dict[str, Any]] = {}  # of the tensors, by their places in memory
        self.sharded: dict[str, Shard] = {}
        self.complaints: list[str] = []

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            return self._refuse(path, f"nested deeper than {_MAX_DEPTH} levels, or holds itself")
        if _is_json(value):
            return value
        kind = type(value)
        if kind is int:
            return {"$": "int", "hex": hex(value)}
        if kind is float:
            return {"$": "float", "text": repr(value)}
        if kind is complex:
            return {"$": "complex", "real": self.encode(value.real, path, 0), "imag": self.encode(value.imag, path, 0)}
        if kind is bytes:
            return {"$": "bytes", "base64": b64encode(value).decode("ascii")}
        if kind in (list, tuple, torch.Size):
            # Asked here once more: a history has hundreds of thousands of such items, and the run waits for this.
            items = [
                item
                if type(item) is int and abs(item) < 2**63 or _is_json(item)
                else self.encode(item, f"{path}[{index}]", depth + 1)
                for index, item in enumerate(value)
            ]
            return items if kind is list else {"$": "tuple" if kind is tuple else "size", "items": items}
        if kind in (dict, OrderedDict, Counter):
            return self._encode_dict(value, path, depth)
        if isinstance(value, enum.Enum):
            inner = self.encode(value.value, path, depth + 1)
            return {"$": "enum", "member": f"{kind.__name__}.{value.name}", "value": inner}
        if kind is torch.dtype and value in _DTYPES.values():
            return {"$": "dtype", "name": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"$": "device", "name": str(value)}
        if isinstance(value, (torch.Tensor, Shard)):
            return self._encode_tensor(value, path)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._encode_numpy(value, path)
        return self._refuse(path, f"is a {kind.__module__}.{kind.__qualname__}")

    def _encode_dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if type(value) is dict and "$" not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, _child(path, key), depth + 1) for key, item in value.items()}
        items = []
        for key, item in value.items():
            place = _child(path, key)
            if isinstance(key, torch.Tensor):
                self._refuse(path, "has a tensor as a key, which could not be looked up after loading")
            else:
                items.append([self.encode(key, place, depth + 1), self.encode(item, place, depth + 1)])
        node = {"$": {dict: "dict", OrderedDict: "ordered dict", Counter: "counter"}[type(value)], "items": items}
        # Modules keep the version of their state dict's format here. Without it, a module whose format has changed
        # would convert a current state as if it were an old one.
        if type(value) is OrderedDict and (versions := module_versions(value)) is not None:
            node["metadata"] = self.encode(versions, f"{path}._metadata", depth + 1)
        return node

    def _encode_tensor(self, tensor: Any, path: str) -> Any:
        if is_sharded(tensor):
            # Tied sharded tensors are stored once for each name: from an empty part a rank can't see that it is tied.
            shard = shard_of(tensor)
            if shard.part.dtype not in DTYPE_NAMES or path in self.sharded:
                return self._refuse(path, f"is a sharded tensor of {shard.part.dtype}, or has the name of another one")
            self.sharded[path] = shard
            return {"$": "sharded", "name": path}
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_nested:
            return self._refuse(path, f"is a {type(tensor).__name__}, a tensor of a special kind")
        if tensor.layout is not torch.strided or tensor.dtype not in _DTYPES.values() or tensor.is_meta:
            return self._refuse(path, f"is a tensor with {tensor.layout}, {tensor.dtype} on {tensor.device}")
        tensor, name = tensor.detach(), path or "value"
        layout = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        place = (tensor.device, tensor.data_ptr(), *layout) if tensor.numel() else name
        if place in self._nodes:  # tied tensors are stored once
            return self._nodes[place]
        tensor = tensor.resolve_conj().resolve_neg()
        while name in self.tensors or name == "__metadata__":  # reserved by the file format
            name += "'"
        node: dict[str, Any] = {"$": "tensor", "name": name}
        if tensor.dtype not in DTYPE_NAMES:
            node = {"$": "view", "name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "offset": 0}
            node.update(shape=list(tensor.shape), stride=list(torch.empty(tensor.shape, device="meta").stride()))
            tensor = tensor.contiguous().flatten().view(torch.uint8)
        elif not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            tensor = tensor.contiguous()
        elif tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
            node["stride"] = list(tensor.stride())
        self.tensors[name] = tensor
        self._nodes[place] = node
        return node

    def _encode_numpy(self, value: np.ndarray[Any, Any] | np.generic, path: str) -> Any:
        try:
            tensor = torch.from_numpy(np.array(value, order="C"))  # a copy: a read-only array would make torch warn
        except (TypeError, ValueError):
            return self._refuse(path, f"is a numpy value of dtype {value.dtype}")
        return {"$": "array" if isinstance(value, np.ndarray) else "scalar", "value": self._encode_tensor(tensor, path)}

    def _refuse(self, path: str, complaint: str) -> None:
        self.complaints.append(f"{_place(self.root, path)} {complaint}")


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor], root: str) -> None:
        self.tensors = tensors
        self.root = root
        self._strided: dict[str, torch.Tensor] = {}
        self._kinds: dict[str, Callable[..., Any]] = {
            "int": lambda hex: int(hex, 16),
            "float": lambda text: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
            "complex": lambda real, imag: complex(real, imag),
            "bytes": lambda base64: b64decode(base64),
            "tuple": lambda items: tuple(items),
            "size": lambda items: torch.Size(items),
            "dict": lambda items: dict(items),
            "ordered dict": self._ordered_dict,
            "counter": lambda items: Counter(dict(items)),
            "live": lambda: None,  # a function in the state of an optimizer, by version 1.0
            "enum": lambda member, value: value,
            "dtype": lambda name: _DTYPES[name],
            "device": lambda name: torch.device(name),
            "array": lambda value: value.numpy(),
            "scalar": lambda value: value.numpy()[()],
            "tensor": self._tensor,
            "sharded": lambda name: self.tensors[name],
            "view": self._view,
        }

    def decode(self, node: Any, path: str) -> Any:
        if isinstance(node, list):
            return [self.decode(item, f"{path}[{index}]") for index, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        fields = {key: self.decode(item, _child(path, key)) for key, item in node.items()}
        if "$" not in fields:
            return fields
        kind = fields.pop("$")
        try:
            return self._kinds[kind](**fields)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidCheckpointError(
                f"{_place(self.root, path)} cannot be read as a stored {kind!r} ({type(error).__name__}: {error})."
            ) from error

    @staticmethod
    def _ordered_dict(items: Any, metadata: Any = None) -> OrderedDict[Any, Any]:
        ordered = OrderedDict(items)
        if metadata is not None:
            set_module_versions(ordered, metadata)
        return ordered

    def _tensor(self, name: str, stride: Any = None) -> torch.Tensor:
        tensor = self.tensors[name]
        if stride is None:
            return tensor
        if name not in self._strided:
            self._strided[name] = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
        return self._strided[name]  # one copy for all places: tied tensors stay tied

    def _view(self, name: str, dtype: str, offset: Any, shape: Any, stride: Any) -> torch.Tensor:
        raw_bytes = self.tensors[name]
        element = _DTYPES[dtype]
        elements = raw_bytes[: raw_bytes.numel() // element.itemsize * element.itemsize].view(element)
        # torch refuses a view beyond the end of the storage, which holds nothing but `raw_bytes`.
        return elements.as_strided(shape, stride, elements.storage_offset() + offset)


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
        yield _raw_bytes(tensor.detach().contiguous().cpu())


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
        read_into(_raw_bytes(tensor))
        yield name, tensor


def read_layout(
    read_into: Callable[[memoryview], None], size_bytes: int, *, what: str
) -> list[tuple[str, torch.dtype, list[int]]]:
    """Name, dtype and shape of all tensors of a file, in the order of their bytes. Reads only the header.

    Arguments and errors as for `read_tensors`.
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


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
