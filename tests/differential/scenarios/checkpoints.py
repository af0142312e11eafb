"""Files that are written and read again."""

import os
from typing import Any

import torch

from pytorch_accelerated.schedulers import CosineLrScheduler
from tests.differential.scenarios.common import attempt, grid, plain, train, trainer, weights_of


def _trained(**arguments: Any) -> Any:
    return train(trainer(lr=0.05), create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(), **arguments)


def contents() -> Any:
    """What a checkpoint has."""

    def run(*args: Any, **kwargs: Any) -> Any:
        made = _trained()
        made.save_checkpoint("checkpoint.pt", *args, **kwargs)
        saved = torch.load("checkpoint.pt", weights_only=True)
        os.remove("checkpoint.pt")
        return {
            "keys": sorted(saved),
            "model": sorted(saved["model_state_dict"]),
            "optimizer": sorted(saved.get("optimizer_state_dict") or {}),
            "rest": {key: plain(value) for key, value in saved.items() if not key.endswith("state_dict")},
        }

    seen = grid(
        run,
        {
            "plain": {},
            "with more": {"checkpoint_kwargs": {"epoch": 3, "note": "a"}},
            "without optimizer": {"save_optimizer": False},
            "without scheduler": {"save_scheduler": False},
            "world": {"save_per_node": False},
        },
    )
    seen["by position"] = attempt(lambda: run({"epoch": 3}, False))
    return seen


def loading() -> Any:
    """Another trainer takes over a checkpoint."""

    def run(save: Any = None, **kwargs: Any) -> Any:
        made = _trained()
        made.save_checkpoint("checkpoint.pt", **(save or {}))
        other = trainer(lr=0.5)
        returned = other.load_checkpoint("checkpoint.pt", **kwargs)
        return {
            "returns": "nothing" if returned is None else sorted(returned),
            "same weights": weights_of(other.model) == weights_of(made.model),
            "rate": other.optimizer.param_groups[0]["lr"],
        }

    seen = grid(
        run,
        {
            "plain": {},
            "without optimizer": {"load_optimizer": False},
            "an optimizer that isn't there": {"save": {"save_optimizer": False}},
            "without scheduler": {"load_scheduler": False},
        },
    )
    seen["absent"] = attempt(lambda: trainer().load_checkpoint("nowhere.pt"))
    return seen


def training_states() -> Any:
    """A run is saved, and another trainer takes it up."""
    made = train(trainer())
    made.save_training_state("state")
    seen: dict[str, Any] = {"is a folder": os.path.isdir("state")}

    def run() -> Any:
        other = trainer()
        other.load_training_state("state")
        return {"same weights": weights_of(other.model) == weights_of(made.model)}

    seen["before a run"] = attempt(run)

    def after() -> Any:
        other = train(trainer())
        other.load_training_state("state")
        return {
            "same weights": weights_of(other.get_model()) == weights_of(made.get_model()),
            "epoch": other.run_history.current_epoch,
        }

    seen["after a run"] = attempt(after)
    return seen
