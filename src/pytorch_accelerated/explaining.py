"""The order of a run in words: which hooks are called and which events fired, and who acts there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer


def explain_run(trainer: Trainer, *, num_epochs: int, evaluate: bool) -> str:
    """One line per hook and event, indented by what it belongs to. Nothing is run."""
    lines = []
    for depth, text in _order(num_epochs, evaluate):
        line = "  " * depth + text
        note = _note(trainer, text)
        lines.append(f"{line:<48}{note}".rstrip() if note else line)
    return "\n".join(lines)


def _order(num_epochs: int, evaluate: bool) -> Iterator[tuple[int, str]]:
    yield 0, "train"
    yield 1, "create_train_dataloader"
    if evaluate:
        yield 1, "create_eval_dataloader"
    yield 1, "create_scheduler"
    yield 1, "training_run_start"
    yield 1, "on_training_run_start"
    yield 1, f"each of {num_epochs} epochs:" if num_epochs > 1 else "the epoch:"
    yield 2, "train_epoch_start"
    yield 2, "on_train_epoch_start"
    yield 2, "each update:"
    yield 3, "each batch:"
    yield 4, "on_train_step_start"
    yield 4, "calculate_train_batch_loss"
    yield 4, "on_train_step_end"
    yield 4, "backward_step"
    yield 3, "on_optimizer_step_start"
    yield 3, "optimizer_step"
    yield 3, "scheduler_step"
    yield 3, "optimizer_zero_grad"
    yield 3, "on_optimizer_step_end"
    yield 2, "train_epoch_end"
    yield 2, "on_train_epoch_end"
    if evaluate:
        yield 2, "eval_epoch_start"
        yield 2, "on_eval_epoch_start"
        yield 2, "each batch:"
        yield 3, "on_eval_step_start"
        yield 3, "calculate_eval_batch_loss"
        yield 3, "on_eval_step_end"
        yield 2, "eval_epoch_end"
        yield 2, "on_eval_epoch_end"
    yield 2, "training_run_epoch_end"
    yield 2, "on_training_run_epoch_end"
    yield 1, "training_run_end"
    yield 1, "on_training_run_end"


def _note(trainer: Trainer, name: str) -> str:
    """Who acts at an event, or which class overrides a hook."""
    if name.startswith("on_"):
        methods = trainer.callback_handler.acting_methods(name)
        return ", ".join(_owner(method) for method in methods) or "-"
    method = getattr(type(trainer), name, None)
    if method is None or name == "train":
        return ""
    owner = next(kind for kind in type(trainer).__mro__ if name in vars(kind))
    return "" if owner.__module__.startswith("pytorch_accelerated.") else f"overridden in {owner.__name__}"


def _owner(method: Any) -> str:
    owner = getattr(method, "__self__", None)
    return type(owner).__name__ if owner is not None else repr(method)
