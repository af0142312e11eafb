"""Finds the largest batches that fit into memory, by trying."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from pytorch_accelerated.seeding import generator_states, restore_generator_states
from pytorch_accelerated.steps.splitting import is_out_of_memory

Result = TypeVar("Result")


def with_batches_that_fit(
    run: Callable[[int], Result],
    batch_size: int,
    model: nn.Module,
    stateful: Sequence[Any],
    warn: Callable[[str], None],
) -> Result:
    """The result of `run`, which is called with half the batch size as often as it runs out of memory.

    Before each call, weights, optimizer, schedule and generators are what they were before the first one, so the call
    that succeeds equals one without failed attempts. Callbacks have seen these, however.

    Args:
        stateful: the optimizer and the schedule, as far as they exist already.

    Raises:
        torch.OutOfMemoryError: if a single row does not fit.
    """
    weights = [tensor.detach().to("cpu", copy=True) for tensor in chain(model.parameters(), model.buffers())]
    states = [copy.deepcopy(part.state_dict()) for part in stateful]
    generators = generator_states()
    while True:
        try:
            return run(batch_size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if batch_size == 1:
                raise torch.OutOfMemoryError(
                    f"{error} A batch of a single row does not fit into memory, so `auto_find_batch_size` does not "
                    "help. Use a smaller model or shorter rows, `bf16`, or `gradient_checkpointing`."
                ) from error
        # Here the traceback of the error no longer holds the tensors of the failed attempt.
        with torch.no_grad():
            for tensor, value in zip(chain(model.parameters(), model.buffers()), weights, strict=True):
                tensor.copy_(value)
        model.zero_grad()
        for part, state in zip(stateful, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        restore_generator_states(generators)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        warn(
            f"Batches of {batch_size} rows do not fit into memory, so the run restarts with {batch_size // 2} "
            "(`auto_find_batch_size`). To avoid the failed attempt, set `per_device_train_batch_size`."
        )
        batch_size //= 2
