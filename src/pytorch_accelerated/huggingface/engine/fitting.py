"""Batches that fit into memory, found by trying."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.seeding import generator_states, restore_generator_states
from pytorch_accelerated.steps.splitting import is_out_of_memory

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.trainer import Trainer

Result = TypeVar("Result")


def with_batches_that_fit(trainer: Trainer, run: Callable[[], Result]) -> Result:
    """What `run` returns, begun anew with half as many rows in a batch as often as memory does not suffice.

    Each time weights, optimizer, schedule and generators are again what they were, so the run that succeeds is the one
    that would have been without the attempts. Callbacks have seen these.

    Raises:
        torch.OutOfMemoryError: if a single row does not fit.
    """
    beginning = _Beginning(trainer)
    while True:
        size = trainer._train_batch_size
        try:
            return run()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                raise torch.OutOfMemoryError(
                    f"{error} A batch of a single row does not fit into memory, so `auto_find_batch_size` does not "
                    "help. Use a smaller model or shorter rows, `bf16`, or `gradient_checkpointing`."
                ) from error
        # Here, where the error's traceback does not hold any more what was computed.
        trainer._train_batch_size = size // 2
        beginning.restore()
        warn_user(
            trainer._engine,
            f"Batches of {size} rows do not fit into memory, so the run begins anew with {size // 2} "
            "(`auto_find_batch_size`). To save the attempt, set `per_device_train_batch_size`.",
        )


class _Beginning:
    """What a run begins with, in host memory."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._tensors = [tensor.detach().to("cpu", copy=True) for tensor in self._live_tensors()]
        self._generators = generator_states()
        self._made = {name: getattr(trainer, name) for name in ("optimizer", "lr_scheduler")}
        self._states = {name: copy.deepcopy(made.state_dict()) for name, made in self._made.items() if made is not None}

    def restore(self) -> None:
        trainer = self._trainer
        with torch.no_grad():
            for tensor, value in zip(self._live_tensors(), self._tensors, strict=True):
                tensor.copy_(value)
        trainer.model.zero_grad()
        for name, made in self._made.items():
            setattr(trainer, name, made)
            if made is not None:
                made.load_state_dict(copy.deepcopy(self._states[name]))
        restore_generator_states(self._generators)
        if trainer.args.device.type != "cpu":
            torch.accelerator.empty_cache()

    def _live_tensors(self) -> itertools.chain[torch.Tensor]:
        return itertools.chain(self._trainer.model.parameters(), self._trainer.model.buffers())
