"""Notices a logged training loss that is far above those before it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from pytorch_accelerated.callbacks.spikes import WINDOW, checked_threshold, find_spikes
from pytorch_accelerated.huggingface.events.callbacks import TrainerCallback
from pytorch_accelerated.huggingface.events.logged import format_epochs
from pytorch_accelerated.progress.display import above_bars
from pytorch_accelerated.progress.table import folded


class LossSpikeCallback(TrainerCallback):
    """Prints a line when a logged training loss is far above the losses logged before it, and calls `on_loss_spike`.

    It judges the values of ``loss`` in the log history, each the mean of ``logging_steps`` updates, so nothing more is
    read from the device. A loss is a spike if it is above the median of the last 128 by more than `threshold` standard
    deviations, as for the native `pytorch_accelerated.callbacks.LossSpikeCallback`. The first 16 are not judged.

    Args:
        threshold: in standard deviations.

    Raises:
        ConfigurationError: if the threshold is not a number above 0.
    """

    ranks_agree_after_each_update = False

    def __init__(self, threshold: float = 8.0) -> None:
        self.threshold = checked_threshold(threshold)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        """Judge the loss."""
        if "loss" not in (logs or {}):
            return
        entries = (entry for entry in reversed(state.log_history) if "loss" in entry)
        latest = list(itertools.islice(entries, WINDOW + 1))[::-1]
        losses = np.array([entry["loss"] for entry in latest], dtype=float)
        for _, median in find_spikes(losses, len(losses) - 1, self.threshold):
            first_step = latest[-2]["step"] + 1
            self.on_loss_spike(args, state, control, loss=losses[-1].item(), median=median, first_step=first_step)

    def on_loss_spike(
        self, args: Any, state: Any, control: Any, *, loss: float, median: float, first_step: int
    ) -> None:
        """Print the loss and the steps, on the first process. Override it to do something else, on every process.

        Args:
            args, state, control: as for events.
            loss: the mean over the steps.
            median: that of the losses before.
            first_step: the first of the steps; the last one is ``state.global_step``.
        """
        if state.is_world_process_zero:
            last = state.global_step
            steps = f"step {last}" if first_step == last else f"steps {first_step} to {last}"
            where = f"epoch {format_epochs(state.epoch)}, {steps}"
            with above_bars():
                print(folded(f"Loss spike at {where}: {loss:.4g}, where the median was {median:.4g}"), flush=True)
