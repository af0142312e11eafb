"""The processes of a run, and the messages between them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, LostPeerError, PytorchAcceleratedError
from pytorch_accelerated.facts.trees import map_leaves

if TYPE_CHECKING:
    from accelerate import Accelerator

Result = TypeVar("Result")

# The first number of a message: whether it belongs to a `gather` that user code called, or to anything else.
_OTHERWISE, _GATHER = 0, 1
# A tensor has 64 dimensions at the most. What 16 step records need, the usual number at a reading, fits too.
_MESSAGE_LENGTH = 96
_NUMBERS_OF_MESSAGE = _MESSAGE_LENGTH - 2
_DONE = "done"

# gloo raises plain RuntimeErrors, which can only be recognised by their text.
_WORDS_OF_GLOO = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "gloo/transport",
)


@functools.lru_cache(maxsize=4)
def _control_group(world: dist.ProcessGroup, channel: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """A group of all ranks that communicates through host memory, so that agreeing never waits for a device."""
    atexit.register(_leave_groups)
    return dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[no-any-return]


def _leave_groups() -> None:
    """Release all groups while Python still runs.

    The threads of a gloo group that outlives Python sometimes abort the process, although all its work is done.
    """
    _control_group.cache_clear()
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Apply `function` to every tensor of nested tuples, lists and dicts.

    Raises:
        ArgumentTypeError: if there is anything but tensors in them.
    """

    def apply(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        raise ArgumentTypeError(
            f"A {type(leaf).__name__} is among the data to gather. Convert it to a tensor or leave it out."
        )

    return map_leaves(apply, data)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient; a 0-dim tensor as one row."""
    return tensor.detach()[None] if tensor.ndim == 0 else tensor.detach()


def without_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like `tensor`, but without any rows."""
    return tensor.new_empty((0, *tensor.shape[1:]))


def _common_rows(
    facts: Sequence[Sequence[int]], counts: Sequence[int], padding_value: float | None
) -> tuple[list[int], torch.dtype]:
    """The shape of the largest row in each dimension, and the dtype of all rows.

    Args:
        facts: the message of each rank, by rank: a checksum, dimensions, dtype and shape.
        counts: rows by rank.
        padding_value: see `Ranks.gather`.

    Raises:
        ArgumentTypeError: if shapes or dtypes differ between ranks.
    """
    # A rank without rows often can't know what its rows would look like.
    telling = [theirs for theirs, count in zip(facts, counts, strict=True) if count] or facts[:1]
    if len({(ndim, dtype) for _, ndim, dtype, *_ in telling}) > 1:
        found = ", ".join(f"{ndim}-dim {_DTYPES[dtype]}" for _, ndim, dtype, *_ in facts)
        raise ArgumentTypeError(
            f"Tensors to gather must be of one kind on every rank, but they are (by rank) {found}. Convert them."
        )
    shapes = [list(shape) for _, _, _, _, *shape in telling]
    widest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    if padding_value is None and any(shape != widest for shape in shapes):
        raise ArgumentTypeError(
            f"Rows of shapes {', '.join(map(str, shapes))} (by rank) cannot be joined. Pass `padding_value`."
        )
    return widest, _DTYPES[telling[0][2]]


def _raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor` in one dimension: no backend moves every dtype. A view if the tensor is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that is in memory, so that nothing is written twice."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


class Ranks:
    """The processes of a run. With one process every method returns at once.

    Except for the properties, every method must be called by all ranks, in the same order.

    Args:
        accelerator: of this process.
        channel: the threads of a process can communicate at the same time, each on a channel of its own.
        timeout: how long a process waits for the others; None: the accelerator's.
    """

    def __init__(self, accelerator: Accelerator, channel: str = "loop", *, timeout: timedelta | None = None) -> None:
        self.count: int = accelerator.num_processes
        self.index: int = accelerator.process_index
        self.local_index: int = accelerator.local_process_index
        self.device: torch.device = accelerator.device
        self._is_alone = self.count == 1 or not dist.is_initialized()
        self._channel = channel
        self._timeout: timedelta | None = timeout or getattr(accelerator.init_handler, "timeout", None)
        if not self._is_alone:
            _control_group(dist.group.WORLD, channel, self._timeout)  # all ranks make it now, in the same order
        self._message = torch.zeros(_MESSAGE_LENGTH, dtype=torch.int64)
        self._messages = torch.zeros(self.count, _MESSAGE_LENGTH, dtype=torch.int64)
        # Reading and writing arrays is not a tensor operation.
        self._message_view, self._messages_view = self._message.numpy(), self._messages.numpy()

    @property
    def count_on_node(self) -> int:
        """Ranks on this machine; all of them if the launcher doesn't say."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.count))

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_first_of_node(self) -> bool:
        return self.local_index <= 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks, through host memory; None if there is only one."""
        # Looked up each time: a reference kept here would keep its threads alive when the process ends.
        return None if self._is_alone else _control_group(dist.group.WORLD, self._channel, self._timeout)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        return flag if self._is_alone else [1] in self.exchange_numbers([int(flag)])

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        self.exchange_numbers([])

    def exchange(self, value: Any) -> list[Any]:
        """The `value` of every rank, by rank. Small plain values only."""
        if self._is_alone:
            return [value]
        self.wait()
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def exchange_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The integers `numbers` of every rank, by rank.

        A message has room for 94 of them; if there are more, each rank must have the same number.
        """
        if self._is_alone:
            return [list(numbers)]
        per_rank = self._tell(_OTHERWISE, numbers[:_NUMBERS_OF_MESSAGE])
        for start in range(_NUMBERS_OF_MESSAGE, len(numbers), _NUMBERS_OF_MESSAGE):
            further = self._tell(_OTHERWISE, numbers[start : start + _NUMBERS_OF_MESSAGE])
            per_rank = [first + rest for first, rest in zip(per_rank, further, strict=True)]
        return per_rank

    def from_first(self, value: Any) -> Any:
        """The `value` of rank 0. Small plain values only."""
        if self._is_alone:
            return value
        self.wait()
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def do_on_first(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which rank 0 alone does. An error of ours that it raises is raised on all ranks."""
        if self._is_alone:
            return work()
        result, failure = self.from_first(_attempt(work) if self.is_first else None)
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    def do_on_all(self, work: Callable[[], Result]) -> Result:
        """The result of `work` on this rank. An error of ours that it raises on any rank is raised on all."""
        if self._is_alone:
            return work()
        result, failure = _attempt(work)
        failure = next(filter(None, [failure, *self.exchange(failure)]), None)
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The sums of `numbers` over the ranks, in float64."""
        bits = np.array(numbers, dtype=np.float64).view(np.int64)
        per_rank = np.array(self.exchange_numbers(bits.tolist())).view(np.float64)
        return per_rank.sum(axis=0).tolist()  # type: ignore[no-any-return]

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite `tensors` with rank 0's."""
        if self._is_alone:
            return
        for tensor in tensors:
            target = without_repeats(tensor.detach())
            raw_bytes = _raw_bytes(target).to(self.device)
            if len(raw_bytes):
                dist.broadcast(raw_bytes, src=0)
            if raw_bytes.data_ptr() != target.data_ptr():
                target.copy_(raw_bytes.view(target.dtype).view(target.shape))

    def sum_on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over the ranks in place, without waiting for the device."""
        if not self._is_alone:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, data: Any, padding_value: float | None = None) -> Any:
        """Tensors of all ranks, concatenated on their first dimension in the order of the ranks.

        Args:
            data: a tensor of any dtype on any device, or a nested tuple, list or dict of tensors; of the same
                structure on every rank. First dimensions may differ. A 0-dim tensor counts as one row.
            padding_value: pads the other dimensions where they differ between ranks.

        Returns:
            The same structure, with tensors on the device of the input that have the rows of all ranks. Shape and dtype
            of a tensor without rows are ignored.

        Raises:
            ArgumentTypeError: if there is anything else in `data`, if shapes, dtypes or structures do not fit together,
                or if some rank doesn't call it.
        """
        if self._is_alone:
            return map_tensors(as_rows, data)
        structure = repr(map_tensors(lambda _: None, data))
        return map_tensors(lambda tensor: self._gather_rows(as_rows(tensor), structure, padding_value), data)

    def announce_gather(self, data: Any, padding_value: float | None) -> None:
        """Before `gather`, where some ranks are idle: tell them what they must join."""
        nothing = map_tensors(lambda tensor: without_rows(tensor).cpu(), data)
        self._refuse_lonely_gather(self.exchange((nothing, padding_value)))

    def finish_round(self, *, is_idle: bool) -> None:
        """End a round in which some ranks are idle. Until then an idle rank joins what the others announce."""
        while True:
            calls = self.exchange(None if is_idle else _DONE)
            announced = [call for call in calls if call not in (None, _DONE)]
            if not announced:
                return
            self._refuse_lonely_gather(calls)
            data, padding_value = announced[0]
            self.gather(map_tensors(lambda tensor: tensor.to(self.device), data), padding_value)

    def _refuse_lonely_gather(self, calls: list[Any]) -> None:
        missing = [str(rank) for rank, call in enumerate(calls) if call == _DONE]
        if missing:
            raise ArgumentTypeError(
                f"`gather` was called on some ranks but not on rank {', '.join(missing)}, so they would wait for each "
                "other forever. Every rank that has a batch must call it equally often, outside of any condition."
            )

    def _tell(self, code: int, numbers: Sequence[int]) -> list[list[int]]:
        """The `numbers` of every rank, after checking that all ranks are here for the same purpose.

        Every exchange begins with such a message, and all have one length: if messages of different lengths met, the
        backend would end the process or wait forever.
        """
        length = len(numbers)
        self._message_view[:2] = code, length
        self._message_view[2 : 2 + length] = numbers
        dist.all_gather(list(self._messages), self._message, group=self.group)
        messages = self._messages_view.tolist()
        if any(message[0] != code for message in messages):
            self._refuse_lonely_gather([_DONE if code != _GATHER else None for code, *_ in messages])
        return [message[2 : 2 + message[1]] for message in messages]

    def _gather_rows(self, rows: torch.Tensor, structure: str, padding_value: float | None) -> torch.Tensor:
        facts = [zlib.crc32(structure.encode()), rows.ndim, _DTYPES.index(rows.dtype), *rows.shape]
        per_rank = self._tell(_GATHER, facts)
        if len({checksum for checksum, *_ in per_rank}) > 1:
            raise ArgumentTypeError(
                "Data to gather must have one structure on every rank, with the keys of a dict in one order, but it is "
                f"(by rank, None for each tensor) {', '.join(self.exchange(structure))}."
            )
        counts = [count for _, _, _, count, *_ in per_rank]
        row_shape, dtype = _common_rows(per_rank, counts, padding_value)
        padded = torch.full((max(counts), *row_shape), padding_value or 0, dtype=dtype, device=self.device)
        if len(rows):
            padded[tuple(slice(size) for size in rows.shape)] = rows
        sent = _raw_bytes(padded)
        parts = [torch.empty_like(sent) for _ in counts]
        if len(sent):
            dist.all_gather(parts, sent)
        row_bytes = len(sent) // max(1, *counts)
        joined = torch.cat([part[: count * row_bytes] for part, count in zip(parts, counts, strict=True)])
        return joined.view(dtype).view(sum(counts), *row_shape).to(rows.device)


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, PytorchAcceleratedError | None]:
    """The result of `work`, and the error of ours that it raised."""
    try:
        return work(), None
    except PytorchAcceleratedError as error:
        return None, error


class UnevenRanks:
    """Tracks how the rows of this rank currently count.

    Args:
        ranks: the processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._has_empty_rank = False
        self._counts_nothing = False

    def gather(self, data: Any, padding_value: float | None) -> Any:
        """The rows of all ranks; see `Ranks.gather`."""
        if self._has_empty_rank:
            self._ranks.announce_gather(data, padding_value)
        elif self._counts_nothing:
            data = map_tensors(without_rows, data)
        return self._ranks.gather(data, padding_value)

    @contextlib.contextmanager
    def counting_nothing(self) -> Iterator[None]:
        """In the block, this rank's rows count nowhere: `gather` leaves them out."""
        self._counts_nothing = True
        try:
            yield
        finally:
            self._counts_nothing = False

    def take_part(self, work: Callable[[], Any], *, is_idle: bool) -> Any:
        """Do `work` while some ranks are idle; an idle rank answers the others' `gather` instead. All ranks call it.

        Returns:
            The result of `work`; None on an idle rank.
        """
        result = None
        self._has_empty_rank = True
        try:
            if not is_idle:
                result = work()
        finally:
            self._has_empty_rank = False
        self._ranks.finish_round(is_idle=is_idle)
        return result


def limit_of_waiting(seconds: Any) -> timedelta | None:
    """`timeout` in the form that torch expects.

    Raises:
        ConfigurationError: if it is not a positive number of seconds.
    """
    if seconds is None:
        return None
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (is_number and 0 < seconds < timedelta.max.total_seconds()):
        raise ConfigurationError(
            f"`timeout` is {seconds!r}: pass a number of seconds, more than 0, or None for torch's default."
        )
    return timedelta(seconds=seconds)


def is_lost_contact(error: BaseException) -> bool:
    """Whether `error` means that the processes of a group have lost contact."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(words in str(error) for words in _WORDS_OF_GLOO)


def lost_peer_error(error: BaseException, *, rank: int, size: int, updates: int, newest: Path | None) -> LostPeerError:
    """The error to raise instead of torch's `error`.

    Args:
        error: the error that ended the run on this rank.
        rank: the number of this process.
        size: the number of processes.
        updates: the number of finished updates.
        newest: the newest complete training state, if one is known.
    """
    reason = str(error).partition("\n")[0]
    if newest is None:
        restart = "No training state was saved, so the run starts over"
    else:
        restart = f"The newest complete state is {newest}, from which the run resumes"
    return LostPeerError(
        f"Rank {rank} of {size} lost another rank after update {updates} ({reason}). That process has exited, is "
        "unreachable, or took longer than the timeout; its own output may say why. "
        f"{restart} when all processes are restarted."
    )
