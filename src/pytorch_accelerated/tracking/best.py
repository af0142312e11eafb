"""The value of a run history that says which epoch is the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pytorch_accelerated.tracking.names import greater_is_better, role_and_quantity
from pytorch_accelerated.tracking.values import MetricRecord


def best_record(records: Iterable[MetricRecord], watched: Mapping[str, bool]) -> MetricRecord | None:
    """The first of the best values so far of the metric that decides which epoch is the best; None if none does.

    That is the first watched metric with finite values, else the loss of evaluations, else another metric of
    evaluations whose name says what is better.

    Args:
        records: of the run history.
        watched: the metrics that callbacks watch, and whether greater is better.
    """
    records = [record for record in records if record.is_scalar and math.isfinite(record.value)]
    evaluated = {}
    for name in dict.fromkeys(record.name for record in records):
        role, quantity = role_and_quantity(name)
        greater = greater_is_better(quantity)
        if greater is not None and "train" not in role:
            evaluated[name] = greater
    losses_first = sorted(evaluated, key=lambda name: (name != "eval_loss_epoch", role_and_quantity(name)[1] != "loss"))
    for name in [*watched, *losses_first]:
        values = [record for record in records if record.name == name]
        if values:
            greater = watched.get(name, evaluated.get(name, False))
            return (max if greater else min)(values, key=lambda record: record.value)
    return None
