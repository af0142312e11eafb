"""`auto_find_batch_size`: training with the largest of some batch sizes that fits into memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pytorch_accelerated.ranks import Kept, Ranks
from pytorch_accelerated.record import warn_user

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface import Trainer, TrainOutput

# Libraries also raise a plain RuntimeError when memory has run out, and kernels a class of CUDA's.
_WORDS_OF_OUT_OF_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def train(face: Trainer, ranks: Ranks, size: int, attempt: Callable[[int], TrainOutput]) -> TrainOutput:
    """The result of the first attempt that fits, with batches of `size` rows, or half, or a quarter, and so on.

    Before each attempt, weights, optimizer, schedule and generators are what they were before the first one, so the one
    that succeeds equals one without failed attempts. Callbacks have seen these, however.

    Raises:
        torch.OutOfMemoryError: if a single row does not fit.
    """
    given, before = (face.optimizer, face.lr_scheduler), Kept()
    before.generators()
    for part in (part for part in given if part is not None):
        state = copy.deepcopy(part.state_dict())
        before.call(lambda part=part, state=state: part.load_state_dict(copy.deepcopy(state)))
    before.tensors(itertools.chain(face.model.parameters(), face.model.buffers()), device="cpu")
    while True:
        try:
            return attempt(size)
        except RuntimeError as error:
            if size == 1 or not _is_out_of_memory(error):
                raise
        # Here the traceback of the error no longer holds the tensors of the failed attempt.
        before.restore()
        face.optimizer, face.lr_scheduler = given
        face.model.zero_grad()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        warn_user(
            ranks,
            f"Batches of {size} rows do not fit into memory, so the run restarts with {size // 2} "
            "(`auto_find_batch_size`). To avoid the failed attempt, set `per_device_train_batch_size`.",
        )
        size //= 2


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _WORDS_OF_OUT_OF_MEMORY)
