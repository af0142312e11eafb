"""The functions and classes that a pickle written by ``torch.save`` may name, and the memory that it may use.

Each name has a function here, which checks its arguments. Nothing is imported, and nothing else is called.
"""

from __future__ import annotations

import codecs
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pytorch_accelerated.errors import InvalidCheckpointError

CONTAINER_BYTES = 64  # of memory, at least
_TENSOR_BYTES = 512  # without its data
_BYTES_PER_BYTE = 48  # of memory, for each byte of a pickle; state dicts need about a quarter of that
_FREE_BYTES = 2**20
_REPEATING_BYTES = 2**26  # the size of a tensor that repeats its elements, such as an expanded one
_MAX_DIMENSIONS = 64
_MAX_KEYS_ALIKE = 100  # with one hash, for types whose hashes can be chosen on purpose

SCALARS = (type(None), bool, int, float, str, bytes)
_KEYS = (*SCALARS, torch.dtype, torch.device)


class Named(NamedTuple):
    """The name of a function or class in a pickle. It is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Storage(NamedTuple):
    """The data of tensors: bytes, and the default dtype of tensors that use them."""

    octets: torch.Tensor
    dtype: torch.dtype


Maker = Callable[..., Any]
"""Makes a value from a `Budget` and the arguments in the pickle, or raises any error."""

_DTYPES_OF_STORAGES = {
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "BoolStorage": torch.bool,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_LAYOUTS = {"torch.strided": torch.strided, "torch.sparse_coo": torch.sparse_coo}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def dtype_of_storage(named: Any) -> torch.dtype:
    """The dtype of a storage class; an `InvalidCheckpointError` if there is no such class."""
    if isinstance(named, Named) and named.module in ("torch", "torch.cuda", "torch.storage"):
        dtype = _DTYPES_OF_STORAGES.get(named.name)
        if dtype is not None:
            return dtype
    raise InvalidCheckpointError(f"it names {named} as a kind of data")


class Built:
    """Base of values that a pickle makes in two steps: the second one calls `build`. For makers."""

    def build(self, state: Any) -> None:
        """Set the state of the value."""
        raise NotImplementedError


class Budget:
    """The memory that the values of a pickle may use. It grows with every byte that is read."""

    def __init__(self) -> None:
        self._room = _FREE_BYTES
        self._alike: Counter[tuple[int, int]] = Counter()

    def earn(self, read_bytes: int) -> None:
        """Allow more memory, because bytes were read."""
        self._room += _BYTES_PER_BYTE * read_bytes

    def charge(self, size_bytes: int) -> None:
        """Count memory that is about to be used; an `InvalidCheckpointError` if it exceeds the budget."""
        self._room -= size_bytes
        if self._room < 0:
            raise InvalidCheckpointError("its values would take far more memory than its size justifies")

    def check_key(self, target: Any, key: Any) -> None:
        """Refuse what cannot be a key of `target`, and keys whose equal hashes would make lookups take hours."""
        is_tuple = type(key) in (tuple, torch.Size)
        if not (type(key) in _KEYS or (is_tuple and all(type(item) in _KEYS for item in key))):
            raise InvalidCheckpointError(f"a key is a {type(key).__name__}")
        if is_tuple or (type(key) is int and abs(key) >= 2**60):
            self._alike[id(target), hash(key)] += 1
            if self._alike[id(target), hash(key)] > _MAX_KEYS_ALIKE and key not in target:
                raise InvalidCheckpointError("its keys were chosen to take hours to look up")


def _tensor(
    budget: Budget,
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    dtype: Any = None,
    metadata: Any = None,
) -> torch.Tensor:
    budget.charge(_TENSOR_BYTES)
    if not isinstance(storage, Storage) or hooks or metadata:
        raise TypeError("it has no data of its own, or has hooks")
    dtype = storage.dtype if dtype is None else dtype
    octets = storage.octets
    elements = octets[: octets.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    numbers = [offset, *shape, *strides]
    if any(type(number) is not int or number < 0 for number in numbers) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"it cannot begin at {offset} with the shape {shape} and strides {strides}")
    span = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if offset + span > elements.numel():
        raise ValueError(f"it would have {offset + span} elements, but the file has {elements.numel()} for it")
    count = 1
    for size in shape:
        count *= size
    if count > span and count * dtype.itemsize > max(_REPEATING_BYTES, octets.numel()):
        raise ValueError(f"it claims {count} elements, but the file has {span} for it")
    return elements.as_strided(shape, strides, offset).requires_grad_(requires_grad is True)


def _parameter(budget: Budget, data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> Any:
    if type(data) is not torch.Tensor:
        raise TypeError("it has no data")
    return torch.nn.Parameter(data, requires_grad is True)


def _tensor_with_attributes(budget: Budget, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor with Python attributes, which are not restored."""
    if str(kind) not in ("torch.Tensor", "torch.nn.parameter.Parameter") or type(arguments) is not tuple:
        raise TypeError(f"{kind} is a class of its own")
    if str(function) not in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
        raise TypeError(f"it is made by {function}")
    return _tensor(budget, *arguments)


