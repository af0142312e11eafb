"""The progress of a run: counts of completed things, written only by the loop."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class RunPhase(str, enum.Enum):
    """How far the current epoch is, so that a resumed run only does what is left of it.

    Events that begin the run, and the training pass if it is resumed within that, are emitted again.
    """

    TRAINING = "training"
    TRAINING_EPOCH_CLOSED = "training epoch closed"
    EVALUATED = "evaluated"
    EPOCH_CLOSED = "epoch closed"


@dataclasses.dataclass
class RunState:
    """Counts of completed things. Part of every training state. Callbacks may read it but not change it.

    Attributes:
        epochs: finished epochs, including their evaluation.
        updates: optimizer updates whose batches have been consumed, including skipped ones.
        skipped_updates: updates that changed nothing, because a gradient was not finite.
        updates_in_epoch: the part of `updates` in the current epoch.
        batches_in_epoch: batches of this rank used in the current epoch, which is the `step` of the next one.
        samples_in_epoch: samples used by finished updates of this epoch, over all ranks: the position in the data.
        phase: the part of the current epoch that is finished.
        is_evaluation_due: whether an evaluation inside the epoch was requested after the last update and is not
            finished.
        evaluated_sets: how many evaluation sets an unfinished evaluation is done with.
        is_cut: in a saved state, whether a stop or a limit has ended the epoch before its data. The events of its end
            were emitted, but a resumed run continues within it.
        samples: samples used by finished updates of the run, over all ranks.
        items: what `count_batch_items` has counted in them, such as tokens; 0 without it.
    """

    epochs: int = 0
    updates: int = 0
    skipped_updates: int = 0
    updates_in_epoch: int = 0
    batches_in_epoch: int = 0
    samples_in_epoch: int = 0
    phase: RunPhase = RunPhase.TRAINING
    is_evaluation_due: bool = False
    evaluated_sets: int = 0
    is_cut: bool = False
    samples: int = 0
    items: int = 0

    @property
    def applied_updates(self) -> int:
        """Updates that changed the weights. Schedulers and averages count these."""
        return self.updates - self.skipped_updates

    @property
    def position(self) -> str:
        """The progress of the run, in words."""
        if self.phase is RunPhase.TRAINING and self.updates_in_epoch:
            return f"after update {self.updates}, with {self.samples_in_epoch} samples of this epoch used"
        return f"after update {self.updates}"

    def epoch_of_progress(self, current_epoch: int) -> int:
        """The epoch of the last thing that was done, from the run history's, which moves on when an epoch ends."""
        return current_epoch - (self.phase is RunPhase.EPOCH_CLOSED)

    def start_epoch(self) -> None:
        """Begin an epoch at its first sample."""
        self.updates_in_epoch = self.batches_in_epoch = self.samples_in_epoch = 0
        self.phase = RunPhase.TRAINING

    def finish_epoch(self) -> None:
        """Count an epoch, including its evaluation."""
        self.epochs += 1
        self.phase = RunPhase.EPOCH_CLOSED

    def state_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON. `totals` has the others."""
        state = {**dataclasses.asdict(self), "phase": self.phase.value}
        unknown = [name for name in ("evaluated_sets", "is_cut") if not state[name]]  # to older versions
        for name in (*unknown, *self.totals):
            del state[name]
        return state

    @property
    def totals(self) -> dict[str, int]:
        """The counts over the whole run that older versions do not know."""
        return {"samples": self.samples, "items": self.items}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], totals: dict[str, int] | None = None) -> RunState:
        """The inverse of `state_dict` and `totals`, which older states lack."""
        known = {field.name: state[field.name] for field in dataclasses.fields(cls) if field.name in state}
        return cls(**{**known, **(totals or {}), "phase": RunPhase(state["phase"])})
