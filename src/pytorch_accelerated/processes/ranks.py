"""The processes of a run and what they tell each other: besides the trainer, the one door to accelerate."""

from __future__ import annotations

import atexit
import functools
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState, notebook_launcher
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    is_fp8_available,
    send_to_device,
)

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, LaunchError, PytorchAcceleratedError
from pytorch_accelerated.optional import require
from pytorch_accelerated.processes.launching import check_group, join_world, meeting, must_group_on_cpu
from pytorch_accelerated.processes.plugins import check_plugins, refuse_parallelism

__all__ = ["Ranks", "create_accelerator", "notebook_launcher", "send_to_device"]

_ASKED_BY_TRAINER = "_precision_was_asked_for_by_a_trainer"
_USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
_PRECISIONS = ("no", "fp16", "bf16", "fp8")

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")


def create_accelerator(
    mixed_precision: str | None = None,
    *,
    cpu: bool = False,
    timeout: timedelta | None = None,
    ddp_options: Mapping[str, Any] | None = None,
    deepspeed_config: Mapping[str, Any] | None = None,
) -> Accelerator:
    """An `Accelerator` for this process, in the group of processes that the launcher asked for.

    Args:
        mixed_precision: see `Trainer`.
        cpu: True to use the CPU, whatever else there is.
        timeout: how long a process waits for the others; default: as long as torch has it.
        ddp_options: for torch's `DistributedDataParallel`, laid over ours.
        deepspeed_config: what DeepSpeed is told, complete; None: without it.

    Raises:
        ConfigurationError: if there is no such precision, or it or a plugin of accelerate would do nothing on this
            device; or if the process is set up for DeepSpeed, but there is no config.
        LaunchError: if the launcher asked for several processes that would train together, and they would not.
    """
    if mixed_precision is not None and str(mixed_precision) not in _PRECISIONS:
        raise ConfigurationError(
            f"`mixed_precision` is {mixed_precision!r}, which is no precision that accelerate knows. Choose 'no', "
            "'fp16', 'bf16' or 'fp8', or None for what accelerate is configured to."
        )
    if (mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")) == "fp8" and not is_fp8_available():
        raise ConfigurationError(
            "The precision is fp8, by `mixed_precision` or by accelerate's configuration, but neither Transformer "
            "Engine nor torchao is installed, which compute in it. Install one of them, or use 'bf16'."
        )
    refuse_parallelism()
    # accelerate keeps one precision per process. One that a trainer asked for must not become the next one's; one that
    # the user's own Accelerator has stays unless something else is asked for.
    shared = AcceleratorState._shared_state
    if shared and (mixed_precision or shared.get(_ASKED_BY_TRAINER)) and mixed_precision != shared["_mixed_precision"]:
        AcceleratorState._reset_state()
    world = join_world()
    plugin = None
    if deepspeed_config is not None:
        process_state(deepspeed=True)
        AcceleratorState._reset_state()  # it has one config per process
        plugin = DeepSpeedPlugin(hf_ds_config=dict(deepspeed_config))
    elif os.environ.get(_USE_DEEPSPEED, "").lower() in ("1", "true"):
        _refuse_deepspeed()
    with meeting(world):
        accelerator = Accelerator(
            mixed_precision=mixed_precision,
            cpu=plugin is None and (cpu or must_group_on_cpu(world)),
            deepspeed_plugin=plugin,
            # The plugin, not the number: the number can be overruled by an environment variable.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[
                # Gradients live in the buckets that are sent: one copy of them less, in memory and in time.
                DistributedDataParallelKwargs(**{"gradient_as_bucket_view": True, **(ddp_options or {})}),
                *([] if timeout is None else [InitProcessGroupKwargs(timeout=timeout)]),
            ],
        )
    if mixed_precision is not None:
        shared[_ASKED_BY_TRAINER] = True
    check_group(accelerator, world)
    check_plugins(accelerator)
    _limit_waiting(timeout)
    _refuse_fp16_on_cpu(accelerator)
    return accelerator


