"""One script for many places: trains on digits, and notes what it computed and which rows it read.

Arguments: a file for the results, "whole" or "sharded", and "float32" or "float64".
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import MetricsCallback, TrainerCallback

ROWS_OF_UPDATE = 48  # over all ranks


class Digits(Dataset[Any]):
    """Rows of scikit-learn's digits, with their indices."""

    def __init__(self, rows: slice, dtype: torch.dtype) -> None:
        inputs, targets = load_digits(return_X_y=True)
        self.inputs, self.targets = torch.tensor(inputs[rows] / 16, dtype=dtype), torch.tensor(targets[rows])

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index], index


class Seen(TrainerCallback):
    """Notes the rows of each batch that counts."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_train_step_end(self, trainer: Trainer, *, batch: Any, **kwargs: Any) -> None:
        self.rows += batch[2].tolist()


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return (outputs.argmax(1) == targets).double().mean().item()


def train(path: str, way: str, dtype_name: str) -> None:
    """Train as in every other place, and write losses, metrics and rows."""
    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10)).to(dtype)
    if way == "sharded":
        # The group has to be there before: the trainer makes it.
        Trainer(nn.Linear(1, 1), None, None, callbacks=())
        fully_shard(model)
    seen = Seen()
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), 1e-2),
        callbacks=[MetricsCallback({"accuracy": accuracy}), seen],
        seed=3,
    )
    ranks = trainer.run_context.parts.ranks
    data = {"num_workers": 0}
    trainer.train(
        Digits(slice(0, 1440), dtype),
        2,
        Digits(slice(1440, None), dtype),
        per_device_batch_size=ROWS_OF_UPDATE // ranks.count,
        train_dataloader_kwargs=data,
        eval_dataloader_kwargs=data,
    )
    history = trainer.run_history
    values = {name: history.get_metric_values(name) for name in sorted(history.get_metric_names())}
    read = [row for rows in ranks.exchange(seen.rows) for row in rows]
    if ranks.is_first:
        times_read = sorted(set(map(read.count, range(1440))))
        Path(path).write_text(json.dumps({"ranks": ranks.count, "values": values, "times_read": times_read}))


if __name__ == "__main__":
    train(*sys.argv[1:])
