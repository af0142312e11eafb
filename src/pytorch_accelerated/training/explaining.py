"""Explains the order of a run: its hooks, its events, the recorded metrics, and who handles them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pytorch_accelerated.callbacks.handler import CallbackHandler
from pytorch_accelerated.training.order import COUNTS_ITEMS, WHENEVER, WITH_EVALUATION, order_of

_NOTES_COLUMN = 44


def explain_run(
    kind: type, handler: CallbackHandler, custom_events: Collection[str], *, num_epochs: int, evaluate: bool
) -> str:
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


def _with_notes(line: str, kind: type, handler: CallbackHandler, custom_events: Collection[str]) -> str:
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
