"""Trains a model part by part: some parameters from the first epoch on, others from a later one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.models.numerics import listed

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer


class UnfreezeCallback(TrainerCallback):
    """Trains parameters from an epoch on, and leaves them as they are before.

    ::

        UnfreezeCallback({1: "head", 3: "layer4", 5: "."})

    The optimizer has all parameters from the beginning, so schedules and training states know them. On one process,
    nothing is computed for the gradients of frozen parameters. On several, these are computed and dropped, because
    data-parallel wrappers look only once which parameters need gradients.

    Args:
        patterns: by epoch, counted from 1, what is trained from then on: a regular expression that is searched in the
            names of parameters, or several. Parameters of no pattern are never trained.

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

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Check the patterns."""
        names = [name for name, _ in trainer.get_model().named_parameters()]
        unknown = [each for of_epoch in self.patterns.values() for each in of_epoch if not _has_any(names, [each])]
        if unknown:
            raise ConfigurationError(
                f"{listed(unknown)} is found in no name of a parameter, of which there are {listed(names)}. Correct it."
            )

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Freeze and unfreeze what the epoch asks for."""
        epoch = trainer.run_state.epochs + 1
        wanted = [each for first, of_epoch in self.patterns.items() if first <= epoch for each in of_epoch]
        self._frozen = []
        for name, parameter in trainer.get_model().named_parameters():
            is_trained = _has_any([name], wanted)
            if not is_trained:
                self._frozen.append(parameter)
                parameter.grad = None
            if trainer.run_context.ranks.count == 1:
                parameter.requires_grad_(is_trained)

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Drop the gradients of what is frozen."""
        for parameter in self._frozen:
            parameter.grad = None

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Forget the parameters."""
        self._frozen = []


def _has_any(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for name in names for pattern in patterns)
