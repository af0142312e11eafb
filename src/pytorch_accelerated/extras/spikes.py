"""Notices a training loss that is far above those before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.record import is_finite_number

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer

WINDOW = 128  # as many losses are compared with the next one
_FEWEST = 16
_DEVIATIONS_PER_MAD = 1.4826  # for normally distributed losses
_SMALLEST_SCALE = 0.01  # of the median: losses that hardly vary have a deviation near 0
_MOST_SAMPLES = 8


class LossSpikeCallback(TrainerCallback):
    """Fires `on_loss_spike` and prints a line when the training loss is far above the losses before it.

    Judges the step records of the run history, which are made of losses that are read anyway: nothing more is read from
    the device, and the run is the same to the bit. A record is the mean of one update in runs of up to 255 updates and
    of more in longer ones; pass ``record_every_n_steps=1`` to `train` to judge every update. The first 16 records are
    not judged. All ranks judge alike.

    A loss is a spike if it is above the median of the last 128 records by more than `threshold` standard deviations,
    estimated by 1.4826 times the median absolute deviation, which earlier spikes hardly change, and by at least 1% of
    the median for each.

    Source: Iglewicz and Hoaglin (1993), "How to detect and handle outliers".

    >>> callbacks = [..., LossSpikeCallback(threshold=10)]

    Args:
        threshold: in standard deviations.

    Raises:
        ConfigurationError: if the threshold is not a number above 0.
    """

    ranks_agree_after_each_update = False
    takes_part_in_preflight = False

    def __init__(self, threshold: float = 8.0) -> None:
        if not (is_finite_number(threshold) and threshold > 0):
            raise ConfigurationError(f"`threshold` is {threshold!r}, in standard deviations: give a number above 0.")
        self.threshold = threshold

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Leave out the records of earlier runs."""
        if trainer.run_state.updates == 0:
            trainer.run_history.read_new_step_records(self.state_key)

    def on_step_records(self, trainer: Trainer, **kwargs: Any) -> None:
        """Judge the new records."""
        new = trainer.run_history.read_new_step_records(self.state_key)
        records = trainer.run_history.step_records[-WINDOW - len(new) :]
        losses = np.array([record.train_loss for record in records])
        for index, median in find_spikes(losses, len(records) - len(new), self.threshold):
            before, record = records[index - 1], records[index]
            trainer.run_context.control.emitter.emit(
                "on_loss_spike",
                loss=record.train_loss,
                median=median,
                epoch=record.epoch,
                first_update=before.update + 1,
                last_update=record.update,
                samples=trainer.run_context.parts.reports.samples_between(before.samples, record.samples),
            )

    def on_loss_spike(
        self, trainer: Trainer, *, loss: float, median: float, samples: Sequence[int] | None, **spike: Any
    ) -> None:
        """Print the loss, the updates and the samples."""
        first, last = spike["first_update"], spike["last_update"]
        updates = f"update {last}" if first == last else f"updates {first} to {last}"
        where = ""
        if samples is not None:
            more = f" and {len(samples) - _MOST_SAMPLES} more" if len(samples) > _MOST_SAMPLES else ""
            where = f", samples {', '.join(map(str, samples[:_MOST_SAMPLES]))}{more} of the training data"
        trainer.print(
            f"Loss spike in epoch {spike['epoch']}, {updates}: {loss:.4g}, where the median was {median:.4g}{where}"
        )


def find_spikes(losses: Any, start: int, threshold: float) -> list[tuple[int, float]]:
    """The positions of spikes from `start` on, each with the median of the losses before it.

    Args:
        losses: an array; a value that is not finite is not a spike.
        start: the first one to judge.
        threshold: see `LossSpikeCallback`.
    """
    found = []
    if start >= WINDOW:  # most often: windows of one size, judged at once
        rows = np.lib.stride_tricks.sliding_window_view(losses[start - WINDOW : -1], WINDOW)
        windows: list[tuple[int, Any]] = [(start, rows)] if len(rows) else []
    else:
        windows = [(at, losses[None, max(0, at - WINDOW) : at]) for at in range(max(start, _FEWEST), len(losses))]
    for at, rows in windows:
        with np.errstate(all="ignore"):
            medians = np.median(np.where(np.isfinite(rows), rows, np.inf), axis=1)
            scales = _DEVIATIONS_PER_MAD * np.median(np.abs(rows - medians[:, None]), axis=1)
            limits = medians + threshold * np.maximum(scales, _SMALLEST_SCALE * np.abs(medians))
        judged = losses[at : at + len(rows)]
        found += [(at + int(i), float(medians[i])) for i in np.flatnonzero((judged > limits) & np.isfinite(judged))]
    return found
