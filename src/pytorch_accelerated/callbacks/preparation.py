"""Callbacks that prepare modules before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.compat.torch import is_batch_norm
from pytorch_accelerated.errors import ConfigurationError

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer


class MoveModulesToDeviceCallback(TrainerCallback):
    """Moves modules that are attributes of the trainer to its device, such as a loss function with weights.

    The trainer itself moves the model.
    """

    prepares_run = True

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Move the modules."""
        self._move_modules(trainer)

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Move the modules."""
        self._move_modules(trainer)

    def on_prediction_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Move the modules."""
        self._move_modules(trainer)

    def _move_modules(self, trainer: Trainer) -> None:
        for name, value in vars(trainer).items():
            if isinstance(value, nn.Module) and name != "model":
                value.to(trainer.device)


class ConvertSyncBatchNormCallback(TrainerCallback):
    """Makes the model's BatchNorm layers compute their statistics over the batches of all ranks.

    The layers are converted when the trainer is created, before the model is wrapped. Their parameters stay the same
    objects, so the optimizer keeps them. With one rank, nothing changes. On the CPU, torch has no such layers: the
    model stays unchanged, and a warning says so.
    """

    prepares_run = True

    def on_init_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Convert the layers."""
        ranks = trainer.internal_run.ranks
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

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Reject unconverted layers of a model that replaced the first one after the trainer was created."""
        if trainer.internal_run.ranks.count == 1 or trainer.device.type == "cpu":
            return
        late = [name for name, module in trainer.get_model().named_modules() if _is_unsynchronised(module)]
        if late:
            raise ConfigurationError(
                f"The model has BatchNorm layers that are not synchronised ({', '.join(late)}): it was put into the "
                "trainer after ConvertSyncBatchNormCallback had converted the layers. Convert it before, with "
                "`torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)`."
            )


def _is_unsynchronised(module: nn.Module) -> bool:
    return is_batch_norm(module) and not isinstance(module, nn.SyncBatchNorm)
