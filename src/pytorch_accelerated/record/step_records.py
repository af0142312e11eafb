"""What a run measures within its epochs: step records, times, and what makes and keeps them."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pytorch_accelerated.record.loss import LossTracker, Numbers

if TYPE_CHECKING:
    from pytorch_accelerated.record.history import RunHistory

_RATES = 5  # the place of `learning_rates` in a record
_COLUMNS = 11  # of the table, before the learning rates
_UNKNOWN = -1
_SECONDS_OF_SLOW_DATA = 1.0
_SHARE_WORTH_WORKERS, _MOST_WORKERS = 0.1, 8
_SHARE_OF_SLOW_RANK = 0.2  # of the time, in which the others wait for it


try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]


class RankTimes(NamedTuple):
    """Where one rank spent the time of a step record, in seconds.

    Attributes:
        compute: all that is not below: forward and backward pass, callbacks, the optimizer; and waiting for the others
            anywhere else, as BatchNorm does in the forward pass.
        data_wait: waiting for the next batch.
        others_wait: waiting for ranks that came later to the exchange of gradients, in the last backward pass of each
            update. It is 0 on GPUs, since the host does not wait there.
    """

    compute: float
    data_wait: float
    others_wait: float


class SlowRank(NamedTuple):
    """The rank for which the others wait.

    Attributes:
        rank: its index.
        share: of the time, what the others waited for it on average, beyond its own waiting for them; or what it waited
            for data beyond the others, if that is more.
        cause: "data" if it waits longer than the others for its batches, more than it computes longer; "computation"
            otherwise.
    """

    rank: int
    share: float
    cause: str

    def in_words(self) -> str:
        """Text such as "the others waited 31% of the time for rank 2 (data)"."""
        return f"the others waited {self.share:.0%} of the time for rank {self.rank} ({self.cause})"


class StepRecord(NamedTuple):
    """What was measured over some consecutive updates of one epoch.

    Each update belongs to exactly one record, and all ranks have the same records: losses and samples count all
    ranks, times are rank 0's.

    Attributes:
        epoch: counted from 1.
        update: the number of optimizer updates up to and including the last one of the record, since the history was
            reset.
        samples: the samples used up to and including that update, over all ranks, including skipped updates.
        seconds: wall time of training until the last update of the record, with evaluations and saves. A resumed run
            continues the time of its training state.
        train_loss: the mean training loss per item over the updates of the record, the batches of each, and all ranks,
            weighted as in ``train_loss_epoch``. Losses that
            `nonfinite_policy` leaves out do not count; NaN if none does, or if one that counts is NaN.
        learning_rates: one for each parameter group of the optimizer, as set after the last update of the record, so
            they belong to the update that follows; empty if the trainer has no optimizer.
        gradient_norm: the mean norm of the gradients before clipping; None unless they are clipped by norm.
        samples_per_second: the samples of the record, over all ranks, per second of training without evaluations and
            saves; of a record in which a run was resumed, those after that.
        data_wait_share: the share of those seconds in which rank 0 waited for the next batch, between 0 and 1.
        peak_memory: the most bytes that a rank has used so far: allocated on its GPU, or resident in its process if it
            trains on the CPU; None if unknown.
        ranks: where each rank spent the time of the record; empty if there is one process.
    """

    epoch: int
    update: int
    samples: int
    seconds: float
    train_loss: float
    learning_rates: tuple[float, ...]
    gradient_norm: float | None
    samples_per_second: float
    data_wait_share: float
    peak_memory: int | None
    ranks: tuple[RankTimes, ...] = ()

    @property
    def slow_rank(self) -> SlowRank | None:
        """The rank for which the others waited at least 20 % of the time of the record; None if there is none.

        Of a short record, that may be chance: `RunHistory.slow_rank` looks at more of them.
        """
        return slow_rank_in([self])

    def columns(self) -> dict[str, float]:
        """The values of the record as columns of a table, without those that are None, and without `ranks`.

        The learning rate of the first parameter group is `learning_rate`; other groups have `learning_rate_1` and so
        on.
        """
        values: dict[str, Any] = {}
        for name, value in zip(self._fields, self, strict=True):
            if name == "learning_rates":
                rates = enumerate(self.learning_rates)
                values |= {f"learning_rate_{group}" if group else "learning_rate": rate for group, rate in rates}
            elif name != "ranks" and value is not None:
                values[name] = value
        return values


def slow_rank_in(records: Sequence[StepRecord]) -> SlowRank | None:
    """The rank for which the others waited in all of `records` together, if that took long enough."""
    counts = {len(record.ranks) for record in records}
    if len(counts) != 1 or 0 in counts:
        return None
    times = np.array([record.ranks for record in records]).sum(axis=0)
    rank = int((times[:, 1] - times[:, 2]).argmax())
    more_computing, more_data, more_waiting = np.delete(times, rank, axis=0).mean(axis=0) - times[rank]
    # Ranks go in step: while one waits for data, the others do at some point, even where that isn't measured.
    waited, seconds = max(more_waiting, -more_data), times[rank].sum()
    if not seconds or waited < _SHARE_OF_SLOW_RANK * seconds:
        return None
    return SlowRank(rank, float(waited / seconds), "data" if more_data < more_computing else "computation")


def records_of(values: Iterable[Sequence[Any]] | torch.Tensor) -> list[StepRecord]:
    """The records of `table_of`, or of a history saved by version 1.0, a list with a list for each.

    Raises:
        ValueError, TypeError: if `values` is neither.
    """
    if not isinstance(values, torch.Tensor):
        return [StepRecord._make([*row[:_RATES], tuple(row[_RATES]), *row[_RATES + 1 :], ()]) for row in values]
    if values.dtype != torch.float64 or values.dim() != 2 or values.shape[1] < _COLUMNS:
        raise ValueError(f"step records are a {values.dtype} tensor of shape {tuple(values.shape)}")
    records = []
    for epoch, update, samples, seconds, loss, has_norm, norm, speed, wait, peak, groups, *rest in values.tolist():
        place = int(epoch), int(update), int(samples)
        peak_memory = None if peak == _UNKNOWN else int(peak)
        count, *times = rest[int(groups) :] or [0.0]  # tables of earlier versions end with the rates, or zeros
        ranks = tuple([RankTimes(*times[start : start + 3]) for start in range(0, 3 * int(count), 3)])
        measured: Any = tuple(rest[: int(groups)]), norm if has_norm else None, speed, wait, peak_memory, ranks
        records.append(StepRecord(*place, seconds, loss, *measured))
    return records


def table_of(records: Sequence[StepRecord]) -> torch.Tensor:
    """The records as a float64 matrix with a row for each. This is exact: their integers are below 2**53."""
    if not records:
        return torch.zeros(0, _COLUMNS, dtype=torch.float64)
    # By columns, because a long run has hundreds of thousands of records, and each state has them all.
    *first, rates, norms, speeds, waits, peaks, ranks = _columns(records, len(StepRecord._fields))
    has_norm, known_norms = [norm is not None for norm in norms], [norm or 0.0 for norm in norms]
    known_peaks = [_UNKNOWN if peak is None else peak for peak in peaks]
    tails: list[tuple[float, ...]] = [
        # Times of ranks stand behind the rates, where earlier versions read nothing.
        (len(own), *own, len(times), *np.ravel(times)) if times else (len(own), *own)
        for own, times in zip(rates, ranks, strict=True)
    ]
    width = max(map(len, tails))
    ends = _columns([tail + (0.0,) * (width - len(tail)) for tail in tails], width)
    columns = [*first, has_norm, known_norms, speeds, waits, known_peaks, *ends]
    return torch.from_numpy(np.array(columns, dtype=np.float64).T.copy())


def _columns(rows: Sequence[Sequence[Any]], width: int) -> list[list[Any]]:
    """The columns of a table of rows. For a long history, `zip(*rows)` takes ten times as long."""
    return [list(map(operator.itemgetter(column), rows)) for column in range(width)]


def usual_interval(updates: int) -> int:
    """The updates between two step records of a run with this many updates: a power of two.

    Runs of up to 255 updates have a record for each, runs from 1024 to 8191 one for every eighth, and longer ones have
    between 1024 and 2047. Making one takes some microseconds, and logging it to TensorBoard some fifty, which should
    not show.
    """
    return 1 << (max(updates // 1024, min(updates // 128, 8), 1).bit_length() - 1)


class EpochTiming(NamedTuple):
    """The time of one training epoch on this rank, without evaluations and saves inside it.

    Attributes:
        epoch: counted from 1.
        seconds: from its first to its last update.
        data_wait_seconds: the part in which the loop waited for the next batch. On a GPU, the run loses less than this,
            since the GPU may still be working while the loop waits.
        num_workers: worker processes that fetched the last batch; None if unknown.
    """

    epoch: int
    seconds: float
    data_wait_seconds: float
    num_workers: int | None = None

    @property
    def data_wait_share(self) -> float:
        """The share of waiting in the time of the epoch, between 0 and 1."""
        return self.data_wait_seconds / self.seconds if self.seconds else 0.0

    def is_slowed_by_data(self, share: float) -> bool:
        """Whether waiting took at least this share of the time, and a second: less is not worth a word."""
        return self.data_wait_seconds >= _SECONDS_OF_SLOW_DATA and self.data_wait_share >= share

    def workers_to_give(self, processors: int) -> int:
        """The worker processes that would have fetched as fast as this process computed; 0 where none are worth it.

        Workers save at most the waiting, and cost up to a tenth themselves; on one processor nobody computes meanwhile.
        Each copies what rows need, so there are at most 8.
        """
        if self.num_workers != 0 or processors < 2 or not self.is_slowed_by_data(_SHARE_WORTH_WORKERS):
            return 0
        seconds_of_computing = max(self.seconds - self.data_wait_seconds, 1e-3)
        return min(_MOST_WORKERS, processors, int(self.data_wait_seconds / seconds_of_computing) + 1)


class EpochClock:
    """Measures the time of one training epoch, from its construction on.

    Args:
        epoch: counted from 1.

    Attributes:
        epoch: counted from 1.
        meeting_seconds: the time of the backward passes in which this rank meets the others; 0 if there are none.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.meeting_seconds = 0.0
        self._started = time.perf_counter()
        self._paused_seconds = 0.0
        self._source: Any = None
        self._waited_before = 0.0

    def watch(self, source: Any) -> None:
        """Count the seconds in `source.waiting` from now on; `source.num_workers` processes fetch its batches."""
        self._source, self._waited_before = source, source.waiting.seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the epoch."""
        paused = time.perf_counter()
        try:
            yield
        finally:
            self._paused_seconds += time.perf_counter() - paused

    @property
    def seconds(self) -> float:
        """The time so far."""
        return time.perf_counter() - self._started - self._paused_seconds

    @property
    def waited_seconds(self) -> float:
        """The part of it in which the loop waited for batches."""
        return 0.0 if self._source is None else self._source.waiting.seconds - self._waited_before

    def times(self) -> tuple[float, float, float]:
        """The time so far, and the parts of it in which the loop waited for batches, and met the other ranks."""
        return self.seconds, self.waited_seconds, self.meeting_seconds

    def read(self) -> EpochTiming:
        """What is recorded of the epoch."""
        workers = None if self._source is None else self._source.num_workers
        return EpochTiming(self.epoch, self.seconds, self.waited_seconds, workers)


class Pace:
    """Schedules an action after certain updates, so that it happens about every `seconds`, at first after each update.

    An agreement of ranks takes a fraction of a millisecond: too long for each update, but negligible now and then. All
    ranks must act after the same update, so one of them proposes when, and all follow its proposal.

    Args:
        seconds: the intended time between two actions.
        clock: returns seconds.
        updates: those before; the action is due after the next one.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic, updates: int = 0) -> None:
        self._seconds = seconds
        self._clock = clock
        self.go_on(updates, 1)

    def is_due(self, updates: int) -> bool:
        """Whether the action is due after `updates`."""
        return updates >= self._due

    def proposal(self, updates: int) -> int:
        """The number of updates until the next action by this rank's clock, at most twice the last one."""
        per_second = (updates - self._last) / max(self._clock() - self._looked_at, 1e-9)
        return max(1, min(2 * self._between, int(per_second * self._seconds)))

    def go_on(self, updates: int, between: int) -> None:
        """Record that the action happened after `updates`; the next one is due `between` updates later."""
        self._looked_at = self._clock()
        self._last, self._between, self._due = updates, between, updates + between


