"""What the libraries are asked to do, and the data and the models that they get."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

FEATURES, CLASSES = 20, 5


@dataclasses.dataclass
class Task:
    """What a library is asked to do.

    Attributes:
        what: "train", "evaluate", or "flip": resume from copies of the newest checkpoint with one flipped bit each.
        rows: the number of samples.
        accumulated: the number of batches of each update.
        is_augmented: whether rows are disturbed at random when they are read.
        dropout: its probability.
        width: the model's hidden width.
        folder: where checkpoints are, or None.
        save_every: the number of updates between two checkpoints.
        resumes: whether to resume from the newest checkpoint.
        die_at: the update in which the process kills itself, counted from 1, or None.
        mark: a file that is made in update `mark_at`.
        flips: how many bits to try.
    """

    what: str = "train"
    rows: int = 100
    batch_size: int = 32
    accumulated: int = 1
    epochs: int = 1
    workers: int = 0
    shuffles: bool = False
    is_augmented: bool = False
    dropout: float = 0.0
    width: int = 32
    folder: str | None = None
    save_every: int = 10
    resumes: bool = False
    die_at: int | None = None
    mark: str | None = None
    mark_at: int | None = None
    flips: int = 0


class Rows(Dataset[Any]):
    """Rows of random features with labels that depend on them."""

    def __init__(self, task: Task, *, as_dicts: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(task.rows, FEATURES, generator=generator)
        self.labels = (self.inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(dim=1)
        self.is_augmented = task.is_augmented
        self.as_dicts = as_dicts

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        inputs = self.inputs[index]
        if self.is_augmented:
            inputs = inputs + 0.1 * torch.randn(FEATURES)
        return {"inputs": inputs, "labels": self.labels[index]} if self.as_dicts else (inputs, self.labels[index])


class Model(nn.Module):
    """A perceptron that can kill its process in a given forward pass of training."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        generator_state = torch.get_rng_state()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, task.width), nn.ReLU(), nn.Dropout(task.dropout), nn.Linear(task.width, CLASSES)
        )
        torch.set_rng_state(generator_state)
        self.task, self.forwards = task, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
            if self.forwards == self.task.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.forwards == self.task.mark_at:
                Path(str(self.task.mark)).touch()
        return self.layers(inputs)


class ModelWithLoss(Model):
    """The same, as libraries with Hugging Face's API want models to be."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(inputs)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the model's weights."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
