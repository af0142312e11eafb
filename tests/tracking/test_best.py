"""The best value of a run: one rule for the terminal, the notebook and the summary."""

from __future__ import annotations

import math

from pytorch_accelerated.callbacks.summing_up import best_record
from pytorch_accelerated.tracking import InMemoryRunHistory, RunHistory


def history(**metrics: list[float]) -> RunHistory:
    found = InMemoryRunHistory()
    for epoch in range(max(map(len, metrics.values()))):
        for name, values in metrics.items():
            found.update_metric(name, values[epoch])
        found._increment_epoch()
    return found


def best(found: RunHistory, **watched: bool) -> tuple[str, float, int] | None:
    record = best_record(found, watched)
    return None if record is None else (record.name, record.value, record.epoch)


def test_watched_metrics_come_first_then_the_evaluation_loss_then_what_its_name_explains() -> None:
    found = history(
        train_loss_epoch=[3.0, 2.0, 1.0],
        eval_accuracy=[0.5, 0.9, 0.9],
        eval_loss_epoch=[2.0, math.nan, 2.5],
        eval_margin=[1.0, 2.0, 3.0],
    )
    assert best(found, missing=True, eval_margin=True) == ("eval_margin", 3.0, 3)
    assert best(found) == ("eval_loss_epoch", 2.0, 1)
    assert best(found, eval_accuracy=True) == ("eval_accuracy", 0.9, 2), "the first of equal values"
    assert best(history(train_loss_epoch=[2.0, 1.0], eval_f1=[0.7, 0.6])) == ("eval_f1", 0.7, 1)


def test_training_without_an_evaluation_has_no_best_epoch() -> None:
    assert best(history(train_loss_epoch=[2.0, 1.0])) is None
    assert best(history(train_loss_epoch=[2.0, 1.0]), train_loss_epoch=False) == ("train_loss_epoch", 1.0, 2)
