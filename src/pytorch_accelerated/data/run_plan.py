"""Which rows each update of a run trains on, computed from the orders of its epochs, without training anything."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pytorch_accelerated.data.ordering import LeftOut
from pytorch_accelerated.data.sampling import Window
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.run_state import RunPhase, RunState
from pytorch_accelerated.facts.trees import length_of


class PlannedUpdate(NamedTuple):
    """An update of a run.

    Attributes:
        number: from 1, as `RunState.updates` counts.
        epoch: the epoch of the data, counted from 0.
        window: its positions in the order of the epoch, and how they are divided over batches and ranks.
        rows: the indices in the dataset of its samples over all ranks, in the order of the epoch.
    """

    number: int
    epoch: int
    window: Window
    rows: list[Any]


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """What determines the rows of every update of a run. Its methods must be called by all ranks.

    Of data without a sampler of the user's, one rank may call them alone.

    Attributes:
        loader: the training loader, a `RunLoader`. It is not changed.
        seed: of the run.
        start: where the run began, or was resumed.
        first_epoch: the epoch of the data in which the run began.
        num_epochs: the passes over the data; None for no limit.
        num_updates: the updates at which the run ends; None for no limit.
    """

    loader: Any
    seed: int
    start: RunState
    first_epoch: int
    num_epochs: int | None
    num_updates: int | None

    def update_of(self, number: int) -> PlannedUpdate:
        """The update with a number, from 1.

        Raises:
            ConfigurationError: if the run has no such update, or if it is not known any more.
        """
        begin = self.start if number > self.start.updates else self._beginning()
        for update in self._updates(begin, number):
            if update.number == number:
                return update
        raise ConfigurationError(
            f"The run has no update {number}: they are counted from 1 to the end of its last epoch. Give one of these."
        )

    def rows_of(self, number: int) -> list[Any]:
        """The indices in the dataset of the rows of an update over all ranks, in the order of the epoch."""
        return self.update_of(number).rows

    def update_of_sample(self, samples: int) -> int:
        """The number of the update with which the run has used this many samples, over all ranks."""
        used, number = self.start.samples, self.start.updates
        for update in self._updates(self.start, needs_rows=False) if used < samples else ():
            used, number = used + update.window.size, update.number
            if used >= samples:
                break
        return number

    def updates_of(self, row: int) -> list[int]:
        """The numbers of the updates that use a row, up to the planned end of the run.

        Raises:
            ConfigurationError: if the end is unknown.
        """
        if self.num_epochs is None and self.num_updates is None:
            raise ConfigurationError("The end of the run is unknown, and so are the updates of a row. Use `rows_of`.")
        self._check_rows([row])
        earlier = self._updates(self._beginning()) if self.start.updates else iter(())
        before = itertools.takewhile(lambda update: update.number <= self.start.updates, earlier)
        return [update.number for update in itertools.chain(before, self._updates(self.start)) if row in update.rows]

    def leaving_out(self, rows: Sequence[int], updates: Sequence[int], *, is_planned: bool) -> tuple[LeftOut, ...]:
        """What the run leaves out from its start on.

        Args:
            rows: the indices of rows that no later update uses.
            updates: the numbers of later updates whose samples are passed over, as they would be without all this.
            is_planned: whether schedules are made for the run without them.

        Raises:
            ConfigurationError: if the dataset has no such rows, or the rest of the run no such updates.
        """
        self._check_rows(rows)
        done, planned_for = self.start.updates, self.first_epoch if is_planned else None
        if updates and min(updates) <= done:
            raise ConfigurationError(
                f"`leave_out` names update {min(updates)}, but the run resumes after update {done}, with weights that "
                f"were made with it. Resume from an earlier state, of update {min(updates) - 1} or one before."
            )
        last_first = map(self.update_of, sorted(updates, reverse=True))  # earlier places stay as they are
        left_out = [
            LeftOut(number, epoch, window.start, window.start + window.size, None, planned_for)
            for number, epoch, window, _ in last_first
        ]
        if rows:
            epoch, start, _ = self._place(self.start)
            left_out.append(LeftOut(done + 1, epoch, start, None, list(rows), planned_for))
        return tuple(left_out)

    def _updates(self, begin: RunState, first: int = 1, *, needs_rows: bool = True) -> Iterator[PlannedUpdate]:
        """The updates from `begin` to the end of the run.

        Epochs that end before update `first` may be missing. If no rows are needed, there may be others, found quickly.
        """
        loader, done, (first_epoch, start, batches) = self.loader.detached(), begin.updates, self._place(begin)
        for epoch in itertools.count(first_epoch):
            if self.num_epochs is not None and epoch >= self.first_epoch + self.num_epochs:
                return
            loader.set_epoch(epoch)
            in_epoch = loader.count_updates()
            if not in_epoch:
                return
            if not start and done + in_epoch < first:
                done += in_epoch
                continue
            order, windows = loader.windows(start, batches, needs_rows=needs_rows)
            for window in windows:
                done += 1
                if self.num_updates is not None and done > self.num_updates:
                    return
                yield PlannedUpdate(done, epoch, window, order.rows(window.start, window.start + window.size))
            start = batches = 0

    def _place(self, state: RunState) -> tuple[int, int, int]:
        """The epoch of the next update, and the samples and batches of this rank that are used in it."""
        epoch = self.first_epoch + state.epochs
        if state.phase is RunPhase.TRAINING:
            return epoch, state.samples_in_epoch, state.batches_in_epoch
        return epoch + (state.phase is not RunPhase.EPOCH_CLOSED), 0, 0

    def _beginning(self) -> RunState:
        """Where the run began.

        Raises:
            ConfigurationError: if it was resumed with other batches, so that the updates before are unknown.
        """
        state, beginning = self.start, RunState()
        epoch = self.first_epoch + state.epochs - (state.phase is RunPhase.EPOCH_CLOSED)
        before = itertools.takewhile(lambda update: update.number <= state.updates, self._updates(beginning))
        ends = ((each.number, each.epoch, each.window.start + each.window.size) for each in before)
        if state.updates and (state.updates, epoch, state.samples_in_epoch) not in ends:
            raise ConfigurationError(
                f"The run was resumed after update {state.updates}, before which its batches were others, so the rows "
                "of earlier updates are unknown here. Give the arguments that `train` got then."
            )
        return beginning

    def _check_rows(self, rows: Sequence[int]) -> None:
        """Refuse rows that the dataset does not have."""
        length = length_of(self.loader.dataset)
        for row in rows if length is not None else ():
            if row not in range(length or 0):
                raise ConfigurationError(
                    f"There is no row {row}: the {type(self.loader.dataset).__name__} has {length} rows, counted from "
                    "0. Give indices in the training dataset."
                )
