"""The contents of the file that `Trainer.save_checkpoint` writes: model, optimizer and scheduler."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from pytorch_accelerated.checkpointing.loading import all_or_nothing, check_same_kind, load_states
from pytorch_accelerated.checkpointing.optimizers import check_optimizer_state
from pytorch_accelerated.checkpointing.portable import load_portable
from pytorch_accelerated.checkpointing.training_state import LiveRun
from pytorch_accelerated.checkpointing.weights import canonical_state_dict, check_canonical, load_canonical
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.models.sharding import whole


def checkpoint_of(run: LiveRun, model: Any, *, optimizer: bool, scheduler: bool) -> dict[str, Any]:
    """The entries of a checkpoint. Must be called by all ranks.

    Args:
        run: has the optimizer and the scheduler.
        model: the bare module.
        optimizer, scheduler: whether their states are wanted, if there is one.
    """
    checkpoint: dict[str, Any] = {"model_state_dict": whole(canonical_state_dict(model))}
    if optimizer and run.optimizer is not None:
        checkpoint["optimizer_state_dict"] = whole(run.optimizer.state_dict())
    if scheduler and run.scheduler is not None:
        checkpoint["scheduler_state_dict"] = run.scheduler.state_dict()
    return checkpoint


def load_checkpoint(path: str | Path, run: LiveRun, model: Any, *, optimizer: bool, scheduler: bool) -> dict[str, Any]:
    """Load a file; see `checkpoint_of`. Returns all its entries.

    Raises:
        MissingCheckpointError: a FileNotFoundError, if there is no such file.
        InvalidCheckpointError: if the file is damaged or belongs to another model or optimizer; then nothing is
            changed.
    """
    checkpoint = load_portable(path)
    if "model_state_dict" not in checkpoint:
        raise InvalidCheckpointError(
            f"{path} has no 'model_state_dict', only {', '.join(map(repr, checkpoint)) or 'nothing'}. "
            "Load a file that `save_checkpoint` wrote."
        )
    optimizer_state = checkpoint.get("optimizer_state_dict") if optimizer and run.optimizer is not None else None
    scheduler_state = checkpoint.get("scheduler_state_dict") if scheduler and run.scheduler is not None else None
    check_canonical(model, checkpoint["model_state_dict"])
    if optimizer_state is not None:
        check_optimizer_state(run.optimizer, optimizer_state, source=path)
    others = []
    if scheduler_state is not None:
        check_same_kind(run.scheduler, scheduler_state, source=path)
        others = [(type(run.scheduler).__name__, run.scheduler, scheduler_state)]
    load_model = functools.partial(load_canonical, model, checkpoint["model_state_dict"])
    with all_or_nothing() as undo:
        load_states(load_model, run.optimizer, optimizer_state, others, undo, source=path)
    return checkpoint
