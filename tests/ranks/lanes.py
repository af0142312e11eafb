"""Trains with lanes, as JSON of options in the first argument says, and prints what has become of it."""

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import ModelEmaCallback, TrainerCallback
from pytorch_accelerated.schedulers import CosineLrScheduler
from tests.support.resuming import SaveAndStop

FEATURES, CLASSES = 7, 3


class Rows(torch.utils.data.Dataset[Any]):
    """Rows one by one, with noise of their own."""

    def __init__(self, rows: int, bad_row: int | None = None) -> None:
        self.inputs, self.targets = data(rows)
        if bad_row is not None:
            self.inputs[bad_row] = torch.nan

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.inputs, self.targets
        return inputs[index] + 0.1 * torch.rand(FEATURES) + 0.1 * np.random.rand(), targets[index]


class DrawsAfterUpdates(TrainerCallback):
    """Moves the weights by noise after each update, as a callback of a user may."""

    def on_optimizer_step_end(self, trainer: Any, **kwargs: Any) -> None:
        """Draw."""
        with torch.no_grad():
            trainer.get_model()[1].bias.add_(1e-3 * torch.randn(CLASSES))


class CountsRows(TrainerCallback):
    """Counts how many rows `gather` gives over a pass: each once, also where a process has a lane less."""

    def __init__(self) -> None:
        self.rows = {"train": 0, "eval": 0}

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """Begin."""
        self.rows["train"] = 0

    def on_eval_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """Begin."""
        self.rows["eval"] = 0

    def on_train_step_end(self, trainer: Any, batch: Any, **kwargs: Any) -> None:
        """Count."""
        self.rows["train"] += len(trainer.gather(batch[1]))

    def on_eval_step_end(self, trainer: Any, batch: Any, **kwargs: Any) -> None:
        """Count."""
        self.rows["eval"] += len(trainer.gather(batch[1]))


class CountsItems(Trainer):
    """Takes the mean over some of the rows, and says how many."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Classes above 0 count twice."""
        outputs = self.model(batch[0])
        weights = 1 + (batch[1] > 0)
        losses = nn.functional.cross_entropy(outputs, batch[1], reduction="none")
        mean, items = (losses * weights).sum() / weights.sum(), int(weights.sum())
        return {"loss": mean, "model_outputs": outputs, "batch_size": len(outputs), "num_items_in_batch": items}


def data(rows: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, FEATURES, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long()


def make_model(*, has_dropout: bool = True, has_norm: bool = True) -> nn.Sequential:
    """A small network, alike each time."""
    torch.manual_seed(0)
    norm: nn.Module = nn.BatchNorm1d(8) if has_norm else nn.Identity()
    dropout: nn.Module = nn.Dropout(0.3) if has_dropout else nn.Identity()
    body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Unflatten(1, (8, 2)), norm, nn.Flatten(), nn.ReLU(), dropout)
    return nn.Sequential(body, nn.Linear(16, CLASSES))


def train(
    *,
    rows: int = 69,
    lanes: int | None = 8,
    batch_size: int = 2,
    accumulation: int = 2,
    stop_after: int | None = None,
    resumes: bool = False,
    epochs: int = 2,
    workers: int = 0,
    optimizers: int = 2,
    policy: str | None = None,
    bad_row: int | None = None,
    in_memory: bool = False,
    **of_model: Any,
) -> Trainer:
    """Train with all that a run may have."""
    model = make_model(**of_model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    limit: Any = 0.5
    if optimizers == 2:
        optimizer = {
            "body": torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9),
            "head": torch.optim.AdamW(model[1].parameters(), lr=0.02),
        }
        limit = {"body": 0.5, "head": 0.3}
    average = ModelEmaCallback(decay=0.9, evaluate_during_training=True)
    saver = [] if stop_after is None else [SaveAndStop(Path("state"), updates=stop_after)]
    callbacks: Any = [average, DrawsAfterUpdates, CountsRows, *saver]
    trainer = (CountsItems if in_memory else Trainer)(
        model, nn.CrossEntropyLoss(), optimizer, callbacks, metrics=["accuracy"], seed=5, lanes=lanes
    )
    trainer.train(
        data(rows) if in_memory else Rows(rows, bad_row),
        num_epochs=epochs,
        eval_dataset=data(29, seed=4),
        per_device_batch_size=batch_size,
        eval_per_device_batch_size=3,
        gradient_accumulation_steps=accumulation,
        gradient_clip_norm=limit,
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=0) if optimizers == 1 else None,
        train_dataloader_kwargs={"num_workers": workers},
        resume_from=Path("state") if resumes else None,
        nonfinite_policy=policy,
    )
    return trainer


def found(trainer: Trainer) -> dict[str, Any]:
    """What must be the same to the bit: tensors as checksums, and numbers."""
    history = trainer.run_history
    records = [each.columns() for each in history.step_records]
    kept = ("epoch", "update", "samples", "train_loss", "gradient_norm", "learning_rate")
    callbacks = {type(each): each for each in trainer.callback_handler}
    return {
        "weights": _digest(trainer.get_model().state_dict()),
        "optimizer": _digest(trainer.optimizer.state_dict()["state"]),
        "average": _digest(callbacks[ModelEmaCallback].ema_model.module.state_dict()),
        "generator": _digest({"torch": torch.get_rng_state()}),
        "metrics": {name: list(map(repr, history.get_metric_values(name))) for name in history.get_metric_names()},
        "records": [[repr(each.get(name)) for name in kept] for each in records],
        "rows": callbacks[CountsRows].rows,
        "position": dataclasses.asdict(trainer.run_state),
    }


def _digest(state: Any) -> dict[str, str]:
    if isinstance(state, torch.Tensor):
        raw = state.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"": hashlib.sha256(raw).hexdigest()[:12]}
    if not isinstance(state, dict):
        return {"": repr(state)}
    return {f"{key}.{path}": value for key, part in state.items() for path, value in _digest(part).items()}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    trainer = train(**asked)
    ranks = trainer.run_context.parts.ranks
    assert ranks.count == int(os.environ.get("WORLD_SIZE", "1"))
    if ranks.is_first:
        print(json.dumps(found(trainer), default=str))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
