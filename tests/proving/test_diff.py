"""Where two runs part: planted differences are found in the update and in the part where they are, and no others."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import EarlyStoppingCallback, ReportCallback, StopAtCallback, TrainerCallback
from pytorch_accelerated.errors import ConfigurationError, RunFileError, StopTrainingError
from pytorch_accelerated.proving import RunDifference, diff
from tests.proving.runs import ROWS, At, make, train
from tests.support.tool import run_tool


@pytest.fixture(scope="module")
def run_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a")
    train(folder)
    return folder


def update_with(row: int) -> int:
    """The first update of these runs that has a row."""
    trainer, arguments = make()
    trainer.train(**arguments)
    return arguments["train_dataset"].log.index(row) // 8 + 1


def add(amount: float, trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.get_model()[0].weight[0, 0] += amount


def set_rate(rate: float, trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] = rate


def draw(trainer: Trainer) -> None:
    torch.rand(1)


def forget(trainer: Trainer) -> None:
    for entry in trainer.optimizer.state.values():
        entry["exp_avg"].zero_()


adamw = functools.partial(torch.optim.AdamW, lr=0.02)
PLANTED: dict[str, tuple[dict[str, Any], int, str]] = {
    "seed": ({"seed": 6}, 1, "rows"),
    "rate": ({"optimizer": functools.partial(torch.optim.AdamW, lr=0.0200001)}, 1, "settings"),
    "rate from update 9 on": ({"at": (9, functools.partial(set_rate, 0.01))}, 9, "settings"),
    "batch size": ({"per_device_batch_size": 16}, 1, "rows"),
    "content of a row": ({"dataset": {"changed_row": 30}}, 0, "batch"),
    "label": ({"dataset": {"changed_label": 11}}, 0, "batch"),
    "order": ({"train_dataloader_kwargs": {"shuffle": False}}, 1, "rows"),
    "dropout": ({"dropout": 0.25}, 1, "losses"),
    "first weights": ({"first_weights": 1}, 1, "weights"),
    "weight decay": ({"optimizer": functools.partial(adamw, weight_decay=0.1)}, 1, "settings"),
    "betas": ({"optimizer": functools.partial(adamw, betas=(0.9, 0.99))}, 1, "settings"),
    "optimizer": ({"optimizer": functools.partial(torch.optim.SGD, lr=0.02)}, 1, "settings"),
    "augmentation": ({"dataset": {"noise": 1e-3}}, 1, "batch"),
    "a number drawn": ({"at": (15, draw)}, 15, "generators"),
    "a weight written": ({"at": (10, functools.partial(add, 1e-9))}, 10, "weights"),
    "a forgotten moment": ({"at": (20, forget)}, 20, "weights_after"),
}


def with_action(at: Any = None, **changes: Any) -> tuple[list[TrainerCallback], dict[str, Any]]:
    return ([] if at is None else [At(*at)]), changes


def made(changes: dict[str, Any]) -> tuple[Trainer, dict[str, Any]]:
    callbacks, arguments = with_action(**changes)
    return make(*callbacks, **arguments)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found(name: str, run_a: Path, tmp_path: Path) -> None:
    changes, update, part = PLANTED[name]
    update = update or update_with(changes["dataset"].get("changed_row", changes["dataset"].get("changed_label")))
    callbacks, arguments = with_action(**changes)
    train(tmp_path, *callbacks, **arguments)
    found = diff(run_a, tmp_path, make, functools.partial(made, changes))
    print(found)
    assert found.parting == (update, part)
    assert found.is_reproduced == (True, True)
    assert not found.is_equal
    assert found.equal_state == (update - 1) // 6 * 6 or (found.equal_state is None and update <= 6)
    json.dumps(found.to_json())