def given_accelerator(given: Any, timeout: timedelta | None = None) -> Accelerator:
    """The user's own `Accelerator`: `given`, or what that function returns.

    Args:
        given: it, or the function.
        timeout: how long a process waits for the others.

    Raises:
        ArgumentTypeError: if it is something else.
        ConfigurationError: if it accumulates gradients itself, its precision would do nothing on its device, or it is
            one for DeepSpeed, or it was made with a plugin that does nothing on its device.
        LaunchError: if several processes should train together, but this Accelerator is on its own.
    """
    world = join_world()
    if must_group_on_cpu(world):
        process_state()  # an Accelerator that is made from now on is part of it
    accelerator = given() if callable(given) and not isinstance(given, Accelerator) else given
    if not isinstance(accelerator, Accelerator):
        raise ArgumentTypeError(
            f"`accelerator` is {given!r}, from which no Accelerator can be had. Pass an `accelerate.Accelerator`, or a "
            "function that returns one."
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ConfigurationError(
            f"The accelerator has gradient_accumulation_steps={accelerator.gradient_accumulation_steps}, but this "
            "trainer accumulates by itself: gradients would be divided twice. Leave it at 1, and pass "
            "`gradient_accumulation_steps` to `train`."
        )
    check_group(accelerator, world)
    _limit_waiting(timeout)
    _refuse_fp16_on_cpu(accelerator)
    if uses_deepspeed(accelerator):
        _refuse_deepspeed()
    check_plugins(accelerator)
    return accelerator


def _limit_waiting(timeout: timedelta | None) -> None:
    """Also for a group that was made before, by an accelerator, say, or by what ran before the trainer."""
    world: Any = dist.group.WORLD if dist.is_initialized() else None
    if timeout is not None and world is not None:
        world.set_timeout(timeout)


def _refuse_fp16_on_cpu(accelerator: Accelerator) -> None:
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise ConfigurationError(
            "The precision is fp16, by `mixed_precision` or by accelerate's configuration, but the device is the CPU, "
            "where accelerate would silently train without it. Use 'bf16' or 'no'."
        )


def _refuse_deepspeed() -> NoReturn:
    raise ConfigurationError(
        "This process is set up for DeepSpeed, by an Accelerator, by accelerate's configuration or by an earlier "
        "trainer, but this trainer is not told how to clip and accumulate with it. Use the Trainer of "
        "pytorch_accelerated.huggingface with TrainingArguments(deepspeed=...), or start without DeepSpeed."
    )


def uses_deepspeed(state: Any) -> bool:
    """Whether accelerate has set this process up for DeepSpeed.

    Args:
        state: an `Accelerator`, or what `process_state` returns.
    """
    return bool(state.distributed_type == DistributedType.DEEPSPEED)


def process_state(*, cpu: bool = False, deepspeed: bool = False, **group_options: Any) -> PartialState:
    """What accelerate knows of this process, also before there is a trainer. The first call decides for all.

    Args:
        cpu: True to use the CPU, whatever else there is.
        deepspeed: whether the process shall train with DeepSpeed.
        group_options: for torch's `init_process_group`, if this makes the group of all processes.

    Raises:
        LaunchError: if no launcher has started the process, which DeepSpeed needs.
        MissingDependencyError: if DeepSpeed is asked for, and not there.
    """
    if not deepspeed:
        if PartialState._shared_state:
            return PartialState()
        world = join_world()
        with meeting(world):
            return PartialState(cpu=cpu or must_group_on_cpu(world), **group_options)
    require("deepspeed", extra="deepspeed", needed_by="`deepspeed`")
    world = join_world()
    if "WORLD_SIZE" not in os.environ:
        raise LaunchError(
            "`deepspeed` is given, but this process was started without a launcher, which DeepSpeed needs also for a "
            "single one. Start it with: torchrun --nproc-per-node 1 your_script.py"
        )
    os.environ[_USE_DEEPSPEED] = "true"  # the only way to tell accelerate
    if not torch.accelerator.is_available():
        group_options["backend"] = "gloo"  # without it accelerate takes each process for the only one
    with meeting(world):
        return PartialState(**group_options)


@functools.lru_cache(maxsize=4)
def _control_group(world: dist.ProcessGroup, channel: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """A group of all ranks that talks through host memory, so that agreeing on something never waits for a device."""
    atexit.register(_leave_groups)
    return dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[no-any-return]


def _leave_groups() -> None:
    """Let go of all groups while Python still runs.

    The threads of a gloo group that is alive when the process ends now and then abort it, after all its work is done.
    """
    _control_group.cache_clear()
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


class Ranks:
    """The processes of a run. With one process every question is answered at once.

    Except for the properties, every method must be called by all ranks, in the same order.

    Args:
        accelerator: of this process.
        channel: what is said on one is not mixed up with what another thread says on another at the same time.
        timeout: how long a process waits for the others; None: as long as the accelerator says.
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
        # Reading and writing arrays is no tensor operation.
        self._message_view, self._messages_view = self._message.numpy(), self._messages.numpy()

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

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Of all ranks, through host memory; None where there is no other."""
        # Looked up each time: a reference kept here would keep its threads alive when the process ends.
        return None if self._is_alone else _control_group(dist.group.WORLD, self._channel, self._timeout)

    def highest(self, value: int) -> int:
        """The highest `value` that any rank has."""
        return max(number for (number,) in self.exchange_numbers([value]))

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return flag if self._is_alone else self.highest(int(flag)) > 0

    def wait(self) -> None:
        """Return when all ranks have come here."""
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
        """The whole `numbers` of every rank, by rank."""
        return [list(numbers)] if self._is_alone else self._tell(_OTHERWISE, numbers)

    def from_first(self, value: Any) -> Any:
        """What rank 0 has as `value`. Small plain values only."""
        if self._is_alone:
            return value
        self.wait()
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def do_on_first(self, work: Callable[[], Result]) -> Result:
        """What `work` returns on rank 0, which alone does it; an error of ours that it raises goes up on all ranks."""
        if self._is_alone:
            return work()
        result: Any = None
        failure: PytorchAcceleratedError | None = None
        if self.is_first:
            try:
                result = work()
            except PytorchAcceleratedError as error:
                failure = error
        result, failure = self.from_first((result, failure))
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    def do_on_all(self, work: Callable[[], Result]) -> Result:
        """What `work` returns on this rank; an error of ours that it raises on any goes up on all ranks."""
        if self._is_alone:
            return work()
        result: Any = None
        failure: PytorchAcceleratedError | None = None
        try:
            result = work()
        except PytorchAcceleratedError as error:
            failure = error
        failure = next(filter(None, [failure, *self.exchange(failure)]), None)
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The sums of `numbers` over the ranks, in float64."""
        bits = np.array(numbers, dtype=np.float64).view(np.int64)
        everyones = np.array(self.exchange_numbers(bits.tolist())).view(np.float64)
        return everyones.sum(axis=0).tolist()  # type: ignore[no-any-return]

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite `tensors`, on this process's device, with those of rank 0."""
        if self._is_alone:
            return
        for tensor in tensors:
            target = _without_repeats(tensor.detach())
            octets = _octets(target)
            if len(octets):
                dist.broadcast(octets, src=0)
            if octets.data_ptr() != target.data_ptr():
                target.copy_(octets.view(target.dtype).view(target.shape))

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
            padding_value: fills up the other dimensions where they differ between ranks.

        Returns:
            The same structure; tensors on the device of the input, first dimension the sum of all ranks'. Of a rank
            without rows neither shape nor dtype count.

        Raises:
            ArgumentTypeError: if there is something else in `data`, shapes, dtypes or structures do not fit together,
                or some rank has gone on without calling it.
        """
        if self._is_alone:
            return map_tensors(_as_rows, data)
        structure = repr(map_tensors(lambda _: None, data))
        return map_tensors(lambda tensor: self._gather_rows(_as_rows(tensor), structure, padding_value), data)

    def announce_gather(self, data: Any, padding_value: float | None) -> None:
        """Before `gather`, where some ranks are idle: tell them what to take part in."""
        nothing = map_tensors(lambda tensor: without_rows(tensor).cpu(), data)
        self._refuse_disagreement(self.exchange((nothing, padding_value)))

    def finish_round(self, *, is_idle: bool) -> None:
        """End a round in which some ranks are idle. An idle rank takes part in what the others announce until then."""
        while True:
            calls = self.exchange(None if is_idle else _DONE)
            announced = [call for call in calls if call not in (None, _DONE)]
            if not announced:
                return
            self._refuse_disagreement(calls)
            data, padding_value = announced[0]
            self.gather(map_tensors(lambda tensor: tensor.to(self.device), data), padding_value)

    def _refuse_disagreement(self, calls: list[Any]) -> None:
        done = [rank for rank, call in enumerate(calls) if call == _DONE]
        if done:
            self._refuse_lonely_gather(missing=done)

    def _refuse_lonely_gather(self, missing: list[int]) -> NoReturn:
        raise ArgumentTypeError(
            f"`gather` was called on some ranks but not on rank {', '.join(map(str, missing))}, so they would wait for "
            "each other for ever. Every rank that has a batch must call it equally often; take the call out of the "
            "condition it stands in."
        )

    def _tell(self, code: int, numbers: Sequence[int]) -> list[list[int]]:
        """The `numbers` of every rank, after making sure that all are here for the same thing.

        Whatever ranks say to each other begins with such a message of one length: where messages of two lengths meet,
        the backend ends the process or waits for ever.
        """
        length = len(numbers)
        self._message_view[:2] = code, length
        self._message_view[2 : 2 + length] = numbers
        dist.all_gather(list(self._messages), self._message, group=self.group)
        messages = self._messages_view.tolist()
        if any(message[0] != code for message in messages):
            self._refuse_lonely_gather(missing=[rank for rank, (code, *_) in enumerate(messages) if code != _GATHER])
        return [message[2 : 2 + message[1]] for message in messages]

    def _gather_rows(self, rows: torch.Tensor, structure: str, padding_value: float | None) -> torch.Tensor:
        facts = [zlib.crc32(structure.encode()), rows.ndim, _DTYPES.index(rows.dtype), *rows.shape]
        everyones = self._tell(_GATHER, facts)
        if len({checksum for checksum, *_ in everyones}) > 1:
            structures = ", ".join(self.exchange(structure))
            raise ArgumentTypeError(
                "Data to gather must have one structure on every rank, with the keys of a dict in one order, but it is "
                f"(by rank, None for each tensor) {structures}. Gather the same things on every rank."
            )
        counts = [count for _, _, _, count, *_ in everyones]
        # A rank without rows has often no way to know what they would be like.
        telling = [theirs for theirs, count in zip(everyones, counts, strict=True) if count] or everyones[:1]
        kinds = {(ndim, dtype) for _, ndim, dtype, *_ in telling}
        if len(kinds) > 1:
            found = ", ".join(f"{ndim}-dim {_DTYPES[dtype]}" for _, ndim, dtype, *_ in everyones)
            raise ArgumentTypeError(
                f"Tensors to gather must be of one kind on every rank, but they are (by rank) {found}. Convert them "
                "before gathering."
            )
        row_shapes = [shape for _, _, _, _, *shape in telling]
        widest = [max(sizes) for sizes in zip(*row_shapes, strict=True)]
        if padding_value is None and any(shape != widest for shape in row_shapes):
            raise ArgumentTypeError(
                f"Tensors whose rows have the shapes {', '.join(map(str, row_shapes))} (by rank) cannot be put below "
                "each other. Pad them, or pass `padding_value` to have it done."
            )
        dtype = _DTYPES[telling[0][2]]
        padded = torch.full((max(counts), *widest), padding_value or 0, dtype=dtype, device=self.device)
        if len(rows):
            padded[tuple(slice(size) for size in rows.shape)] = rows
        # Bytes travel, because not every backend can move every dtype.
        octets = _octets(padded)
        parts = [torch.empty_like(octets) for _ in counts]
        if len(octets):
            dist.all_gather(parts, octets)
        row_length = len(octets) // max(1, *counts)
        joined = torch.cat([part[: count * row_length] for part, count in zip(parts, counts, strict=True)])
        return joined.view(dtype).view(sum(counts), *widest).to(rows.device)


# The first number of a message: whether it belongs to a `gather` that user code called, or to anything else.
_OTHERWISE, _GATHER = 0, 1
_MESSAGE_LENGTH = 80  # a tensor has 64 dimensions at the most
_DONE = "done"

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[None] if tensor.ndim == 0 else tensor.detach()


def without_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is like `tensor`, but has no rows."""
    return tensor.new_empty((0, *tensor.shape[1:]))


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """What is in `tensor` as uint8, in one dimension; its own memory if that is in order."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """An expanded tensor as small as it is in memory: what is written to it is not written several times."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
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
        return function(*args, **kwargs) if getattr(process_state(), condition) else None

    return wrapper  # type: ignore[return-value]


def local_process_zero_first(function: Function) -> Function:
    """Decorate `function` to run on the first process of each node, then on its others. All processes must call it.

    For things that one process prepares and the others then find ready, such as a download.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with process_state().local_main_process_first():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]
