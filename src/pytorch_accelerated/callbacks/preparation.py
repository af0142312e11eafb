"""Callbacks that prepare modules before a run, or for an epoch of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.ranks.held import held_parts, optimizers_of
from pytorch_accelerated.ranks.numerics import listed
from pytorch_accelerated.ranks.preparation import move_state
from pytorch_accelerated.record.warning import warn_user

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer


class MoveModulesToDeviceCallback(TrainerCallback):
    """Moves modules that are attributes of the trainer to its device, such as a loss function with weights.

    The trainer itself moves the model.

    >>> callbacks = [MoveModulesToDeviceCallback]  # one of the default callbacks
    """

    prepares_run = True
    recorded_names = ()

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

    >>> callbacks = [..., ConvertSyncBatchNormCallback]
    """

    prepares_run = True

    def on_init_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Convert the layers."""
        ranks = trainer.run_context.parts.ranks
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


class UnfreezeCallback(TrainerCallback):
    """Trains parameters from an epoch on, and leaves them as they are before.

    ::

        UnfreezeCallback({1: "head", 3: "layer4", 5: "."})

    The optimizer has all parameters from the beginning, so schedules and training states know them. On one process,
    nothing is computed for the gradients of frozen parameters. On more, these are computed and dropped, because
    data-parallel wrappers look only once which parameters need gradients.

    Args:
        patterns: by epoch, counted from 1, what is trained from then on: a regular expression that is searched in the
            names of parameters, or a list of them. Parameters of no pattern are never trained, nor are those that were
            frozen before the run.

    Raises:
        ConfigurationError: when a run starts, for a pattern that no name has.
    """

    prepares_run = True
    ranks_agree_after_each_update = False

    def __init__(self, patterns: Mapping[int, str | Sequence[str]]) -> None:
        self.patterns = {
            epoch: [names] if isinstance(names, str) else list(names) for epoch, names in sorted(patterns.items())
        }
        self._frozen: list[torch.nn.Parameter] = []
        self._by_hand: set[str] = set()

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Check the patterns."""
        parameters = dict(trainer.get_model().named_parameters())
        names, here = list(parameters), {id(each) for each in self._frozen}  # by an earlier run
        self._by_hand = {name for name, each in parameters.items() if not each.requires_grad and id(each) not in here}
        unknown = [each for of_epoch in self.patterns.values() for each in of_epoch if not _has_any(names, [each])]
        if unknown:
            raise ConfigurationError(
                f"{listed(unknown)} is not in the name of any parameter. They are {listed(names)}. Correct it."
            )

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Freeze and unfreeze what the epoch asks for."""
        epoch = trainer.run_state.epochs + 1
        wanted = [each for first, of_epoch in self.patterns.items() if first <= epoch for each in of_epoch]
        self._frozen = []
        for name, parameter in trainer.get_model().named_parameters():
            if name in self._by_hand:
                continue
            is_trained = _has_any([name], wanted)
            if not is_trained:
                self._frozen.append(parameter)
                parameter.grad = None
            if trainer.run_context.parts.ranks.count == 1:
                parameter.requires_grad_(is_trained)

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Drop the gradients of what is frozen."""
        for parameter in self._frozen:
            parameter.grad = None


def _has_any(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for name in names for pattern in patterns)
