"""A small run whose states are real, and everything of a trainer that loading them may not change by half."""

import copy
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import EarlyStoppingCallback
from tests.support.histories import state_without_times
from tests.support.reference import regression_data, tiny_model


def trained(epochs: int, *, seed: int = 0) -> Trainer:
    """A trainer after a run of as many epochs of 2 updates; its states have every kind of part."""
    model = tiny_model(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[EarlyStoppingCallback(9)], seed=3)
    trainer.train(
        regression_data(6),
        epochs,
        eval_dataset=regression_data(3),
        per_device_batch_size=3,
        create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    )
    return trainer


def everything_of(trainer: Trainer) -> dict[str, Any]:
    """A copy of all that a training state would replace."""
    return copy.deepcopy(
        {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.scheduler.state_dict(),
            "history": state_without_times(trainer.run_history),
            "run_state": trainer.run_state.state_dict(),
            "losses": trainer._loss_tracker.state_dict(),
            "callbacks": [
                {name: value for name, value in vars(callback).items() if name != "_ranks"}
                for callback in trainer.callback_handler
            ],
            "generators": [torch.get_rng_state(), np.random.get_state(), random.getstate()],
        }
    )


def files_below(folder: Path) -> dict[str, str]:
    """Every entry below a folder, with a checksum of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file() and not path.is_symlink()
        else "link or folder"
        for path in sorted(folder.rglob("*"))
    }


def sign(folder: Path, **changes: Any) -> None:
    """Make the manifest fit the files, whatever they are; `changes` replace fields of it."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    for entry in manifest["files"]:
        path = folder / entry["name"]
        if path.is_file():
            data = path.read_bytes()
            entry.update(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    write_manifest(folder, {**manifest, **changes})


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """A manifest with a right checksum and any content, written without our own code."""
    compact = json.dumps(content, separators=(",", ":")).encode()
    signed = {**content, "sha256": hashlib.sha256(compact).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(signed, indent=1, separators=(",", ": ")))
