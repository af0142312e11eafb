"""Updates with the same bits on any number of processes: `Trainer(lanes=...)`.

A lane is a rank that exists in the plan only. The rows of an update are divided over the lanes, whatever the number of
processes; a process computes a block of them, one after the other, each from the same buffers and under a key of its
own. So every lane computes the same on any process. Sums over lanes are added in one fixed tree, neighbours first: a
process adds what is complete within its block, and the rest is added where the blocks meet.
"""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel

from pytorch_accelerated.data.sampling import Window, lanes_of
from pytorch_accelerated.data.updates import MicroBatch
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.seeding import seed_host_generators, seeds_of_batches, set_seed
from pytorch_accelerated.facts.settings import check_positive_count
from pytorch_accelerated.loop.context import Context
from pytorch_accelerated.loop.guarded import GuardedStep
from pytorch_accelerated.loop.hooks import overrides
from pytorch_accelerated.loop.step import Step
from pytorch_accelerated.ranks.compat.torch import acts_in_backward, add_all, copy_all, tensor_stores, version_of
from pytorch_accelerated.ranks.held import held_parts, optimizers_of
from pytorch_accelerated.ranks.numerics import listed
from pytorch_accelerated.ranks.preparation import is_replicated
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.ranks.sharding import has_shards
from pytorch_accelerated.ranks.wrappers import PARALLEL
from pytorch_accelerated.record.loss import stacked, widest_float

# Gradients and numbers of some lanes, and changes of buffers by their place.
_Sums = tuple[list[torch.Tensor], dict[int, torch.Tensor]]
# A part of a tensor: its index, and the first element and the one after the last.
_Cut = tuple[int, int, int]
_ALIGNED = 8  # elements: at any offset that is a multiple, bytes can be read as any type


def check_lanes(context: Context) -> None:
    """Reject a training run that could not keep what `lanes` promises. Must be called by all ranks."""
    lanes, parts, ranks = context.asked.given.lanes, context.parts, context.parts.ranks
    check_positive_count("lanes", lanes)
    held = held_parts(context.holder)
    others = [path for path in optimizers_of(context.holder, held) if path != "optimizer"]
    modules = list(parts.model.modules())
    threads = [number for (number,) in ranks.exchange_numbers([torch.get_num_threads()])]
    reason = None
    if lanes < ranks.count:  # type: ignore[operator]  # it is a number
        reason = f"there are {ranks.count} processes, some of which would have nothing to compute: start fewer"
    elif not is_replicated(parts.accelerator) or has_shards(parts.model):
        kind = parts.accelerator.distributed_type.value
        reason = f"the model is sharded ({kind}), and then the sums of gradients belong to others: use plain processes"
    elif any(isinstance(each, (*PARALLEL, DataParallel, nn.SyncBatchNorm)) for each in modules):
        reason = "a part of the model exchanges with other devices itself (DDP, DataParallel, SyncBatchNorm): remove it"
    elif others or parts.optimizer is None:
        reason = (
            f"{', '.join(others) or 'a hook'} steps within a batch, where a lane knows only its own gradient: "
            "pass all optimizers as `optimizer`, which step together"
        )
    elif overrides(context.trainer, "_perform_forward_and_backward_passes"):
        reason = "`_perform_forward_and_backward_passes` is overridden: override `calculate_train_batch_loss`"
    elif any(acts_in_backward(each) for each in parts.model.parameters()):
        reason = "a hook of a parameter acts in the backward pass, on the gradient of a lane alone: remove it"
    elif len(set(threads)) > 1:
        reason = f"the processes have {threads} threads, and sums depend on that: set OMP_NUM_THREADS to one number"
    if reason is not None:
        raise ConfigurationError(f"`lanes` is {lanes}, but {reason}, or leave `lanes` out.")


def seeder(device: torch.device, *parts: object) -> Callable[[int], None]:
    """A function that seeds all generators with a key for a position, which depends on every part too."""
    seed_of, seed = seeds_of_batches(*parts), seed_host_generators if device.type == "cpu" else set_seed
    return lambda position: seed(seed_of(position))


def add_up(parts: dict[int, Any], end: int, total: int, add: Callable[[Any, Any], Any]) -> None:
    """Add neighbours of the tree of `total` lanes to each other, as far as all lanes below both of them are there.

    Args:
        parts: by their first lane, lanes and sums of lanes without a gap between them; what was added is left.
        end: the lane after the last one that is there.
        total: the number of lanes of the update.
        add: adds its second argument to its first one.
    """
    width = 1
    while width < total:
        for right in sorted(parts):
            left = right - width
            if right % (2 * width) == width and left in parts and min(right + width, total) <= end:
                add(parts[left], parts.pop(right))
        width *= 2


