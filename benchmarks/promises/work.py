"""The work of one process: ``python -m benchmarks.promises.work LIBRARY TASK RESULT``.

TASK is a `Task` as JSON. RESULT is the file to write: the final weights, or the mean loss of an evaluation.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
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


def after_flips(task: Task, train: Callable[[Task], dict[str, torch.Tensor]]) -> dict[str, int]:
    """Resume from damaged copies of the checkpoints in `task.folder`, and count what became of it.

    Returns:
        How many were *noticed* (an error, or another checkpoint in its place that leads to the same weights),
        *harmless* (the same weights) and *trained on* (other weights, and not a word).
    """
    assert task.folder is not None
    intact, copy = Path(task.folder), Path(f"{task.folder}-damaged")
    chosen = random.Random(0)
    found = {"noticed": 0, "harmless": 0, "trained on": 0}
    shutil.copytree(intact, copy)
    right = train(dataclasses.replace(task, folder=str(copy), resumes=True))
    for _ in range(task.flips):
        shutil.rmtree(copy)
        shutil.copytree(intact, copy)
        flip_a_bit(copy, chosen)
        try:
            came_out = train(dataclasses.replace(task, folder=str(copy), resumes=True))
        except Exception:
            found["noticed"] += 1
        else:
            is_same = all(torch.equal(value, right[name]) for name, value in came_out.items())
            found["harmless" if is_same else "trained on"] += 1
    return found


def flip_a_bit(folder: Path, chosen: random.Random) -> None:
    """Flip one bit in one of the files below `folder`, every byte being as likely as any other."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    (path,) = chosen.choices(files, [file.stat().st_size for file in files])
    content = bytearray(path.read_bytes())
    content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
    path.write_bytes(content)


def main() -> None:
    from benchmarks.promises.libraries import LIBRARIES

    name, task_text, result = sys.argv[1:]
    task = Task(**json.loads(task_text))
    library = LIBRARIES[name]()
    found: Any
    if task.what == "evaluate":
        found = library.evaluate(task)
    elif task.what == "flip":
        found = after_flips(task, library.train)
    else:
        found = library.train(task)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(found, result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