def _sparse_tensor(budget: Budget, layout: Any, arguments: Any) -> torch.Tensor:
    budget.charge(_TENSOR_BYTES)
    indices, values, size, *coalesced = arguments
    if layout is not torch.sparse_coo:
        raise TypeError(f"its layout is {layout}")
    tensor = torch.sparse_coo_tensor(indices, values, size, check_invariants=True)
    return tensor.coalesce() if coalesced and coalesced[0] is True else tensor


def _size_of_tensor(budget: Budget, items: Any = ()) -> torch.Size:
    budget.charge(CONTAINER_BYTES + 8 * len(items))
    return torch.Size(items)


def _ordered_dict(budget: Budget, items: Any = ()) -> OrderedDict[Any, Any]:
    budget.charge(CONTAINER_BYTES * (1 + len(items)))
    ordered: OrderedDict[Any, Any] = OrderedDict()
    for key, value in items:
        budget.check_key(ordered, key)
        ordered[key] = value
    return ordered


def _counter(budget: Budget, counts: Any = None) -> Counter[Any]:
    counts = {} if counts is None else counts
    if type(counts) is not dict:
        raise TypeError("its counts are not a dict")
    budget.charge(CONTAINER_BYTES * (1 + len(counts)))
    return Counter(counts)


def _set(budget: Budget, items: Any = ()) -> set[Any]:
    budget.charge(CONTAINER_BYTES * (1 + len(items)))
    found: set[Any] = set()
    for item in items:
        budget.check_key(found, item)
        found.add(item)
    return found


def _bytes(budget: Budget, text: Any, encoding: Any) -> bytes:
    """Bytes, which torch's version of pickle stores as text."""
    if type(text) is not str or codecs.lookup(encoding).name != "iso8859-1":
        raise TypeError(f"it is a {type(text).__name__} in {encoding!r}")
    budget.charge(len(text))
    return text.encode("latin-1")


def _byte_array(budget: Budget, data: Any = b"", *encoding: Any) -> bytearray:
    data = _bytes(budget, data, *encoding) if encoding else data
    if type(data) is not bytes:
        raise TypeError(f"it is made of a {type(data).__name__}")
    budget.charge(len(data))
    return bytearray(data)


VALUES: dict[str, Any] = {f"torch.{name}": dtype for name, dtype in _DTYPES.items()}
MAKERS: dict[str, Maker] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_sparse_tensor": _sparse_tensor,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
    "torch.serialization._get_layout": lambda budget, name: _LAYOUTS[name],
    "torch.Size": _size_of_tensor,
    "torch.device": lambda budget, *arguments: torch.device(*arguments),
    "collections.OrderedDict": _ordered_dict,
    "collections.Counter": _counter,
    "_codecs.encode": _bytes,
}
for _module in ("builtins", "__builtin__"):  # by the version of the pickle
    MAKERS[f"{_module}.set"] = _set
    MAKERS[f"{_module}.complex"] = lambda budget, real, imaginary: complex(real, imaginary)
    MAKERS[f"{_module}.bytes"] = lambda budget: b""
    MAKERS[f"{_module}.bytearray"] = _byte_array
