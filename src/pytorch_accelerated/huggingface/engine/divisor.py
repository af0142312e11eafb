"""Detects what a loss is divided by, while it is computed.

A signature does not show it. Many models accept any keyword and pass it on to a loss that is a mean anyway, and many
losses of users have the parameter only because they must; others divide by the trainer's
``current_gradient_accumulation_steps``. So the numbers given to a loss are marked, and everything computed from them is
marked too.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pytorch_accelerated.callbacks.warning import stacklevel_of_user
from pytorch_accelerated.trees import leaves, tensors_in

ITEMS, BATCHES, NOTHING = "items", "batches", "nothing"


class LossDivisor:
    """Knows what the losses of a run are divided by, once the loss of a batch has shown it.

    Args:
        known: the divisor, if it need not be detected.

    Attributes:
        known: `ITEMS`, `BATCHES` or `NOTHING`; None while it is unknown.
    """

    def __init__(self, known: str | None = None) -> None:
        self.known = known
        self._watch: DivisorWatch | None = None

    def loss_of(self, compute: Callable[[Any], Any], num_items: int | None) -> Any:
        """The loss that `compute` returns for this number of items.

        Compiled code runs uncompiled while the divisor is unknown, because its operations could not be seen.
        """
        if not num_items or self.known is not None:
            return compute(num_items)
        is_compiler_there = "torch._dynamo" in sys.modules  # which takes a second to import
        with (
            torch.compiler.set_stance("force_eager") if is_compiler_there else contextlib.nullcontext(),
            DivisorWatch() as watch,
        ):
            self._watch = watch
            try:
                loss = compute(watch.mark(num_items, ITEMS))
            finally:
                self._watch = None
        self._conclude(loss, watch)
        return loss

    def told_batches(self, number: int) -> int:
        """The number of batches in an update, marked if a loss is being watched."""
        return number if self._watch is None else self._watch.mark(number, BATCHES)

    def _conclude(self, loss: Any, watch: DivisorWatch) -> None:
        marks = watch.marks_of(loss)
        if not marks and watch.lost:
            marks = frozenset(watch.lost)
            warnings.warn(
                "While the loss was computed, the number that it may be divided by (`num_items_in_batch`, or "
                "`current_gradient_accumulation_steps`) was converted by `int` or `float`. What became of it cannot be "
                "seen, so the loss is taken to be divided by it. If it is, leave the conversion out; if it is a mean "
                "over the batch, leave the number alone.",
                stacklevel=stacklevel_of_user(),
            )
        if marks:
            self.known = ITEMS if ITEMS in marks else BATCHES
        elif isinstance(loss, torch.Tensor) and bool(loss.detach().isfinite().all() & loss.detach().any()):
            self.known = NOTHING  # a loss of 0, or NaN, may be that of a batch without labels, and shows nothing


class DivisorWatch(TorchFunctionMode):
    """A context that follows marked numbers through the arithmetic of Python and torch.

    A number converted by ``int`` or ``float`` cannot be followed. Reads without a call are not even noticed: an
    operation with a float on its left, as in ``1.0 / number``, and C code of other packages, such as a kernel that gets
    the number itself.

    Attributes:
        lost: the marks of the numbers that were converted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()
        self._marked_tensors: dict[int, tuple[torch.Tensor, frozenset[str]]] = {}  # kept alive: an id is used again

    def mark(self, number: int, mark: str) -> int:
        """The same number with a mark, `ITEMS` or `BATCHES`."""
        return _marked(number, frozenset([mark]), self.lost)  # type: ignore[no-any-return]

    def marks_of(self, *values: Any) -> frozenset[str]:
        """The marks of everything that numbers, tensors and containers of them were computed from."""
        return frozenset().union(*map(self._marks_of_leaf, leaves(values)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and pass the marks of its arguments on to its results."""
        kwargs = kwargs or {}
        marks = self.marks_of(args, kwargs)
        result = func(*args, **kwargs)
        if not marks:
            return result
        if func in (torch.Tensor.__int__, torch.Tensor.__float__):  # of which Python wants bare numbers
            self.lost |= marks
        elif type(result) in _MARKED_KINDS:
            return _marked(result, marks, self.lost)
        for tensor in tensors_in(args[:1] if result is None else result):  # assigning to a part returns nothing
            self._marked_tensors[id(tensor)] = tensor, marks
        return result

    def _marks_of_leaf(self, value: Any) -> frozenset[str]:
        if isinstance(value, _Marked):
            return value.marks
        return self._marked_tensors[id(value)][1] if id(value) in self._marked_tensors else frozenset()


class _Marked(float):
    """A number with marks.

    It is a float, also where the number is an int, because Python asks no other kind of number that stands right of a
    float what ``1.0 / number`` is.
    """

    number: Any
    marks: frozenset[str]
    lost: set[str]

    @property  # type: ignore[misc]  # in the base it can be assigned
    def __class__(self) -> type:
        """The type that `isinstance` sees."""
        return type(self.number)

    def __int__(self) -> int:
        return int(_converted(self))

    def __float__(self) -> float:
        return float(_converted(self))

    def __index__(self) -> int:
        return operator.index(self.number)

    def __repr__(self) -> str:
        return repr(self.number)

    def __format__(self, format_spec: str) -> str:
        return format(self.number, format_spec)

    def __reduce__(self) -> Any:
        return type(self.number), (_converted(self),)


_MARKED_KINDS = (int, float)


def _marked(number: Any, marks: frozenset[str], lost: set[str]) -> Any:
    marked = _Marked(number)
    marked.number, marked.marks, marked.lost = number, marks, lost
    return marked


def _bare(number: Any) -> Any:
    """The number without marks."""
    return number.number if isinstance(number, _Marked) else number


def _converted(number: _Marked) -> Any:
    """The number as it leaves the watch."""
    number.lost |= number.marks
    return number.number


def _define(name: str, operation: Callable[..., Any], *, is_reflected: bool = False) -> None:
    """Give marked numbers an operation, whose result has the marks of both sides."""

    def operate(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented  # a tensor will do it, and is watched
        numbers = [_bare(self), *map(_bare, others)]
        result = operation(*(reversed(numbers) if is_reflected else numbers))
        marks = self.marks.union(*(other.marks for other in others if isinstance(other, _Marked)))
        return _marked(result, marks, self.lost) if type(result) in _MARKED_KINDS else result

    setattr(_Marked, name, operate)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _define(f"__{_name}__", getattr(operator, _name))
    _define(f"__r{_name}__", getattr(operator, _name), is_reflected=True)
for _name in ("neg", "pos", "abs"):
    _define(f"__{_name}__", getattr(operator, _name))
_define("__round__", round)
