"""The page of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.reporting import row_of
from benchmarks.techniques.applied import PLAIN
from benchmarks.techniques.measuring import TRIALS

HOW = (
    "Plain training is AdamW at a constant rate: the best of four by mean accuracy over two other seeds. A technique "
    "with a rate of its own has it chosen in the same way, and the others keep that of plain training. Each seed has "
    "its own held-out rows, weights and order of samples, which are the same for all techniques, and as many updates. "
    "Accuracy and loss are on held-out rows, mean ± standard deviation over the seeds; a difference is the mean over "
    "pairs of one seed, ± its standard error."
)
CHECKPOINTED = (
    "Patches, transformer: the weights after training are the same to the bit in all seeds, with {time:.2f} times the "
    "processor time and {memory:.2f} times what its forward pass keeps."
)


def _column(found: Mapping[str, Any], key: str) -> list[float]:
    return [result[key] for result in found["results"]]


def _mean(found: Mapping[str, Any], key: str) -> float:
    return statistics.fmean(_column(found, key))


def _paired(found: Mapping[str, Any], plain: Mapping[str, Any], key: str) -> tuple[list[float], float, float]:
    """The differences, their mean, and its standard error."""
    pairs = zip(_column(found, key), _column(plain, key), strict=True)
    differences = [one - other for one, other in pairs]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return differences, statistics.fmean(differences), error


def _row(task: str, name: str, found: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    def spread(of: Mapping[str, Any], key: str, scale: float, digits: int) -> str:
        deviation = statistics.stdev(_column(of, key))
        return f"{scale * _mean(of, key):.{digits}f} ± {scale * deviation:.{digits}f}"

    differences, mean, error = _paired(found, plain, "accuracy")
    _, loss, loss_error = _paired(found, plain, "loss")
    won, lost = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    rate = "suggested" if "find_lr" in name else f"{found['rate']:g}"
    return [
        *(name, task, f"{plain['rate']:g}", rate, spread(plain, "accuracy", 100, 1), spread(found, "accuracy", 100, 1)),
        *(f"{100 * mean:+.2f} ± {100 * error:.2f}", f"{won}, {len(differences) - won - lost}, {lost}"),
        *(spread(plain, "loss", 1, 3), spread(found, "loss", 1, 3), f"{loss:+.3f} ± {loss_error:.3f}"),
    ]


HEADS = [
    *("technique", "data and model", "rate, plain", "rate", "accuracy in %, plain", "accuracy", "difference"),
    *("seeds won, even, lost", "loss, plain", "loss", "difference of the loss"),
]


def table(tasks: Mapping[str, Any]) -> list[str]:
    """The rows of all tasks, by technique."""
    names = dict.fromkeys(name for found in tasks.values() for name in found if name != PLAIN)
    rows = [row_of(HEADS), row_of(["---", "---", *["---:"] * (len(HEADS) - 2)])]
    for name in names:
        rows += [row_of(_row(task, name, of[name], of[PLAIN])) for task, of in tasks.items() if name in of]
    return rows


def outcomes(tasks: Mapping[str, Any]) -> list[str]:
    """Which rows differ from plain training by more than two standard errors in accuracy."""
    verdicts: dict[str, list[str]] = {"better": [], "worse": []}
    number = 0
    for task, of in tasks.items():
        for name in of:
            if name != PLAIN:
                number += 1
                _, mean, error = _paired(of[name], of[PLAIN], "accuracy")
                if abs(mean) > 2 * error:
                    verdicts["better" if mean > 0 else "worse"].append(f"{name} ({task})")
    lines = [f"Of {number} rows, the accuracy of these differs by more than two standard errors of the difference:", ""]
    return lines + [f"- {verdict}: {'; '.join(rows) or 'none'}" for verdict, rows in verdicts.items()]


def page(results: Mapping[str, Any]) -> str:
    lines = ["# Techniques beside plain training", "", HOW, ""]
    lines += [f"- {key}: {value}" for key, value in results["run"].items()]
    for title, key in (("With random weights at the start", "tasks"), ("Fine-tuning with few rows", "fine_tuning")):
        if results[key]:
            lines += ["", f"## {title}", "", *table(results[key]), "", *outcomes(results[key])]
    if figures := results["checkpointing"]:
        lines += ["", "## `checkpoint_activations`", "", CHECKPOINTED.format(**figures)]
    if studies := results["pruning"]:
        lines += ["", "## `OptunaCallback` with a `MedianPruner`", "", _about_pruning(studies)]
    return "\n".join(lines) + "\n"


def _about_pruning(studies: Sequence[Mapping[str, Any]]) -> str:
    same = sum(study["all"]["trial"] == study["pruned"]["trial"] for study in studies)
    share = statistics.fmean(study["pruned"]["epochs"] / study["all"]["epochs"] for study in studies)
    losses = [statistics.fmean(study[kind]["best"] for study in studies) for kind in ("all", "pruned")]
    return (
        f"{TRIALS} trials of a random search, the same with and without pruning (digits, MLP): the same best trial in "
        f"{same} of {len(studies)} studies, with {share:.0%} of the epochs. Mean of the best losses: {losses[0]:.4f} "
        f"without pruning, {losses[1]:.4f} with it."
    )
