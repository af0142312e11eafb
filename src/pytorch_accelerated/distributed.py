"""The processes of a run and what they tell each other: besides the trainer, the one door to accelerate."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState, notebook_launcher
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, send_to_device

from pytorch_accelerated.errors import ArgumentTypeError, LaunchError

__all__ = ["Ranks", "create_accelerator", "notebook_launcher", "send_to_device"]

_ASKED_BY_TRAINER = "_precision_was_asked_for_by_a_trainer"

Function = TypeVar("Function", bound=Callable[..., Any])


def create_accelerator(mixed_precision: str | None = None) -> Accelerator:
    """An `Accelerator` for this process, in the group of processes that the launcher asked for.

    Raises:
        LaunchError: if the launcher asked for several processes that would train together, and they would not.
    """
    # accelerate keeps one precision per process. One that a trainer asked for must not become the next one's; one that
    # the user's own Accelerator has stays unless something else is asked for.
    shared = AcceleratorState._shared_state
    if shared and (mixed_precision or shared.get(_ASKED_BY_TRAINER)) and mixed_precision != shared["_mixed_precision"]:
        AcceleratorState._reset_state()
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        # Without this, accelerate lets the processes that torchrun starts on a machine without an accelerator run
        # side by side, each as if it were alone.
        cpu=asked > 1 and not torch.accelerator.is_available(),
        # The plugin, not the number: the number can be overruled by an environment variable.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        step_scheduler_with_optimizer=False,
    )
    if mixed_precision is not None:
        shared[_ASKED_BY_TRAINER] = True
    if accelerator.num_processes != asked and "WORLD_SIZE" in os.environ:
        raise LaunchError(
            f"The launcher started {asked} processes that should train together (WORLD_SIZE={asked}), but accelerate "
            f"made a group of {accelerator.num_processes}. Each would train on its own and overwrite the others' "
            "files. On a machine without an accelerator set ACCELERATE_USE_CPU=true; else check the devices."
        )
    if accelerator.num_processes == 1:
        _warn_if_more_processes_were_asked_for()
    return accelerator


def _warn_if_more_processes_were_asked_for() -> None:
    asked = _processes_asked_of_accelerate_launch()
    if asked is not None and asked > 1:
        warnings.warn(
            f"`accelerate launch` was asked for {asked} processes but started one, as it does on a single machine "
            f"without an accelerator: this run uses one process. For {asked}, use: "
            f"python -m torch.distributed.run --nproc-per-node {asked} your_script.py",
            stacklevel=4,
        )


def _processes_asked_of_accelerate_launch() -> int | None:
    """What ``--num_processes`` says in the command line of the `accelerate launch` that started this process."""
    import psutil  # comes with accelerate

    try:
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent is not None else []
    except psutil.Error:
        return None
    if not any("accelerate" in word for word in words[:4]):
        return None
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name.replace("-", "_") == "__num_processes":
            value = value or "".join(words[index + 1 : index + 2])
            return int(value) if value.isdigit() else None
    return None


@functools.lru_cache(maxsize=4)
def _control_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of all ranks that talks through host memory, so that agreeing on something never waits for a device."""
    return dist.new_group(backend="gloo")  # type: ignore[no-any-return]