class _Mark(NamedTuple):
    """The end of a record whose losses have not been read.

    Attributes:
        update, samples, seconds: the record's.
        learning_rates: the record's, which may still be tensors.
        times: of the epoch so far, by its clock.
    """

    update: int
    samples: int
    learning_rates: list[Any]
    seconds: float
    times: tuple[float, float, float]


class StepRecorder:
    """Adds step records to a history, without transfers from the device other than the losses.

    Args:
        history: receives the records.
        losses: of batches.
        gradient_norms: of updates.
        device: of the model.
        interval: updates between two records, as the user asks for them; None to choose it.
        updates: of the whole run; None if it is unknown.

    Attributes:
        interval: updates between two records; the last record of an epoch may have fewer.
    """

    def __init__(
        self,
        history: RunHistory,
        losses: LossTracker,
        gradient_norms: LossTracker,
        device: torch.device,
        interval: int | None,
        updates: int | None,
    ) -> None:
        self.interval = interval or (1 if updates is None else usual_interval(updates))
        self._grows = interval is None and updates is None
        self._history = history
        self._losses = losses
        self._gradient_norms = gradient_norms
        self._device = device
        self._marks: list[_Mark] = []
        last = history.step_records[-1] if history.step_records else None
        self._samples = 0 if last is None else last.samples
        self._started = time.perf_counter() - (0.0 if last is None else last.seconds)
        self.start_epoch(0, 0, EpochClock(1))

    def start_epoch(self, updates: int, samples_in_epoch: int, clock: EpochClock) -> None:
        """Begin an epoch, or continue one.

        Args:
            updates: of the run, at the beginning of the epoch or at the last reading of losses in it.
            samples_in_epoch: samples of the epoch that have been used.
            clock: times the epoch.
        """
        self._marks.clear()
        self._samples_before_epoch = self._samples - samples_in_epoch
        self._new_from, self._times_before = self._samples, (0.0, 0.0, 0.0)  # where the last record ended
        self._clock = clock
        self.grow(updates)

    def grow(self, updates: int) -> None:
        """Choose the interval again after `updates` of the run, if their final number is unknown."""
        if self._grows:
            self.interval = usual_interval(updates)

    def mark(self, samples_in_epoch: int, groups: Sequence[dict[str, Any]]) -> None:
        """End a record after the current update, unless the last one has ended there.

        Args:
            samples_in_epoch: samples of the epoch that have been used.
            groups: the parameter groups of the optimizer.
        """
        # A resumed run with nothing left to do ends here too, behind a record that its history was loaded with.
        ended = self._marks[-1:] or self._history.step_records[-1:]
        update, samples = self._history.updates_done, self._samples_before_epoch + samples_in_epoch
        if update <= (ended[0].update if ended else 0):
            return
        # A rate in a tensor is filled in place by the scheduler, so the record takes a copy, which stays on the device.
        rates = [rate.clone() if isinstance(rate := group["lr"], torch.Tensor) else rate for group in groups]
        self._marks.append(_Mark(update, samples, rates, time.perf_counter() - self._started, self._clock.times()))
        self._samples = samples
        # The losses stay on the device. The recorder notes only where the record ends among them, and the next reading,
        # which is due anyway, gives the sum of each part.
        self._losses.end_part()
        self._gradient_norms.end_part()

    def position(self, samples: int) -> int:
        """The samples of the current epoch among the first `samples` of the history."""
        return max(0, samples - self._samples_before_epoch)

    def measurements(self) -> list[int]:
        """What the ranks must tell each other before `complete`; nothing if no record has ended.

        May wait for the device.
        """
        if not self._marks:
            return []
        times = np.diff([self._times_before, *(mark.times for mark in self._marks)], axis=0)
        parts = zip(self._losses.take_parts(), self._marks, times[:, 0].tolist(), strict=True)
        own = [(*part, mark.seconds, seconds) for part, mark, seconds in parts]
        peak = peak_memory(self._device)
        # Ranks exchange integers in messages of fixed size. Floats travel as their bits; the two times that need not be
        # exact share one integer, because a further one could cost a further message.
        pairs = times[:, 1:].astype(np.float32).view(np.int64)
        bits = np.hstack([np.array(own, dtype=np.float64).view(np.int64), pairs]).ravel()
        return [_UNKNOWN if peak is None else peak, *bits.tolist()]

    def complete(self, per_rank: Sequence[Sequence[int]]) -> bool:
        """Add the records that have ended to the history.

        Args:
            per_rank: the measurements of all ranks.

        Returns:
            Whether there were any.
        """
        if not self._marks:
            return False
        # All ranks add the same record, of all ranks' losses, so callbacks that watch it decide alike on every rank.
        peak = max(numbers[0] for numbers in per_rank)
        bits = np.array([numbers[1:] for numbers in per_rank], dtype=np.int64)
        bits = bits.reshape(len(per_rank), len(self._marks), -1)
        values, pairs = bits[:, :, :-1].copy().view(np.float64), bits[:, :, -1:].copy().view(np.float32)
        sums, times = values[:, :, :2].sum(axis=0).tolist(), np.concatenate([values[:, :, 2:], pairs], axis=2)
        norms = self._gradient_norms.take_parts()
        ranks_of_records: list[tuple[RankTimes, ...]] = (
            [()] * len(self._marks) if len(per_rank) == 1 else _times_of_ranks(times)
        )
        for mark, (total, count), (seconds, epoch_seconds, waited, _), ranks, (norm, clipped) in zip(
            self._marks, sums, times[0].tolist(), ranks_of_records, norms, strict=True
        ):
            record = StepRecord(
                epoch=self._clock.epoch,
                update=mark.update,
                samples=mark.samples,
                seconds=seconds,
                train_loss=total / count if count else math.nan,
                learning_rates=tuple(map(float, mark.learning_rates)),
                gradient_norm=norm / clipped if clipped else None,
                samples_per_second=(mark.samples - self._new_from) / epoch_seconds if epoch_seconds else 0.0,
                data_wait_share=waited / epoch_seconds if epoch_seconds else 0.0,
                peak_memory=None if peak == _UNKNOWN else peak,
                ranks=ranks,
            )
            self._history.add_step_record(record)
            self._new_from, self._times_before = mark.samples, mark.times
        self._marks.clear()
        return True

    def state_dict(self, samples_in_epoch: int) -> dict[str, Any]:
        """The samples and the seconds so far. The records themselves are the history's."""
        return {
            # At the start of an epoch, before `start_epoch`, they belong to the epochs before.
            "samples": max(self._samples, self._samples_before_epoch + samples_in_epoch),
            "seconds": time.perf_counter() - self._started,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._samples = state["samples"]
        self._started = time.perf_counter() - state["seconds"]


def _times_of_ranks(times: Numbers) -> list[tuple[RankTimes, ...]]:
    """Where each rank spent the time of each record.

    Ranks leave a backward pass together, so the one that spent the least time in it came last.

    Args:
        times: by rank and record, as in `_Mark`.
    """
    _, seconds, data_wait, meeting = np.moveaxis(times, 2, 0)
    others_wait = meeting - meeting.min(axis=0)
    shares = np.stack([seconds - data_wait - others_wait, data_wait, others_wait], axis=2).swapaxes(0, 1)
    return [tuple([RankTimes(*each) for each in record]) for record in shares.tolist()]


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that this process has used so far: allocated on its GPU, else resident; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
