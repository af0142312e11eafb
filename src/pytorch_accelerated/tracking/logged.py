"""The log history of a Hugging Face trainer as a run history."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from pytorch_accelerated.tracking.history import InMemoryRunHistory

# They say where a run is, and how fast, and are no results.
_PLACES = ("epoch", "step", "total_flos", "num_input_tokens_seen")
_SPEEDS = ("_runtime", "_samples_per_second", "_steps_per_second", "_tokens_per_second")
_STEP = ("grad_norm", "learning_rate")


class LoggedHistory(InMemoryRunHistory):
    """The results in a log history as a run history, which can plot them, compare them and make a data frame of them.

    ::

        history = LoggedHistory(trainer.state.log_history)
        history.plot()
        history.plot(compare={"other": LoggedHistory(TrainerState.load_from_json(path).log_history)})

    Metrics have the names that they were logged with: ``loss`` is the loss of training. Their epochs are counted from
    1, and updates are steps. Learning rates, gradient norms, speeds and the summary at the end of a training are left
    out.

    Args:
        log_history: entries with ``epoch`` and ``step``, oldest first, also of transformers' Trainer.
    """

    def __init__(self, log_history: Iterable[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        for entry in log_history:
            if not is_summary(entry):
                self.add(entry, entry.get("epoch", 0), entry.get("step", 0))

    def add(self, logs: Mapping[str, Any], epoch: float, step: int) -> None:
        """Record the results in an entry of the log history.

        Args:
            logs: the entry.
            epoch: passes over the training set so far, with the fraction of the current one.
            step: updates so far.
        """
        # A fraction such as 0.9999999 is a whole epoch; what is logged before the first update belongs to epoch 1.
        whole = round(epoch)
        is_whole = math.isclose(epoch, whole, abs_tol=1e-6)
        self._set_epoch(max(1, whole if is_whole else math.ceil(epoch)))
        self.updates_done = step
        for name, value in logs.items():
            if isinstance(value, numbers.Real) and not is_about_the_run(name) and name not in _STEP:
                self.update_metric(name, value)
        if is_whole:
            self._set_epoch(whole + 1)


def is_about_the_run(name: str) -> bool:
    """Whether a logged number is a place or a speed, not a result.

    >>> [is_about_the_run(name) for name in ("epoch", "eval_runtime", "eval_loss")]
    [True, True, False]
    """
    return name in _PLACES or name.endswith(_SPEEDS)


def is_summary(logs: Mapping[str, Any]) -> bool:
    """Whether these are the last logs of a training, which sum it up."""
    return "train_runtime" in logs and "train_loss" in logs
