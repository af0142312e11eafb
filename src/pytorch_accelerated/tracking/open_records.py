"""The open records of a run in several trackers, of which each may fail without harm to the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from pytorch_accelerated.tracking.trackers import Outcome, Place, Row, Tracker


class OpenRecords:
    """Logs to trackers. One that fails is named in one warning, and not used any more.

    Args:
        warn: shows a warning to the user.
        updates_done: the updates so far.
    """

    def __init__(self, warn: Callable[[str], None], updates_done: Callable[[], int]) -> None:
        self._warn = warn
        self._updates_done = updates_done
        self._open: list[Tracker] = []
        self._waiting: list[Row] = []
        self._unable: set[tuple[str, str]] = set()
        self._last_write = time.monotonic()

    @property
    def identities(self) -> dict[str, str]:
        """What finds the records again, by tracker."""
        return {one.name: one.identity for one in self._open if one.identity is not None and not one.is_given}

    @property
    def seconds_since_write(self) -> float:
        """How long ago values were last written."""
        return time.monotonic() - self._last_write

    def start(
        self,
        tracker: Tracker,
        place: Place,
        identity: str | None,
        repeats_from: int | None,
        hyperparameters: dict[str, Any],
        earlier: Sequence[Row],
    ) -> None:
        """Open the record of a tracker; see `Tracker.start`.

        Args:
            tracker, place, identity, repeats_from: as there.
            hyperparameters: for a new record.
            earlier: what the trackers of this run have logged already. A new record gets it too.
        """
        self._open.append(tracker)

        def start() -> None:
            tracker.start(place, identity, repeats_from)
            if identity is None:
                tracker.log_hyperparameters(hyperparameters)
            if identity is None and earlier and not tracker.is_given:
                tracker.log(earlier)

        self._attempt(tracker, "starting", start)

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows for the next `write`."""
        self._waiting += rows

    def write(self) -> None:
        """Log the rows that wait."""
        rows, self._waiting = self._waiting, []
        self._last_write = time.monotonic()
        for tracker in list(self._open) if rows else []:
            self._attempt(tracker, "logging", partial(tracker.log, rows))

    def log_extra(self, what: str, step: int | None, log: Callable[[Tracker, int], bool]) -> None:
        """Log something that not all trackers take; those that do not are named in one warning.

        Args:
            what: for the warning, such as "figures".
            step: the number of updates; None for those so far.
            log: logs to a tracker at a step, and returns whether it takes such things.
        """
        step = self._updates_done() if step is None else step
        self.write()  # W&B refuses steps before the last one
        for tracker in list(self._open):

            def attempt(tracker: Tracker = tracker) -> None:
                if not log(tracker, step) and (tracker.name, what) not in self._unable:
                    self._unable.add((tracker.name, what))
                    self._warn(f"The tracker {tracker.name!r} takes no {what}, so they are not logged there.")

            self._attempt(tracker, f"logging {what}", attempt)

    def finish(self, outcome: Outcome) -> list[str]:
        """Log what waits, and close all records. Returns where they are, a text for each tracker."""
        self.write()
        locations = []
        for tracker in list(self._open):
            with contextlib.suppress(Exception):  # the record is more important than where it is
                locations.append(f"{tracker.name}: {tracker.location}" if tracker.location else tracker.name)
            self._attempt(tracker, "closing", partial(tracker.finish, outcome))
        self._open = []
        return locations

    def _attempt(self, tracker: Tracker, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._open.remove(tracker)
            if what != "closing":
                with contextlib.suppress(Exception):  # it may not have started
                    tracker.finish("failed")
            self._warn(
                f"The tracker {tracker.name!r} failed at {what}, after {self._updates_done()} updates "
                f"({type(error).__name__}: {error}). The run continues without it."
            )
