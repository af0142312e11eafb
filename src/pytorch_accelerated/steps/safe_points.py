"""Keeps what a run was like at its last safe point, so that it can be saved as it was there if an error ends it.

`docs/design/breaking.md` has the reasons.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pytorch_accelerated.checkpointing.saved_metrics import storable_history
from pytorch_accelerated.checkpointing.training_state import KeptStates, LiveRun, key_of_state
from pytorch_accelerated.compat.torch import version_of
from pytorch_accelerated.data.resuming import stream_state
from pytorch_accelerated.steps.transaction import Transaction
from pytorch_accelerated.training.hooks import TrainerHooks
from pytorch_accelerated.training.order import EVENTS_OF_UPDATE
from pytorch_accelerated.training.step import Call, Step

_EVENTS_BEFORE = [event for event in EVENTS_OF_UPDATE if event != "on_optimizer_step_end"]


class SafePoint:
    """The last moment of a training run at which everything was consistent.

    Parameters, optimizer and scheduler are not copied: a run can be saved as it was there only if they are still the
    same. For one process.

    Args:
        hooks: the trainer, once its model is prepared.
        contents: returns the parts of the run.
    """

    def __init__(self, hooks: TrainerHooks, contents: Callable[[], LiveRun]) -> None:
        self._hooks = hooks
        self._contents = contents
        self._transaction = Transaction(hooks)
        self._kept: LiveRun | None = None
        self._parameters: list[tuple[Any, int | None]] = []
        self._updates_at_start: int | None = None
        self._listeners = self._find_listeners()

    def note(self, *, everything: bool) -> None:
        """Make this moment the last safe point.

        Args:
            everything: also keep the run history and the states of all callbacks, because something else than an update
                follows. An update changes only those of callbacks that hear of its batches.
        """
        self.leave()  # an interrupt may come at any moment
        run = self._contents()
        if self._updates_at_start is None:
            self._updates_at_start = run.run_state.updates
        parameters = [each for group in getattr(run.optimizer, "param_groups", ()) for each in group["params"]]
        self._transaction.begin(parameters)
        self._parameters = [(each, version_of(each)) for each in self._transaction.parameters]
        history = run.history
        if everything:
            self._listeners = self._find_listeners()
        stateful = [one for one in (run.callbacks if everything else self._listeners) if hasattr(one, "state_dict")]
        self._kept = dataclasses.replace(
            run,
            run_state=dataclasses.replace(run.run_state),
            losses=run.losses.copy(),
            gradient_norms=run.gradient_norms.copy(),
            kept=KeptStates(
                callbacks={key_of_state(one): copy.deepcopy(one.state_dict()) for one in stateful},
                history=storable_history(history, run.ranks) if everything else None,
                history_records=len(history.records),
                recorder=None if run.recorder is None else run.recorder.state_dict(run.run_state.samples_in_epoch),
                stream=copy.deepcopy(stream_state(run.train_loader, run.ranks)),
            ),
        )

    def leave(self) -> None:
        """Forget the last safe point: something begins that cannot be undone."""
        self._kept = None

    def go_back(self) -> LiveRun | None:
        """Restore buffers and generators. The parts of the run as they were at the last safe point; None if unknown."""
        kept = self._kept
        if kept is None or any(version_of(each) != version for each, version in self._parameters):
            return None
        self._transaction.give_back()
        return kept

    @property
    def has_progress(self) -> bool:
        """Whether an update has been completed since the run began or was resumed."""
        return self._updates_at_start is not None and self._hooks.run_state.updates > self._updates_at_start

    def _find_listeners(self) -> list[Any]:
        """The callbacks whose state an update may have changed before it is applied."""
        methods = [each for event in _EVENTS_BEFORE for each in self._hooks.callback_handler.acting_methods(event)]
        return list({id(owner): owner for method in methods if (owner := getattr(method, "__self__", None))}.values())


class NotedStep(Step):
    """A step that leaves the safe point when it begins to change the parameters."""

    def finish(self, calls: Sequence[Call], *, is_skipped: bool) -> None:
        """Apply the update; see `Step.finish`."""
        assert self.parts.before_applying is not None
        self.parts.before_applying()
        super().finish(calls, is_skipped=is_skipped)
