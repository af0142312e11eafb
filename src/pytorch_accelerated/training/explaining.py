"""The order of a run in words: which hooks are called, which events fired, what is recorded, and who acts where."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer

_UPDATE = """
each batch:
  on_train_step_start
  calculate_train_batch_loss
  on_train_step_end
  backward_step
on_optimizer_step_start
_clip_gradients
optimizer_step
scheduler_step
optimizer_zero_grad
on_optimizer_step_end
"""
_EVALUATION = """
eval_epoch_start
on_eval_epoch_start
each batch:{counting}
  on_eval_step_start
  calculate_eval_batch_loss
  on_eval_step_end
eval_epoch_end
[{metric}]
on_eval_epoch_end
"""
_PREDICTION = """
on_prediction_run_start
each batch:
  calculate_predict_batch_outputs
  on_prediction_step_end
on_prediction_run_end
"""
_NOTES_COLUMN = 42


def explain_run(trainer: Trainer, *, num_epochs: int, evaluate: bool) -> str:
    """One line per hook, event and recorded [metric], indented by what it belongs to. Nothing is run."""
    parts = [iter(["Trainer(...):", "  on_init_end"]), _train(trainer, num_epochs, evaluate)]
    parts += [_evaluate(trainer)] if evaluate else []
    parts += [_predict(), _whenever(trainer)]
    return "\n\n".join("\n".join(_with_notes(trainer, line) for line in part) for part in parts)


def _train(trainer: Trainer, num_epochs: int, evaluate: bool) -> Iterator[str]:
    yield "train(...):"
    yield from _below(1, "create_train_dataloader")
    if evaluate:
        yield from _below(1, "create_eval_dataloader")
    yield from _below(1, "create_scheduler\ntraining_run_start\non_training_run_start")
    yield from _below(1, f"each of {num_epochs} epochs:" if num_epochs > 1 else "the epoch:")
    yield from _below(2, "train_epoch_start\non_train_epoch_start\neach update:")
    if trainer._overrides("count_batch_items"):
        yield from _below(3, "each batch:\n  count_batch_items")
    yield from _below(3, _UPDATE)
    yield from _below(2, "train_epoch_end\n[train_loss_epoch]\non_train_epoch_end")
    if evaluate:
        yield from _below(2, _evaluation(trainer, "eval_loss_epoch"))
    yield from _below(2, "training_run_epoch_end\non_training_run_epoch_end")
    yield from _below(1, "training_run_end\non_training_run_end")


def _evaluation(trainer: Trainer, metric: str) -> str:
    return _EVALUATION.format(
        metric=metric, counting="\n  count_batch_items" if trainer._overrides("count_batch_items") else ""
    )


def _evaluate(trainer: Trainer) -> Iterator[str]:
    yield "evaluate(...):"
    yield from _below(1, "create_eval_dataloader\nevaluation_run_start\non_evaluation_run_start")
    yield from _below(1, _evaluation(trainer, "evaluation_loss"))
    yield from _below(1, "evaluation_run_end\non_evaluation_run_end")


def _predict() -> Iterator[str]:
    yield "predict(...):"
    yield from _below(1, _PREDICTION)


def _whenever(trainer: Trainer) -> Iterator[str]:
    yield "whenever it happens:"
    yield from _below(1, "on_non_finite_loss\non_stop_training_error\non_exception")
    yield from _below(1, "\n".join(trainer.custom_events))


def _below(depth: int, text: str) -> Iterator[str]:
    yield from textwrap.indent(text.strip("\n"), "  " * depth).splitlines()


def _with_notes(trainer: Trainer, line: str) -> str:
    """The line, and beside it who acts there: callbacks from top to bottom, or the class that overrides a hook."""
    name = line.strip()
    if name.startswith("on_") or name in trainer.custom_events:
        methods = trainer.callback_handler.acting_methods(name)
        notes = [_class_of(method) for method in methods] or ["-"]
    else:
        owners = [kind for kind in type(trainer).__mro__ if name in vars(kind)]
        is_overridden = owners and not owners[0].__module__.startswith("pytorch_accelerated.")
        notes = [f"overridden in {owners[0].__name__}"] if is_overridden else []
    if not notes:
        return line
    first, *more = notes
    return "\n".join([f"{line:<{_NOTES_COLUMN}}{first}", *(" " * _NOTES_COLUMN + note for note in more)])


def _class_of(method: Any) -> str:
    owner = getattr(method, "__self__", None)
    return type(owner).__name__ if owner is not None else repr(method)
