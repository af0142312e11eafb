"""What a run measures within its epochs."""

from __future__ import annotations

from typing import NamedTuple


class StepRecord(NamedTuple):
    """What was measured over some consecutive updates of one epoch.

    Each update belongs to exactly one record, and all ranks have the same records.

    Attributes:
        epoch: the epoch of the updates, counted from 1.
        update: the number of optimizer updates up to and including the last one of the record, since the history was
            reset.
        samples: the samples used by those updates, over all ranks.
        seconds: wall time of training until the last update of the record, with evaluations and saves. A resumed run
            continues the time of its training state.
        train_loss: the mean training loss per item over the updates of the record, the batches of each, and all ranks.
            NaN if nothing was counted.
        learning_rates: one for each parameter group of the optimizer, as set after the last update of the record, so
            they are those of the update that follows; empty if the trainer has no optimizer.
        gradient_norm: the mean norm of the gradients before clipping; None unless they are clipped by norm.
        samples_per_second: the samples of the record, over all ranks, per second of training without evaluations and
            saves.
        data_wait_share: the share of those seconds in which rank 0 waited for the next batch, between 0 and 1.
        peak_memory: the most bytes that a rank has used so far: allocated on its GPU, or resident in its process if it
            trains on the CPU; None if unknown.
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
