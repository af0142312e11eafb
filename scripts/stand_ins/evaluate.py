"""Stands in for the package `evaluate`, which downloads its metrics: small ones of the same names and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Metric:
    """What `load` returns: a function of predictions and references."""

    def __init__(self, function: Callable[..., dict[str, Any]]) -> None:
        self._function = function

    def compute(self, *, predictions: Any, references: Any, **settings: Any) -> dict[str, Any]:
        """The metric's values by name; settings change nothing."""
        return self._function(predictions, references)


def load(name: str, *args: Any, **settings: Any) -> Metric:
    """The metric of this name."""
    return Metric(_METRICS[name])


def _accuracy(predictions: Any, references: Any) -> dict[str, Any]:
    return {"accuracy": float((np.asarray(predictions) == np.asarray(references)).mean())}


def _mean_squared_error(predictions: Any, references: Any) -> dict[str, Any]:
    return {"mse": float(((np.asarray(predictions) - np.asarray(references)) ** 2).mean())}


def _f1(predictions: Any, references: Any) -> dict[str, Any]:
    """Micro-averaged."""
    ours, true = np.asarray(predictions) > 0, np.asarray(references) > 0
    return {"f1": float(2 * (ours & true).sum() / max(1, ours.sum() + true.sum()))}


def _entities(predictions: Sequence[list[str]], references: Sequence[list[str]]) -> dict[str, Any]:
    """Of single tokens, not of spans."""
    ours = np.array([tag for tags in predictions for tag in tags])
    true = np.array([tag for tags in references for tag in tags])
    hits = ((ours == true) & (true != "O")).sum()
    precision, recall = hits / max(1, (ours != "O").sum()), hits / max(1, (true != "O").sum())
    values = {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / max(1e-9, precision + recall),
        "accuracy": (ours == true).mean(),
    }
    return {f"overall_{name}": float(value) for name, value in values.items()}


def _shared_words(predictions: Sequence[str], references: Sequence[Any]) -> list[float]:
    """For each row, the share of its words that the reference has too."""
    shares = []
    for ours, reference in zip(predictions, references, strict=True):
        true = reference[0] if isinstance(reference, list) else reference
        words = ours.split()
        shares.append(sum(word in true.split() for word in words) / max(1, len(words)))
    return shares


def _bleu(predictions: Any, references: Any) -> dict[str, Any]:
    return {"score": 100 * float(np.mean(_shared_words(predictions, references)))}


def _rouge(predictions: Any, references: Any) -> dict[str, Any]:
    return {"rouge1": float(np.mean(_shared_words(predictions, references)))}


def _answers(predictions: Any, references: Any) -> dict[str, Any]:
    true = {row["id"]: row["answers"]["text"] for row in references}
    ours = [row["prediction_text"] for row in predictions]
    texts = [true[row["id"]][0] for row in predictions]
    exact = [text == answer for text, answer in zip(ours, texts, strict=True)]
    return {"exact_match": 100 * float(np.mean(exact)), "f1": 100 * float(np.mean(_shared_words(ours, texts)))}


_METRICS: dict[str, Callable[..., dict[str, Any]]] = {
    "accuracy": _accuracy,
    "mse": _mean_squared_error,
    "f1": _f1,
    "seqeval": _entities,
    "sacrebleu": _bleu,
    "rouge": _rouge,
    "squad": _answers,
}
