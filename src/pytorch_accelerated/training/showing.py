"""What a trainer shows of itself in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from pytorch_accelerated.tracking.history import RunHistory
from pytorch_accelerated.tracking.html import html_of_facts
from pytorch_accelerated.tracking.part_facts import PartFacts, part_facts

_SHOWN_SETTINGS = ("lr", "momentum", "betas", "weight_decay")


def html_of_trainer(
    title: str,
    *,
    model: nn.Module,
    loss_func: Any,
    optimizer: Any,
    scheduler: Any,
    callbacks: Iterable[Any],
    history: RunHistory,
) -> str:
    """The parts of a trainer as a table, and its run history if that has any metrics.

    Args:
        title: above the table.
        model, loss_func, optimizer, scheduler: of the trainer, wrapped or not.
        callbacks: of the trainer, in order.
        history: of the last run.
    """
    facts = part_facts(model, loss_func=loss_func, optimizer=optimizer, scheduler=scheduler)
    frozen = facts.parameters - facts.trainable_parameters
    size = f"{facts.parameters:,} parameters" + (
        f", {facts.trainable_parameters:,} of them trainable" if frozen else ""
    )
    rows = [
        ("model", f"{facts.model}, {size}"),
        ("loss", facts.loss or "the model's own"),
        ("optimizer", facts.optimizer or "none"),
        *_groups(facts),
        *([] if facts.scheduler is None else [("scheduler", facts.scheduler)]),
        ("callbacks", ", ".join(type(each).__name__ for each in callbacks) or "none"),
    ]
    show_history = getattr(history, "_repr_html_", None)
    shown = show_history() if show_history is not None and history.get_metric_names() else ""
    return html_of_facts(title, rows) + shown


def _groups(facts: PartFacts) -> Iterator[tuple[str, str]]:
    for index, (group, size) in enumerate(zip(facts.groups, facts.group_sizes, strict=True)):
        settings = [f"{name} {_text(group[name])}" for name in _SHOWN_SETTINGS if name in group]
        yield f"group {index}", ", ".join([f"{size:,} parameters", *settings])


def _text(value: Any) -> str:
    return str(value) if isinstance(value, (tuple, list)) else f"{float(value):.4g}"
