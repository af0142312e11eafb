"""What surrounds a training of the Hugging Face trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from pytorch_accelerated.huggingface.arguments.fields import SaveStrategy
from pytorch_accelerated.huggingface.trainer_utils import output_dir_of, sort_checkpoints
from pytorch_accelerated.huggingface.training_args import TrainingArguments
from pytorch_accelerated.ranks.keeping import Kept
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.record.warning import warn_user

Result = TypeVar("Result")

# Libraries also raise a plain RuntimeError when memory has run out, and kernels a class of CUDA's.
_WORDS_OF_OUT_OF_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def warn_of_earlier_checkpoints(args: TrainingArguments, ranks: Ranks) -> None:
    """Warn if saving will delete checkpoints that this run has not written."""
    limit, folder = args.save_total_limit, output_dir_of(args)
    if limit is None or args.save_strategy == SaveStrategy.NO or not ranks.is_first:
        return
    names = [Path(path).name for path in sort_checkpoints(folder)]
    if names:
        warn_user(
            ranks,
            f"{folder} holds {', '.join(names)} of an earlier run, and `save_total_limit` is {limit}: this run will "
            "delete them as it saves. To keep them, give another `output_dir`; to continue that run, call "
            "`train(resume_from_checkpoint=True)`.",
        )


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
    before = Kept()
    before.generators()
    for part in stateful:
        state = copy.deepcopy(part.state_dict())
        before.call(lambda part=part, state=state: part.load_state_dict(copy.deepcopy(state)))
    before.tensors(chain(model.parameters(), model.buffers()), device="cpu")
    while True:
        try:
            return run(batch_size)
        except RuntimeError as error:
            if batch_size == 1 or not _is_out_of_memory(error):
                raise
        # Here the traceback of the error no longer holds the tensors of the failed attempt.
        before.restore()
        model.zero_grad()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        warn(
            f"Batches of {batch_size} rows do not fit into memory, so the run restarts with {batch_size // 2} "
            "(`auto_find_batch_size`). To avoid the failed attempt, set `per_device_train_batch_size`."
        )
        batch_size //= 2


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _WORDS_OF_OUT_OF_MEMORY)
