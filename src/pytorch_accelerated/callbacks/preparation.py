"""Callbacks that prepare modules before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.models.held import held_parts, optimizers_of
from pytorch_accelerated.models.preparation import move_state

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer


class MoveModulesToDeviceCallback(TrainerCallback):
    """Moves modules that are attributes of the trainer to its device, such as a loss function with weights.

    The trainer itself moves the model.
    """

    prepares_run = True

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Move the modules."""
        held = held_parts(trainer)
        for part in held.values():
            if isinstance(part, nn.Module):
                part.to(trainer.device)
        for optimizer in optimizers_of(trainer, held).values():  # a resumed run has loaded their states before
            move_state(optimizer)

    on_evaluation_run_start = on_prediction_run_start = on_training_run_start


class ConvertSyncBatchNormCallback(TrainerCallback):
    """Makes the model's BatchNorm layers compute their statistics over the batches of all ranks.

    The layers are converted when the trainer is created, before the model is wrapped. Their parameters stay the same
    objects, so the optimizer keeps them. With one rank, nothing changes. On the CPU, torch has no such layers: the
    model stays unchanged, and a warning says so.
    """

    prepares_run = True

    def on_init_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Convert the layers."""
        ranks = trainer.run_context.ranks
        if ranks.count == 1:
            return
        if trainer.device.type != "cpu":
            trainer.model = nn.SyncBatchNorm.convert_sync_batchnorm(trainer.model)  # type: ignore[no-untyped-call]
        else:
            warn_user(
                ranks,
                "ConvertSyncBatchNormCallback does nothing here: torch synchronises BatchNorm layers on accelerators "
                "only, and this run is on the CPU. Each rank will use the statistics of its own batches.",
            )
