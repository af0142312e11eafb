"""Reads plain values and tensors from pickles without calling anything that they name.

A pickle is a program for a stack machine. Python's own machine calls whatever the program names; torch's restricted one
calls the functions on its list with any arguments, and one of them makes 1.5 GB out of 70 bytes. This machine knows the
instructions that ``torch.save`` writes for state dicts, and finds named functions in `pickled_values`. The memory that
it uses is limited to the tensors' data and a small multiple of the program.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import torch

from pytorch_accelerated.checkpointing.pickled_values import (
    CONTAINER_BYTES,
    MAKERS,
    SCALARS,
    VALUES,
    Budget,
    Built,
    Maker,
    Named,
    Storage,
)
from pytorch_accelerated.errors import InvalidCheckpointError

_MAX_DEPTH = 100
_MARK = object()  # on the stack, where the items of an unfinished container begin
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LEAVES = (*SCALARS, *_TENSORS, complex, bytearray, torch.Size, torch.dtype, torch.device, torch.layout)


def read_pickle(
    file: BinaryIO,
    size_bytes: int,
    find_storage: Callable[[tuple[Any, ...]], Storage],
    makers: Mapping[str, Maker] | None = None,
) -> Any:
    """The value of the next pickle in `file`: plain values, containers and tensors, of limited depth and size.

    Args:
        file: read from its current position.
        size_bytes: what is left of the file.
        find_storage: returns the data for a persistent id in the pickle.
        makers: by name, for further functions that the pickle may name; they must return plain values.

    Raises:
        InvalidCheckpointError: if the pickle holds anything else, or is damaged.
    """
    with _explained("it is inconsistent"):
        machine = _Machine(file, size_bytes, find_storage, makers or {})
        value = machine.run()
        machine.charge_tree(value)
        return value


@contextlib.contextmanager
def _explained(complaint: str) -> Iterator[None]:
    try:
        yield
    except InvalidCheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(f"{complaint} ({type(error).__name__}: {error})") from error


class _Machine:
    def __init__(
        self,
        file: BinaryIO,
        size_bytes: int,
        find_storage: Callable[[tuple[Any, ...]], Storage],
        makers: Mapping[str, Maker],
    ) -> None:
        self._file = file
        self._left = size_bytes
        self._find_storage = find_storage
        self._makers = {**MAKERS, **makers}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._budget = Budget()

    def run(self) -> Any:
        """Execute the program."""
        while True:
            code = self.take(1)
            if code == b".":
                return self.pop()
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise InvalidCheckpointError(f"it has the instruction {code!r}, which torch.save does not write")
            instruction(self)

    def charge_tree(self, root: Any) -> None:
        """Refuse a value that is not plain, contains itself, or would be very large if it were written out.

        A list of ten references to a list of ten references, and so on, is small until it is copied.
        """
        sizes: dict[int, int] = {}
        path: set[int] = set()
        todo: list[tuple[Any, bool]] = [] if _is_leaf(root) else [(root, False)]
        while todo:
            value, is_left = todo.pop()
            if id(value) in sizes:
                continue
            children = list(_children(value))
            if is_left:
                path.discard(id(value))
                sizes[id(value)] = CONTAINER_BYTES + sum(sizes.get(id(child), 8) for child in children)
                continue
            if id(value) in path or len(path) >= _MAX_DEPTH:
                raise InvalidCheckpointError(f"it is nested deeper than {_MAX_DEPTH} levels, or contains itself")
            path.add(id(value))
            todo.append((value, True))
            todo.extend((child, False) for child in children if not _is_leaf(child))
        self._budget.charge(sizes.get(id(root), 0))

    # ----------------------------------------------------------------------------------------------- instructions

    def skip(self, size: int) -> None:
        self.take(size)

    def read_number(self, form: str) -> None:
        self.push(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def read_long(self) -> None:
        self.push(int.from_bytes(self.take(self.size("B")), "little", signed=True))

    def read_text(self, form: str, encoding: str = "utf-8") -> None:
        self.push(self.take(self.size(form)).decode(encoding, "surrogatepass" if encoding == "utf-8" else "strict"))

    def read_bytes(self, form: str) -> None:
        self.push(self.take(self.size(form)))

    def read_name(self) -> None:
        self._budget.charge(CONTAINER_BYTES)
        named = Named(self.line(), self.line())
        self.push(VALUES.get(str(named), named))

    def push_new(self, kind: Callable[[], Any]) -> None:
        self._budget.charge(CONTAINER_BYTES)
        self.push(kind())

    def push_mark(self) -> None:
        self._marks.append(len(self._stack))
        self.push(_MARK)

    def make_tuple(self, size: int | None = None) -> None:
        self._budget.charge(CONTAINER_BYTES if size != 0 else 0)
        self.push(tuple(self.since_mark() if size is None else [self.pop() for _ in range(size)][::-1]))

    def append(self, several: bool) -> None:
        items = self.since_mark() if several else [self.pop()]
        self.top(list).extend(items)

    def set_items(self, several: bool) -> None:
        items = self.since_mark() if several else [self.pop() for _ in range(2)][::-1]
        target = self.top(dict, OrderedDict, Counter)
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._budget.check_key(target, key)
            target[key] = value

    def store(self, form: str) -> None:
        if not self._stack:
            raise InvalidCheckpointError("it stores a value from an empty stack")
        self._memo[self.size(form)] = self._stack[-1]

    def fetch(self, form: str) -> None:
        number = self.size(form)
        if number not in self._memo:
            raise InvalidCheckpointError("it fetches a value that was never stored")
        self.push(self._memo[number])

    def find_data(self) -> None:
        identification = self.pop()
        if type(identification) is not tuple:
            raise InvalidCheckpointError(f"it identifies data by a {type(identification).__name__}")
        self.push(self._find_storage(identification))

    def call(self) -> None:
        arguments, named = self.pop(), self.pop()
        maker = self._makers.get(str(named)) if isinstance(named, Named) else None
        if maker is None or type(arguments) is not tuple:
            raise InvalidCheckpointError(f"it holds a call of {named}")
        with _explained(f"{named} cannot be made"):
            self.push(maker(self._budget, *arguments))

    def build(self) -> None:
        """Set the attributes of an object, such as the module versions of a state dict."""
        state, target = self.pop(), self._stack[-1] if self._stack else None
        if isinstance(target, Built):
            target.build(state)
        elif type(target) is OrderedDict and type(state) is dict and set(state) <= {"_metadata"}:
            vars(target).update(state)
        else:
            raise InvalidCheckpointError(f"it has a {type(target).__name__} with attributes")

    # ------------------------------------------------------------------------------------------------------ helpers

    def take(self, size: int) -> bytes:
        if size > self._left:
            raise InvalidCheckpointError("it ends too early")
        data = self._file.read(size)
        self._left -= size
        self._budget.earn(size)
        if len(data) != size:
            raise InvalidCheckpointError("it ended while it was read")
        return data

    def line(self) -> str:
        line = bytearray()
        while (octet := self.take(1)) != b"\n":
            line += octet
        return line.decode("utf-8")

    def size(self, form: str) -> int:
        size: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        if size < 0:
            raise InvalidCheckpointError("a size in it is negative")
        return size

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise InvalidCheckpointError("it takes a value from an empty stack")
        return self._stack.pop()

    def since_mark(self) -> list[Any]:
        if not self._marks:
            raise InvalidCheckpointError("it ends a container that was never started")
        start = self._marks.pop()
        items = self._stack[start + 1 :]
        del self._stack[start:]
        return items

    def top(self, *kinds: type) -> Any:
        if not self._stack or type(self._stack[-1]) not in kinds:
            raise InvalidCheckpointError("it fills a value that is not a container")
        return self._stack[-1]


def _is_leaf(value: Any) -> bool:
    return type(value) in _LEAVES or isinstance(value, Built)


def _children(value: Any) -> Iterator[Any]:
    if type(value) in (dict, OrderedDict, Counter):
        yield from value
        yield from value.values()
        yield from vars(value).values() if type(value) is OrderedDict else ()
    elif type(value) in (list, tuple, set):
        yield from value
    elif isinstance(value, (Named, Storage)):
        raise InvalidCheckpointError(f"it holds {value if isinstance(value, Named) else 'the bare data of a tensor'}")
    else:
        raise InvalidCheckpointError(f"it holds a {type(value).__name__}")


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": lambda machine: machine.skip(1),  # the version, which makes no difference
    b"c": _Machine.read_name,
    b"R": _Machine.call,
    b"b": _Machine.build,
    b"Q": _Machine.find_data,
    b"(": _Machine.push_mark,
    b"t": _Machine.make_tuple,
    b")": lambda machine: machine.make_tuple(0),
    b"\x85": lambda machine: machine.make_tuple(1),
    b"\x86": lambda machine: machine.make_tuple(2),
    b"\x87": lambda machine: machine.make_tuple(3),
    b"]": lambda machine: machine.push_new(list),
    b"}": lambda machine: machine.push_new(dict),
    b"a": lambda machine: machine.append(False),
    b"e": lambda machine: machine.append(True),
    b"s": lambda machine: machine.set_items(False),
    b"u": lambda machine: machine.set_items(True),
    b"N": lambda machine: machine.push(None),
    b"\x88": lambda machine: machine.push(True),
    b"\x89": lambda machine: machine.push(False),
    b"J": lambda machine: machine.read_number("<i"),
    b"K": lambda machine: machine.read_number("<B"),
    b"M": lambda machine: machine.read_number("<H"),
    b"G": lambda machine: machine.read_number(">d"),
    b"\x8a": _Machine.read_long,
    b"X": lambda machine: machine.read_text("<I"),
    b"U": lambda machine: machine.read_text("<B", "ascii"),
    b"T": lambda machine: machine.read_text("<i", "ascii"),
    b"B": lambda machine: machine.read_bytes("<I"),
    b"C": lambda machine: machine.read_bytes("<B"),
    b"q": lambda machine: machine.store("<B"),
    b"r": lambda machine: machine.store("<I"),
    b"h": lambda machine: machine.fetch("<B"),
    b"j": lambda machine: machine.fetch("<I"),
}
