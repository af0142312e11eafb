"""Optimizers with modes, such as those of schedulefree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from pytorch_accelerated.models.kept import kept
from pytorch_accelerated.models.optimizers import Optimizers


class OptimizerMode:
    """The mode of those optimizers of a run that have modes: methods `train` and `eval` that change the weights.

    While such an optimizer trains, the model has other weights than those that it is evaluated and saved with.

    Args:
        optimizers: all that train something.

    Attributes:
        is_training: whether the weights are those of training.
    """

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        alone: list[Any] = [one for each in inner for one in (each if isinstance(each, Optimizers) else [each])]
        self._optimizers = [one for one in alone if callable(getattr(one, "train", None)) and hasattr(one, "eval")]
        self.is_training = False

    @property
    def changes_weights(self) -> bool:
        """Whether the weights to evaluate and save are other ones than those that the model has now."""
        return self.is_training and bool(self._optimizers)

    def train(self) -> None:
        """Give the model the weights of training."""
        for optimizer in self._optimizers:
            optimizer.train()
        self.is_training = True

    def eval(self) -> None:
        """Give the model the weights to evaluate and save."""
        for optimizer in self._optimizers:
            optimizer.eval()
        self.is_training = False

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context with the weights to evaluate and save. Afterwards, those of training are the same to the bit."""
        with kept() as before:
            if self.changes_weights:
                groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
                # The methods round, there and back again.
                before.tensors(parameter for group in groups for parameter in group["params"])
                before.call(self.train)
            self.eval()
            yield
