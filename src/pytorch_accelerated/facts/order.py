"""The order of a run as data: the hooks that are called, the events that are fired, the metrics that are recorded.

Names that begin with ``on_`` are events, names in brackets are metrics, and the other names are hooks; a hook calls the
names that are indented below it. A line in plain words stands for the part of that name. A line with a condition behind
it, and the lines below that line, belong to the order only if the condition holds.

`Trainer.explain`, the checks for misspelt names, ``docs/events.md`` and the tests are made from this table.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

_NOTES_COLUMN = 44

WITH_EVALUATION = "with an evaluation set"
COUNTS_ITEMS = "if `count_batch_items` is overridden"
WHENEVER = "whenever it happens"

PARTS = {
    "Trainer(...)": """
_create_accelerator
_create_callback_handler
on_init_end
""",
    "the set-up": """
create_train_dataloader
  get_default_train_dl_kwargs
create_eval_dataloader  (with an evaluation set)
  get_default_eval_dl_kwargs
_prepare_model_optimizer_and_dataloaders
_create_run_config
create_scheduler
training_run_start
on_training_run_start
""",
    "a batch": """
on_train_step_start
calculate_train_batch_loss
on_train_step_end
backward_step
""",
    "the step of an update": """
on_optimizer_step_start
_clip_gradients
optimizer_step
scheduler_step
optimizer_zero_grad
on_optimizer_step_end
""",
    "an epoch of training": """
train_epoch_start
on_train_epoch_start
each update:
  each batch of the update:  (if `count_batch_items` is overridden)
    count_batch_items
  each batch of the update:
    a batch
  the step of an update
on_step_records
train_epoch_end
[train_loss_epoch]
on_train_epoch_end
""",
    "a batch of an evaluation": """
on_eval_step_start
calculate_eval_batch_loss
on_eval_step_end
""",
    "an evaluation before its loss is recorded": """
eval_epoch_start
on_eval_epoch_start
each batch:
  count_batch_items  (if `count_batch_items` is overridden)
  a batch of an evaluation
eval_epoch_end
""",
    "an evaluation": """
an evaluation before its loss is recorded
[eval_loss_epoch]
on_eval_epoch_end
""",
    "the end of an epoch": """
training_run_epoch_end
on_training_run_epoch_end
""",
    "the end of the run": """
training_run_end
on_training_run_end
""",
    "train(...)": """
the set-up
each epoch:
  an epoch of training
  an evaluation  (with an evaluation set)
  the end of an epoch
the end of the run
""",
    "the set-up of evaluate": """
create_eval_dataloader
  get_default_eval_dl_kwargs
_prepare_model_optimizer_and_dataloaders
_create_run_config
evaluation_run_start
on_evaluation_run_start
""",
    "the end of evaluate": """
evaluation_run_end
on_evaluation_run_end
""",
    "evaluate(...)": """
the set-up of evaluate
an evaluation before its loss is recorded
[evaluation_loss]
on_eval_epoch_end
the end of evaluate
""",
    "a batch of a prediction": """
calculate_predict_batch_outputs
on_prediction_step_end
""",
    "predict(...)": """
on_prediction_run_start
each batch:
  a batch of a prediction
on_prediction_run_end
""",
    WHENEVER: """
on_non_finite_loss
on_loss_spike
on_stop_training_error
on_exception
""",
}


def order_of(part: str, conditions: Collection[str]) -> Iterator[str]:
    """The lines of a part with the parts that it consists of, where these conditions hold and the others do not."""
    left_out = None  # the indentation of a line whose condition does not hold
    for line in PARTS[part].strip().splitlines():
        text, _, condition = line.strip().partition("  ")
        indentation = len(line) - len(line.lstrip())
        if left_out is not None and indentation > left_out:
            continue
        left_out = None if not condition or condition.strip("()") in conditions else indentation
        if left_out is None:
            yield from (
                " " * indentation + below for below in (order_of(text, conditions) if text in PARTS else [text])
            )


def _names() -> Iterator[str]:
    conditions = re.findall(r"  \((.*)\)$", "\n".join(PARTS.values()), re.MULTILINE)
    for part in ("Trainer(...)", "train(...)", "evaluate(...)", "predict(...)", WHENEVER):
        lines = map(str.strip, order_of(part, conditions))
        yield from (line for line in lines if line.isidentifier())


NAMES = tuple(dict.fromkeys(_names()))
EVENTS = tuple(name for name in NAMES if name.startswith("on_"))
EVENTS_OF_UPDATE = tuple(
    name for part in ("a batch", "the step of an update") for name in PARTS[part].split() if name in EVENTS
)
HOOKS = tuple(name for name in NAMES if not name.startswith(("on_", "_")))


def explain_run(kind: type, handler: Any, custom_events: Collection[str], *, num_epochs: int, evaluate: bool) -> str:
    """One line per hook, event and recorded [metric], indented by what it belongs to. Nothing is run.

    Args:
        kind: the class of the trainer.
        handler: the handler of the callbacks.
        custom_events: events that the trainer fires itself.
        num_epochs: the number of epochs of the training run.
        evaluate: whether there is an evaluation set.
    """
    conditions = [WITH_EVALUATION] if evaluate else []
    if _overrider(kind, "count_batch_items"):
        conditions.append(COUNTS_ITEMS)
    parts = ["Trainer(...)", "train(...)", "evaluate(...)", "predict(...)", WHENEVER]
    if not evaluate:
        parts.remove("evaluate(...)")
    epochs = f"each of {num_epochs} epochs:" if num_epochs > 1 else "the epoch:"
    sections = []
    for part in parts:
        lines = [*order_of(part, conditions), *(custom_events if part == WHENEVER else ())]
        shown = [
            _with_notes(f"  {line}".replace("each epoch:", epochs), kind, handler, custom_events) for line in lines
        ]
        sections.append("\n".join([f"{part}:", *shown]))
    return "\n\n".join(sections)


def _with_notes(line: str, kind: type, handler: Any, custom_events: Collection[str]) -> str:
    """The line with its callbacks from top to bottom, or with the class that overrides a hook."""
    name = line.strip()
    notes = []
    if name.startswith("on_") or name in custom_events:
        notes = [_owner_of(method) for method in handler.acting_methods(name)] or ["-"]
    elif overrider := _overrider(kind, name):
        notes = [f"overridden in {overrider}"]
    if not notes:
        return line
    return f"{line:<{_NOTES_COLUMN}}" + ("\n" + " " * _NOTES_COLUMN).join(notes)


def _owner_of(method: Any) -> str:
    owner = getattr(method, "__self__", None)
    return repr(method) if owner is None else type(owner).__name__


def _overrider(kind: type, hook: str) -> str | None:
    """The name of the user's class that overrides the hook; None if there is none."""
    owner = next((base for base in kind.__mro__ if hook in vars(base)), kind)
    return owner.__name__ if hook in vars(owner) and not owner.__module__.startswith("pytorch_accelerated.") else None
