"""Does the suggestion of `Trainer.find_lr` train as well as the best of ten learning rates? Writes a table.

    python -m benchmarks.find_lr        # two minutes; writes benchmarks/results/find_lr.md and .json

scikit-learn's digits; two models and two optimizers, five seeds each. Each seed has its own weights, its own order of
samples and its own suggestion, which comes from the training rows alone. The grid's best rate is chosen with the
held-out rows that all are compared by, which is in its favour.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn

from pytorch_accelerated import Trainer

RESULTS = Path(__file__).parent / "results"
GRID = [3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0]
SEEDS = range(5)
EPOCHS = 10
BATCH_SIZE = 64
HELD_OUT = 450
COMMAND = "python -m benchmarks.find_lr"

Rows = tuple[torch.Tensor, torch.Tensor]


class Result(NamedTuple):
    """What one run reached on the held-out rows."""

    accuracy: float
    loss: float


def digits(seed: int = 0, number_held_out: int = HELD_OUT) -> tuple[Rows, Rows]:
    """The training rows and the held-out rows, in a random order that the seed determines."""
    found = load_digits()
    images = torch.tensor(found.data / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return split((images, torch.tensor(found.target)), number_held_out, seed)


def split(rows: Rows, number_held_out: int, seed: int) -> tuple[Rows, Rows]:
    """The training rows, and as many as wanted that are held out, at random."""
    order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[:number_held_out], order[number_held_out:]
    return (rows[0][train], rows[1][train]), (rows[0][held_out], rows[1][held_out])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(512, 10)),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"MLP": perceptron, "CNN with BatchNorm, dropout": convolutions}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD, momentum 0.9": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "AdamW": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
}


def make_trainer(model: str, optimizer: str, lr: float, seed: int) -> Trainer:
    torch.manual_seed(seed)
    module = MODELS[model]()
    made = OPTIMIZERS[optimizer](module.parameters(), lr)
    return Trainer(module, nn.CrossEntropyLoss(), made, callbacks=(), seed=seed)


def train(model: str, optimizer: str, lr: float, seed: int) -> Result:
    train_rows, held_out = digits()
    trainer = make_trainer(model, optimizer, lr, seed)
    trainer.train(train_rows, EPOCHS, per_device_batch_size=BATCH_SIZE)
    return judge(trainer, held_out)


def judge(trainer: Trainer, held_out: Rows) -> Result:
    """What the model of a trainer reaches on these rows."""
    size = len(held_out[0])
    loss = trainer.evaluate(held_out, per_device_batch_size=size)["evaluation_loss"]
    predicted = trainer.predict(held_out[0], per_device_batch_size=size).argmax(1)
    return Result((predicted == held_out[1]).double().mean().item(), loss)


def suggest(model: str, optimizer: str, seed: int) -> float:
    train_rows, _ = digits()
    test = make_trainer(model, optimizer, 1e-3, seed).find_lr(train_rows, per_device_batch_size=BATCH_SIZE)
    assert test.suggestion is not None
    return test.suggestion


def compare(model: str, optimizer: str) -> dict[str, Any]:
    """The suggestions of all seeds against the grid."""
    grid = {lr: [train(model, optimizer, lr, seed) for seed in SEEDS] for lr in GRID}
    suggestions = [suggest(model, optimizer, seed) for seed in SEEDS]
    own = [train(model, optimizer, lr, seed) for lr, seed in zip(suggestions, SEEDS, strict=True)]
    best = max(grid, key=lambda lr: statistics.fmean(result.accuracy for result in grid[lr]))
    differences = [mine.accuracy - other.accuracy for mine, other in zip(own, grid[best], strict=True)]
    # Two standard errors of the mean paired difference, and at least one held-out row.
    noise = max(2 * statistics.stdev(differences) / math.sqrt(len(differences)), 1 / HELD_OUT)
    return {
        "model": model,
        "optimizer": optimizer,
        "suggestions": suggestions,
        "suggestion": summary_of(own),
        "best_rate": best,
        "best": summary_of(grid[best]),
        "difference": statistics.fmean(differences),
        "noise": noise,
        "within_noise": statistics.fmean(differences) >= -noise,
        "grid": {f"{lr:g}": summary_of(results) for lr, results in grid.items()},
    }


def summary_of(results: list[Result]) -> dict[str, float]:
    accuracies = [result.accuracy for result in results]
    return {
        "accuracy": statistics.fmean(accuracies),
        "spread": statistics.stdev(accuracies),
        "loss": statistics.fmean(result.loss for result in results),
    }


def page(found: list[dict[str, Any]]) -> str:
    lines = [
        "# The suggestion of `find_lr` against a grid of ten rates",
        "",
        f"Made by `{COMMAND}` with torch {torch.__version__} on Python {platform.python_version()}: scikit-learn's "
        f"digits, {EPOCHS} epochs in batches of {BATCH_SIZE}, a constant rate, accuracy on {HELD_OUT} held-out rows, "
        f"mean of {len(SEEDS)} seeds. *Noise* is two standard errors of the mean paired difference.",
        "",
        "| model | optimizer | suggestions | accuracy | best of the grid | its accuracy | difference | noise | holds |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for one in found:
        suggestions = one["suggestions"]
        lines.append(
            f"| {one['model']} | {one['optimizer']} | {min(suggestions):.1e} to {max(suggestions):.1e} | "
            f"{one['suggestion']['accuracy']:.2%} | {one['best_rate']:g} | {one['best']['accuracy']:.2%} | "
            f"{one['difference']:+.2%} | {one['noise']:.2%} | {'yes' if one['within_noise'] else '**no**'} |"
        )
    lines += ["", "The accuracy of each rate of the grid:", ""]
    lines += ["| rate | " + " | ".join(f"{one['model']}, {one['optimizer']}" for one in found) + " |"]
    lines += ["| ---: |" + " ---: |" * len(found)]
    for lr in GRID:
        lines.append(f"| {lr:g} | " + " | ".join(f"{one['grid'][f'{lr:g}']['accuracy']:.2%}" for one in found) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    found = [compare(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]
    (RESULTS / "find_lr.json").write_text(json.dumps(found, indent=2) + "\n")
    (RESULTS / "find_lr.md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
