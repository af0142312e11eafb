"""Finds out what a loss divides by: the number of items that it is told, or that of the batches of an update."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.seeding import generator_states, restore_generator_states

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.trainer import Trainer

_TOLERANCE = 1e-3  # far from the half that is looked for, far above the noise of operations without a fixed order


def what_divides(trainer: Trainer, model: Any, batch: Any, num_items: int) -> str | None:
    """What `compute_loss` divides by: "items", "batches" or "nothing"; None if this batch cannot tell: its loss is 0.

    A signature does not tell. Many models take any keyword and hand it on to a loss that is a mean all the same, and
    so are losses of one's own that have the parameter because they must; others divide by the trainer's
    ``current_gradient_accumulation_steps``. So the loss is computed with another number each time, and without
    gradients. Nothing of it stays: not in generators, buffers and logs. All ranks must call it together.
    """
    if not model.training:
        model.train()

    def loss_with(number: int, batches_factor: int = 1) -> float:
        with _without_a_trace(trainer, model), torch.no_grad():
            trainer._engine.batches_factor = batches_factor
            inputs = trainer._prepare_inputs(copy.copy(batch))  # which users take labels out of
            return float(trainer._compute_loss(model, inputs, num_items_in_batch=number))

    once = loss_with(num_items)
    if once == 0 or not math.isfinite(once):
        return None
    if abs(once - loss_with(2 * num_items)) > _TOLERANCE * abs(once):
        return "items"
    return "batches" if abs(once - loss_with(num_items, 2)) > _TOLERANCE * abs(once) else "nothing"


@contextlib.contextmanager
def _without_a_trace(trainer: Trainer, model: Any) -> Iterator[None]:
    generators = generator_states()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    vars(trainer)["log"] = lambda *args, **kwargs: None  # some log from within `compute_loss`
    try:
        with torch.compiler.set_stance("force_eager"):  # one batch is not worth a compilation
            yield
    finally:
        trainer._engine.batches_factor = 1
        del vars(trainer)["log"]
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        restore_generator_states(generators)
