"""Finds out whether a loss divides by the number of items that it is told."""

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


def divides_by_items(trainer: Trainer, model: Any, batch: Any, num_items: int) -> bool | None:
    """Whether `compute_loss` divides by ``num_items_in_batch``; None if this batch cannot tell, as its loss is 0.

    A signature does not tell. Many models take any keyword and hand it on to a loss that is a mean all the same, and
    so are losses of one's own that have the parameter because they must. So the loss is computed twice, with another
    number each time, and without gradients. Nothing of it stays: not in generators, buffers and logs. All ranks must
    call it together.
    """
    if not model.training:
        model.train()
    losses = []
    for number in (num_items, 2 * num_items):
        with _without_a_trace(trainer, model), torch.no_grad():
            inputs = trainer._prepare_inputs(copy.copy(batch))  # which users take labels out of
            losses.append(float(trainer._compute_loss(model, inputs, num_items_in_batch=number)))
    once, twice = losses
    if once == 0 or not math.isfinite(once):
        return None
    return abs(once - twice) > _TOLERANCE * abs(once)


@contextlib.contextmanager
def _without_a_trace(trainer: Trainer, model: Any) -> Iterator[None]:
    generators = generator_states()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    vars(trainer)["log"] = lambda *args, **kwargs: None  # some log from within `compute_loss`
    try:
        with torch.compiler.set_stance("force_eager"):  # one batch is not worth a compilation
            yield
    finally:
        del vars(trainer)["log"]
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        restore_generator_states(generators)