@functools.lru_cache(maxsize=256)
def _sums_of(first: int, count: int, total: int) -> tuple[int, ...]:
    """The first lanes of the sums that are left of `count` lanes."""
    parts = dict.fromkeys(range(first, first + count))
    add_up(parts, first + count, total, lambda left, right: None)
    return tuple(parts)


class LanedStep(Step):
    """A step whose update has the same bits on any number of processes.

    There is no DDP: each lane's gradients, losses and changes of buffers are put aside when the next lane begins, and
    the ranks exchange them once, when the update is complete.
    """

    _always_completes_gradients = True

    def __init__(self, context: Context, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        ranks, lanes = context.parts.ranks, context.asked.given.lanes or 1
        self._blocks = [lanes_of(rank, lanes=lanes, ranks=ranks.count) for rank in range(ranks.count)]
        self._record, self._record_update = self._note, self._record
        roots = [context.parts.model, *held_parts(context.holder).values()]
        modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
        stores = {id(module): tensor_stores(module)[1] for module in modules}.values()
        places = {id(each): (store, key) for store in stores for key, each in store.items() if each is not None}
        self._places: list[tuple[dict[str, Any], str]] = list(places.values())
        self._changing: list[int] | None = None  # the buffers that a batch changes, once the ranks have agreed
        self._window, self._epoch, self._lane = Window(0, 0, ()), -1, -1
        self._index = self._batches_before = self._batches_now = 0
        self._slots = lanes * context.asked.settings.gradient_accumulation_steps
        self._parcels: Parcels | None = None
        self._counts_late = False  # whether hooks count items, which the ranks add up

    # ----------------------------------------------------------------------------------------------- lane after lane

    def add(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of a batch to those of its lane."""
        if micro_batch.update is not self.micro_batch.update:
            self._begin(micro_batch)
        self.micro_batch = micro_batch
        state, turn, cells = self.parts.state, self._window.turns[self._index], self._window.rounds[self._index]
        self._index += 1
        if micro_batch.is_borrowed:  # other ranks have a lane more; nothing is computed, but they may gather
            self.emit_of_batch("on_train_step_start")
            self.emit_of_batch("on_train_step_end")
        else:
            lane = self._blocks[self.parts.ranks.index][turn]
            if lane != self._lane:
                if self._lane >= 0:
                    self._end_lane()
                self._lane, state.batches_in_epoch = lane, self._batches_before
            self._seed_lane(cells[self.parts.ranks.index].start)
            super().add(micro_batch)
            self._batches_now = max(self._batches_now, state.batches_in_epoch)
        if micro_batch.is_last:
            state.batches_in_epoch = self._batches_now

    def emit_of_batch(self, event: str, **kwargs: Any) -> None:
        """Emit an event of the current batch, together with the ranks that have none: they answer its `gather`."""
        emit, micro_batch, uneven = self.control.emitter.emit, self.micro_batch, self.parts.uneven
        if micro_batch.has_empty_rank and uneven is not None:
            uneven.take_part(lambda: emit(event, **kwargs), is_idle=micro_batch.is_borrowed)
        else:
            emit(event, **kwargs)

    def _begin(self, micro_batch: MicroBatch) -> None:
        """Begin an update."""
        assert micro_batch.update.window is not None
        self._window, self._index, self._lane = micro_batch.update.window, 0, -1
        of_ranks = zip(*self._window.rounds, strict=True)
        self._filled = [
            len({turn for turn, cell in zip(self._window.turns, cells, strict=True) if cell.size}) for cells in of_ranks
        ]
        self._sums: dict[int, _Sums] = {}
        self._noted: list[tuple[int, Any, Any]] = []
        self._batches_before = self._batches_now = self.parts.state.batches_in_epoch
        epoch = self.control.training.data_epoch
        if self._epoch != epoch:
            device, seed, self._epoch = self.parts.ranks.device, self.asked.seed, epoch
            self._seed_lane, self._seed_rest = (seeder(device, name, seed, epoch) for name in ("lane", "update"))
            self._changing = None  # another module may train from now on
        self._trained = self.parameters()
        for parameter in self._trained:
            parameter.grad = None
        self._has_gradient = [False] * len(self._trained)
        self._buffers = [store[key] for store, key in self._places]
        self._versions = list(map(version_of, self._buffers))
        copied = range(len(self._buffers)) if self._changing is None else self._changing
        self._before = {index: self._buffers[index].clone() for index in copied}

    def _note(self, loss: Any, weight: Any) -> None:
        """Note the loss of a batch, instead of recording it."""
        batch = self.parts.state.batches_in_epoch - self._batches_before
        slot = self._lane * self.asked.settings.gradient_accumulation_steps + batch
        self._noted.append((slot, loss.detach() if isinstance(loss, torch.Tensor) else loss, weight))

    @torch.no_grad()
    def _end_lane(self) -> None:
        """Put aside what the lane has made: gradients and changes of buffers."""
        gradients = [each.grad for each in self._trained]
        pairs = zip(self._has_gradient, gradients, strict=True)
        self._has_gradient = [known or each is not None for known, each in pairs]
        own = [_dense(each, parameter) for each, parameter in zip(gradients, self._trained, strict=True)]
        self._sums[self._lane] = own, self._changes()
        for parameter in self._trained:
            parameter.grad = None
        add_up(self._sums, self._lane + 1, sum(self._filled), _add)

    def _numbers(self) -> torch.Tensor:
        """What this rank says of its batches: losses times weights and weights, each at a place of its own, so that any
        sum of them is exact; and which parameters have a gradient.
        """
        dtype, device = self._type
        numbers = torch.zeros(2 * self._slots + len(self._trained), dtype=dtype, device=device)
        if self._noted:
            slots, *columns = zip(*self._noted, strict=True)
            losses, weights = (stacked(column, device) for column in columns)
            at = torch.tensor(slots, device=device)
            # A weight of 0 leaves a batch out, whatever its loss, as a `LossTracker` does.
            numbers[at], numbers[at + self._slots] = torch.where(weights != 0, losses * weights, 0.0), weights
        numbers[2 * self._slots :] = torch.tensor(self._has_gradient, dtype=dtype, device=device)
        return numbers

    @property
    def _type(self) -> tuple[torch.dtype, torch.device]:
        """The type and the device of what isn't gradients."""
        return widest_float(self.parts.ranks.device), self.parts.ranks.device

    # ------------------------------------------------------------------------------------------------------- buffers

    def _changes(self) -> dict[int, torch.Tensor]:
        """By how much the lane has changed buffers, which get back what the update began with.

        Of buffers without a floating point, such as counters, those of the first lane count.
        """
        changes = {}
        for index, before in self._before.items():
            store, key = self._places[index]
            now, store[key] = store[key], self._buffers[index]
            # By value, because the kernels of BatchNorm don't count what they change.
            if self._changing is None and torch.equal(now, before):
                continue
            changes[index] = self._change_between(before, before if self._lane and not _has_mean(before) else now)
        copy_all([self._buffers[index] for index in changes], [self._before[index] for index in changes])
        return changes

    def _change_between(self, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        if not _has_mean(before):
            before, now = before.to(self._type[0]), now.to(self._type[0])
        # A constant stays as it is, infinities in it too.
        return torch.where(now == before, 0, now - before).contiguous()

    def _change_buffers(self, changes: Sequence[torch.Tensor]) -> None:
        """Move buffers by the mean of the changes of all lanes, and counters by the change of the first one."""
        for index, change in zip(self._changing or (), changes, strict=True):
            before = self._before[index]
            is_mean = _has_mean(before)
            self._buffers[index].copy_(before.to(change.dtype) + (change / sum(self._filled) if is_mean else change))

    # --------------------------------------------------------------------------------------------- the sum of all lanes

    @torch.no_grad()
    def complete_gradients(self) -> bool:
        """Add up all lanes, on all ranks, then scale the gradients to their true size."""
        if self._lane >= 0:
            self._end_lane()
        self._seed_rest(self._window.start)  # what follows is done by all ranks
        if self._changing is None:  # in the first update of a pass
            changed = sorted({index for _, changes in self._sums.values() for index in changes})
            counts = self.late_counts
            found = self.parts.ranks.exchange((changed, counts.hook_counts, bool(counts.counts)))
            self._changing = sorted({index for each, *_ in found for index in each})
            self._before = {index: self._before[index] for index in self._changing}
            self._counts_late = any(is_late for *_, is_late in found)
            if counts.hook_counts is None:  # this rank has had no row
                counts.hook_counts = next((known for _, known, _ in found if known is not None), None)
        if self._counts_late and not self.late_counts.counts:
            self.late_counts.add(0, self._window.size)  # the others wait for its number
        late = [
            key
            for index, ((store, key), before) in enumerate(zip(self._places, self._buffers, strict=True))
            if index not in self._before and (store[key] is not before or version_of(before) != self._versions[index])
        ]
        if late:
            raise ConfigurationError(
                f"With `lanes`, all updates of an epoch must change the same buffers, but {listed(late)} changed after "
                "the first one only. Change what a forward pass does between two epochs, or leave `lanes` out."
            )
        own = self._numbers()
        sums = [
            [*gradients, torch.zeros_like(own) if at else own, *self._all(changes)]
            for at, (gradients, changes) in enumerate(self._sums.values())
        ]
        whole = sums[0] if self.parts.ranks.count == 1 else self._exchanged(sums)
        count = len(self._trained)
        numbers, slots = whole[count], self._slots
        for parameter, gradient in zip(self._trained, whole, strict=False):
            parameter.grad = gradient
        if not all(self._has_gradient):
            for parameter, lanes in zip(self._trained, numbers[2 * slots :].tolist(), strict=True):
                parameter.grad = parameter.grad if lanes else None  # optimizers pass it over
        self._change_buffers(whole[count + 1 :])
        if self.parts.ranks.is_first:  # the means of losses are taken over the ranks
            total, weight = numbers[:slots].sum(), numbers[slots : 2 * slots].sum()
            self._record_update(total / weight, weight)
        self._sums = {}
        return super().complete_gradients()

    def _all(self, changes: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """A change of each buffer that changes."""
        before = self._before
        return [changes[i] if i in changes else self._change_between(before[i], before[i]) for i in before]

    def _exchanged(self, own: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """The sum of all lanes. Each rank adds up a part of it, with what the others have for that part.

        Where the blocks of ranks are branches of the tree, this sends as many bytes as DDP does.
        """
        ranks, total = self.parts.ranks, sum(self._filled)
        # A rank without rows has no sum.
        into = own[0] if own else [*(_dense(None, each) for each in self._trained), self._numbers(), *self._all({})]
        shapes = [(each.dtype, each.numel()) for each in into]
        if self._parcels is None or self._parcels.shapes != shapes:
            self._parcels = Parcels(shapes, ranks)
        pairs = zip(self._blocks, self._filled, strict=True)
        firsts = [_sums_of(block.start, count, total) for block, count in pairs]
        counts = list(map(len, firsts))
        began = time.perf_counter()
        if ranks.count == 2:
            others = self._parcels.swap_whole(own, counts[1 - ranks.index])
            flat = [[each.view(-1) for each in tensors] for tensors in own]
            received: list[Any] = [*flat, *others] if ranks.is_first else [*others, *flat]
        else:
            received = self._parcels.swap(own, counts)
        if ranks.device.type == "cpu":  # the host of a GPU does not wait
            self.parts.reports.epoch_clock.meeting_seconds += time.perf_counter() - began
        lanes = [lane for of_rank in firsts for lane in of_rank]
        add_up(dict(zip(lanes, received, strict=True)), total, total, add_all)
        if ranks.count > 2:
            self._parcels.share(into)  # from the first row of what was received, to which all others were added
        elif not own or not ranks.is_first:
            copy_all([each.view(-1) for each in into], received[0])
        return into


def _dense(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    if gradient is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return gradient.to_dense() if gradient.is_sparse else gradient.contiguous()


def _has_mean(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _add(sums: _Sums, others: _Sums) -> None:
    """Add sums of lanes to those of the lanes before."""
    add_all(sums[0], others[0])
    for index, change in others[1].items():
        sums[1][index] = sums[1][index].add_(change) if index in sums[1] else change


class GuardedLanedStep(GuardedStep, LanedStep):
    """A step with lanes that undoes an update whose losses or gradients are not finite."""


class Parcels:
    """Sums as bytes, cut into a part for each rank. The memory is used again in each update.

    Two ranks swap whole sums, in one part.

    Args:
        shapes: the type and the size of each tensor of a sum.
        ranks: the processes.

    Attributes:
        shapes: as given.
    """

    def __init__(self, shapes: list[tuple[torch.dtype, int]], ranks: Ranks) -> None:
        self.shapes, self._ranks = shapes, ranks
        self._lengths: dict[torch.dtype, int] = {}  # elements of each part
        self._cuts: list[list[list[_Cut]]] = [[] for _ in range(1 if ranks.count == 2 else ranks.count)]
        for dtype in dict.fromkeys(dtype for dtype, _ in shapes):
            sizes = {index: size for index, (kind, size) in enumerate(shapes) if kind == dtype}
            length = -(-sum(sizes.values()) // (len(self._cuts) * _ALIGNED)) * _ALIGNED
            self._lengths[dtype], begin = length, 0
            begins = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
            for cuts in self._cuts:
                ends = begin + length
                spans = {index: (max(begin, at), min(ends, at + sizes[index])) for index, at in begins.items()}
                cuts.append([(i, low - begins[i], high - begins[i]) for i, (low, high) in spans.items() if low <= high])
                begin = ends
        self._bytes = sum(length * dtype.itemsize for dtype, length in self._lengths.items())
        self._memory: dict[str, torch.Tensor] = {}

    def swap(self, own: Sequence[Sequence[torch.Tensor]], counts: Sequence[int]) -> list[list[torch.Tensor]]:
        """This rank's part of the sums of all ranks, rank by rank, each as a tensor of each type.

        Args:
            own: the sums of this rank.
            counts: the sums of each rank.
        """
        send = self._packed(own)
        received = self._rows("received", sum(counts))
        sizes = [count * self._bytes for count in counts]
        dist.all_to_all_single(received.view(-1), send.view(-1), sizes, [len(own) * self._bytes] * len(counts))
        return list(map(self._typed, received))

    def swap_whole(self, own: Sequence[Sequence[torch.Tensor]], count: int) -> list[list[torch.Tensor]]:
        """The sums of the other one of two ranks, of which it has `count`: as many bytes as `swap`, in one message."""
        other, send, received = 1 - self._ranks.index, self._packed(own), self._rows("received", count)
        messages = [(dist.isend, send), (dist.irecv, received)]
        for message in dist.batch_isend_irecv([dist.P2POp(way, rows, other) for way, rows in messages if len(rows)]):
            message.wait()
        return [
            [values for _, values in sorted(self._unpacked(row, self._cuts[0]), key=operator.itemgetter(0))]
            for row in received
        ]

    def share(self, into: Sequence[torch.Tensor]) -> None:
        """Copy the first row that was received of each rank into the tensors of a sum."""
        whole = self._rows("whole", self._ranks.count)
        dist.all_gather(list(whole), self._memory["received"][0])
        targets, values = [], []
        for row, cuts in zip(whole, self._cuts, strict=True):
            for (index, low, high), value in self._unpacked(row, cuts):
                targets.append(into[index].view(-1)[low:high])
                values.append(value)
        copy_all(targets, values)

    def _packed(self, own: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The sums of this rank in memory: part after part."""
        send = self._rows("send", len(self._cuts) * len(own))
        rows = iter(send)
        for cuts in self._cuts:
            for tensors in own:
                for part, of_type in zip(self._typed(next(rows)), cuts, strict=True):
                    pieces = [tensors[index].reshape(-1)[low:high] for index, low, high in of_type]
                    pieces.append(part.new_zeros(len(part) - sum(map(len, pieces))))
                    torch.cat(pieces, out=part)
        return send

    def _unpacked(self, row: torch.Tensor, cuts: list[list[_Cut]]) -> Iterator[tuple[_Cut, torch.Tensor]]:
        """The pieces of a part."""
        for part, of_type in zip(self._typed(row), cuts, strict=True):
            sizes = [high - low for _, low, high in of_type]
            yield from zip(of_type, torch.split(part[: sum(sizes)], sizes), strict=True)

    def _rows(self, name: str, count: int) -> torch.Tensor:
        if name not in self._memory or len(self._memory[name]) < count:
            self._memory[name] = torch.empty(count, self._bytes, dtype=torch.uint8, device=self._ranks.device)
        return self._memory[name][:count]

    def _typed(self, row: torch.Tensor) -> list[torch.Tensor]:
        pieces = torch.split(row, [length * dtype.itemsize for dtype, length in self._lengths.items()])
        return [piece.view(dtype) for piece, dtype in zip(pieces, self._lengths, strict=True)]


class LaneLosses:
    """The losses of an evaluation, which are recorded in the order of the rows, whoever has computed them.

    Args:
        ranks: the processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._losses: list[tuple[int, Any, Any]] = []

    def add(self, start: int, loss: Any, weight: Any) -> None:
        """Add the mean loss of the batch that begins at a position of the evaluation."""
        self._losses.append((start, loss, weight))

    def record(self, record: Callable[[Any, Any], None]) -> None:
        """Record the losses of all ranks on the first one. Must be called by all ranks; waits for the device."""
        own = [(start, float(loss), float(weight)) for start, loss, weight in self._losses]
        for _, loss, weight in sorted(each for of_rank in self._ranks.exchange(own) for each in of_rank):
            if self._ranks.is_first:
                record(loss, weight)


def kind_of_step(*, is_guarded: bool) -> type[Step]:
    """The kind of step of a run with lanes."""
    return GuardedLanedStep if is_guarded else LanedStep