class Ranks:
    """The processes of a run. With one process every question is answered at once.

    Except for the properties, every method must be called by all ranks, in the same order.

    Args:
        accelerator: of this process.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.count: int = accelerator.num_processes
        self.index: int = accelerator.process_index
        self.local_index: int = accelerator.local_process_index
        self.device: torch.device = accelerator.device
        self._group = _control_group(dist.group.WORLD) if self.count > 1 and dist.is_initialized() else None
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._flag_view = self._flag.numpy()  # reading it is no tensor operation

    @property
    def count_on_node(self) -> int:
        """Ranks on this machine, as far as the launcher tells."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.count))

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_first_of_node(self) -> bool:
        return self.local_index <= 0

    def highest(self, value: int) -> int:
        """The highest `value` that any rank has."""
        if self._group is None:
            return value
        self._flag_view[0] = value
        dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group)
        return int(self._flag_view[0])

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return self.highest(int(flag)) > 0

    def wait(self) -> None:
        """Return when all ranks have come here."""
        self.highest(0)

    def exchange(self, value: Any) -> list[Any]:
        """The `value` of every rank, by rank. Small plain values only."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    def exchange_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The whole `numbers` of every rank, by rank; as many on each rank."""
        if self._group is None:
            return [list(numbers)]
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        everyones = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(everyones, mine, group=self._group)
        return [numbers.numpy().tolist() for numbers in everyones]

    def from_first(self, value: Any) -> Any:
        """What rank 0 has as `value`. Small plain values only."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The sums of `numbers` over the ranks, in float64."""
        if self._group is None:
            return list(numbers)
        total = torch.tensor(list(numbers), dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return total.numpy().tolist()  # type: ignore[no-any-return]

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite `tensors`, on this process's device, with those of rank 0."""
        if self._group is not None:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def sum_on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over the ranks in place, without waiting for the device."""
        if self._group is not None:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, data: Any, padding_value: float | None = None) -> Any:
        """Tensors of all ranks, concatenated on their first dimension in the order of the ranks.

        Args:
            data: a tensor of any dtype on any device, or a nested tuple, list or dict of tensors; of the same
                structure on every rank. First dimensions may differ. A 0-dim tensor counts as one row.
            padding_value: fills up the other dimensions where they differ between ranks.

        Returns:
            The same structure; tensors on the device of the input, first dimension the sum of all ranks'.

        Raises:
            ArgumentTypeError: if there is something else in `data`, or shapes or dtypes do not fit together.
        """
        return map_tensors(lambda tensor: self._gather_tensor(tensor, padding_value), data)

    def announce_gather(self, data: Any, padding_value: float | None) -> None:
        """Before `gather`, where some ranks are idle: tell them what to take part in."""
        self._refuse_disagreement(self.exchange((map_tensors(_without_rows, data), padding_value)))

    def finish_round(self, *, is_idle: bool) -> None:
        """End a round in which some ranks are idle. An idle rank takes part in what the others announce until then."""
        while True:
            calls = self.exchange(None if is_idle else "done")
            announced = [call for call in calls if call is not None and call != "done"]
            if not announced:
                return
            self._refuse_disagreement(calls)
            data, padding_value = announced[0]
            self.gather(map_tensors(lambda tensor: tensor.to(self.device), data), padding_value)

    def _refuse_disagreement(self, calls: list[Any]) -> None:
        if "done" in calls:
            done = [rank for rank, call in enumerate(calls) if call == "done"]
            raise ArgumentTypeError(
                f"`gather` was called for a batch on some ranks but not on rank {', '.join(map(str, done))}. Every rank "
                "that has a batch must call it equally often; take the call out of the condition it stands in."
            )

    def _gather_tensor(self, tensor: torch.Tensor, padding_value: float | None) -> torch.Tensor:
        rows = tensor.detach()[None] if tensor.ndim == 0 else tensor.detach()
        if self._group is None:
            return rows
        shapes = self._gather_shapes(rows)
        widest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        if padding_value is None and any(shape[1:] != widest[1:] for shape in shapes if shape[0]):
            raise ArgumentTypeError(
                f"Tensors of the shapes {shapes} (by rank) cannot be put below each other: they differ in more than "
                "the first dimension. Pad them, or pass `padding_value` to have it done."
            )
        fill = padding_value if padding_value is not None else 0
        padded = torch.full(widest, fill, dtype=rows.dtype, device=self.device)
        padded[tuple(slice(size) for size in rows.shape)] = rows
        everyones = [torch.empty_like(padded) for _ in range(self.count)]
        # Not every backend can move booleans.
        views = [part.view(torch.uint8) if rows.dtype is torch.bool else part for part in (*everyones, padded)]
        dist.all_gather(views[:-1], views[-1])
        return torch.cat([part[: shape[0]] for part, shape in zip(everyones, shapes, strict=True)]).to(tensor.device)

    def _gather_shapes(self, tensor: torch.Tensor) -> list[list[int]]:
        limit = 16
        facts = [tensor.ndim, _DTYPES.index(tensor.dtype), *tensor.shape, *[0] * (limit - tensor.ndim)]
        everyones = self.exchange_numbers(facts)
        with_rows = [theirs for theirs in everyones if theirs[2]] or everyones
        if len({(ndim, dtype) for ndim, dtype, *_ in with_rows}) > 1:
            kinds = [f"{ndim}-dim {_DTYPES[dtype]}" for ndim, dtype, *_ in everyones]
            raise ArgumentTypeError(
                f"Tensors to gather must be of one kind on every rank, but they are (by rank) {', '.join(kinds)}. "
                "Convert them before gathering."
            )
        return [sizes[: tensor.ndim] for _, _, *sizes in everyones]


_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def _without_rows(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    """`function` applied to every tensor of a nested tuple, list, dict or named tuple.

    Raises:
        ArgumentTypeError: if there is something else than tensors in it.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(function, item) for item in data))
    if isinstance(data, (tuple, list)):
        return type(data)(map_tensors(function, item) for item in data)
    if isinstance(data, dict):
        return {key: map_tensors(function, item) for key, item in data.items()}
    raise ArgumentTypeError(
        f"A {type(data).__name__} is among the data, where only tensors and tuples, lists and dicts of them can be. "
        "Convert it to a tensor or leave it out."
    )


def local_process_zero_only(function: Function) -> Function:
    """Decorate `function` to run on the first process of each node only; the others get None at once."""
    return _only(function, "is_local_main_process")


def world_process_zero_only(function: Function) -> Function:
    """Decorate `function` to run on the first of all processes only; the others get None at once."""
    return _only(function, "is_main_process")


def _only(function: Function, condition: str) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if getattr(PartialState(), condition) else None

    return wrapper  # type: ignore[return-value]


def local_process_zero_first(function: Function) -> Function:
    """Decorate `function` to run on the first process of each node, then on its others. All processes must call it.

    For things that one process prepares and the others then find ready, such as a download.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with PartialState().local_main_process_first():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]
