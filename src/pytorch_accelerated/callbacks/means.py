"""Means of numbers among what hooks and models return, such as the parts of a loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.errors import HookOutputError
from pytorch_accelerated.tracking.loss import LossTracker, widest_float

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer


class RecordMeansCallback(TrainerCallback):
    """Records the means of numbers that the model or a hook returns, such as the parts of a loss.

    ::

        RecordMeansCallback("generator_loss", "discriminator_loss")

    A name is that of an entry of the model's outputs, if they are a dict, or of what `calculate_train_batch_loss` and
    `calculate_eval_batch_loss` return: a number for the batch, or a tensor, whose mean is taken. They are recorded as
    ``train_<name>`` and ``eval_<name>``, and as ``intermediate_eval_<name>`` for evaluations within an epoch: means
    over the samples of all ranks. Nothing waits for the device before they are recorded, and a resumed epoch has the
    same means. Put this callback before those that log.

    Args:
        names: of the entries.

    Raises:
        HookOutputError: in a run, if there is no such entry.
    """

    ranks_agree_after_each_update = False
    _told_apart_by = "names"

    def __init__(self, *names: str) -> None:
        self.names = names
        self._trackers: defaultdict[str, LossTracker] = defaultdict(LossTracker)
        self._restored: dict[str, list[float]] = {}  # sums and counts over all ranks, by name
        self._ranks: Any = None

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin new means, unless the epoch is resumed."""
        self._ranks = trainer.run_context.ranks
        if trainer.run_state.updates_in_epoch == 0:
            self._begin("train_")

    def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin new means."""
        self._begin(trainer.run_history.metric_name_prefix + "eval_")

    def on_train_step_end(self, trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """Note the numbers of a batch."""
        self._add("train_", batch_output)

    def on_eval_step_end(self, trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """Note the numbers of a batch."""
        self._add(trainer.run_history.metric_name_prefix + "eval_", batch_output)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the means of the epoch."""
        self._record(trainer, "train_", "train_")

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Record the means of the evaluation."""
        prefix = trainer.run_history.metric_name_prefix + "eval_"
        self._record(trainer, prefix, "intermediate_eval_" if is_intermediate else "eval_")

    def state_dict(self) -> dict[str, Any]:
        """Sums and counts of an unfinished epoch, over all ranks. Must be called by all ranks."""
        return {} if self._ranks is None else {name: list(self._total(f"train_{name}")) for name in self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the means of the epoch that is being resumed."""
        self._begin("train_")
        self._restored = {f"train_{name}": value for name, value in state.items()}

    def _begin(self, prefix: str) -> None:
        for name in self.names:
            self._trackers[prefix + name].reset()
            self._restored.pop(prefix + name, None)

    def _add(self, prefix: str, batch_output: dict[str, Any]) -> None:
        outputs = batch_output.get("model_outputs")
        found = {**(outputs if isinstance(outputs, Mapping) else {}), **batch_output}
        for name in self.names:
            if name not in found:
                raise HookOutputError(
                    f"RecordMeansCallback finds no {name!r} among {list(found)}. Return it, or name it."
                )
            value = found[name]
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                value = value.detach().mean(dtype=widest_float(value.device))
            self._trackers[prefix + name].update(value, batch_output["batch_size"])

    def _total(self, key: str) -> tuple[float, float]:
        tracker = self._trackers[key].copy()  # a save adds nothing to the sums, whose last bit depends on their cuts
        total, count = self._ranks.sum([tracker.total_loss, tracker.running_count])
        earlier = self._restored.get(key, (0.0, 0.0))
        return earlier[0] + total, earlier[1] + count

    def _record(self, trainer: Trainer, key_prefix: str, prefix: str) -> None:
        self._ranks = trainer.run_context.ranks
        for name in self.names:
            total, count = self._total(key_prefix + name)
            if count:
                trainer.run_context.reports.record(prefix + name, total / count)
