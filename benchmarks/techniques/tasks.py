"""The tasks that techniques are compared on: data, a model, and a budget."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_sample_images
from torch import nn

from benchmarks.find_lr import Rows, convolutions, digits, perceptron, split
from pytorch_accelerated import Trainer

BANDS, SIDE, WIDTH = 4, 16, 32
FEW = 60  # rows to fine-tune with


@functools.cache
def patches() -> Rows:
    """All 16x16 patches of two photos that do not overlap, and from which quarter of the height of which they are."""
    inputs, labels = [], []
    for number, photo in enumerate(load_sample_images().images):
        pixels = torch.tensor(photo / 255, dtype=torch.float32).permute(2, 0, 1)
        tiles = pixels.unfold(1, SIDE, SIDE).unfold(2, SIDE, SIDE).movedim(0, 2)
        rows, columns = tiles.shape[:2]
        inputs.append(tiles.flatten(0, 1))
        labels.append((number * BANDS + torch.arange(rows) * BANDS // rows).repeat_interleave(columns))
    return torch.cat(inputs) - 0.5, torch.cat(labels)


class Tokens(nn.Module):
    """Four tokens of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(3 * 64, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(4, WIDTH))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.projection(nn.functional.unfold(images, 8, stride=8).mT) + self.place


class MeanOfTokens(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.mean(1)


def transformer() -> nn.Module:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)

    return nn.Sequential(Tokens(), layer(), layer(), MeanOfTokens(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * BANDS))


@dataclass(frozen=True)
class Task:
    """Data and a model; `rates` are tried. If `few`, a model that knows half of the classes is to learn the others."""

    name: str
    make: Callable[[], nn.Module]
    load: Callable[[int], tuple[Rows, Rows]]
    rates: Sequence[float]
    epochs: int
    batch_size: int
    few: bool = False
    half: int = 5

    def rows(self, seed: int) -> tuple[Rows, Rows]:
        train, held_out = self.load(seed)
        if not self.few:
            return train, held_out
        everything = torch.cat([train[0], held_out[0]]), torch.cat([train[1], held_out[1]])
        new = _of_classes(everything, self.half, 2 * self.half)
        return (new[0][:FEW], new[1][:FEW]), (new[0][FEW:], new[1][FEW:])

    def model(self, seed: int) -> nn.Module:
        if not self.few:
            torch.manual_seed(seed)
            return self.make()
        return self.with_new_head(copy.deepcopy(_trained_on_other_classes(self, seed)), seed)

    def with_new_head(self, model: Any, seed: int) -> Any:
        """The model with a last layer for half of the classes."""
        torch.manual_seed(seed)
        model[-1] = nn.Linear(model[-1].in_features, self.half)
        return model


def _of_classes(rows: Rows, first: int, end: int) -> Rows:
    """The rows of some classes, which are then counted from 0."""
    chosen = (rows[1] >= first) & (rows[1] < end)
    return rows[0][chosen], rows[1][chosen] - first


@functools.cache
def _trained_on_other_classes(task: Task, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = task.with_new_head(task.make(), seed)
    rows = _of_classes(task.load(seed)[0], 0, task.half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rates[1])
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(), seed=seed)
    trainer.train(rows, 8, per_device_batch_size=64)
    return model


def _patches(seed: int) -> tuple[Rows, Rows]:
    return split(patches(), 520, seed)


def _digits(seed: int) -> tuple[Rows, Rows]:
    return digits(seed, 1197)  # which leaves 600 rows to train with


SLOW, MIDDLE, FAST = (3e-4, 1e-3, 3e-3, 1e-2), (1e-3, 3e-3, 1e-2, 3e-2), (1e-2, 3e-2, 1e-1, 3e-1)
TASKS = [
    Task("digits, MLP", perceptron, _digits, FAST, 10, 32),
    Task("digits, CNN", convolutions, _digits, MIDDLE, 8, 32),
    Task("patches, transformer", transformer, _patches, SLOW, 8, 128),
    Task("digits 5–9 after 0–4, CNN", convolutions, _digits, MIDDLE, 12, 16, few=True),
    Task("flower after china, transformer", transformer, _patches, SLOW, 12, 16, few=True, half=BANDS),
]
