"""Parts of a state with other contents behind checksums that fit: refused as a whole, or good to go on from."""

import copy
import json
import random
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    CSVLoggerCallback,
    EarlyStoppingCallback,
    MetricsCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
)
from pytorch_accelerated.errors import CheckpointError, PytorchAcceleratedError
from pytorch_accelerated.schedulers import CosineLrScheduler
from tests.chaos.record import record
from tests.chaos.saved_runs import everything_of, sign
from tests.chaos.size import size
from tests.checkpointing.same_state import assert_same_state
from tests.support.reference import regression_data, tiny_model

FORGERIES = size(small=120, release=5_000)
OTHERS: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 10**6, 10**30, 0.5, -1e300, "", "x", [], [[]], {}, {"x": 1}, [1, 2], ["a"]),
    *({"$": "float", "text": text} for text in ("nan", "inf", "-inf")),
    {"$": "tuple", "items": []},
    {"$": "dict", "items": [[1, 2]]},
    {"$": "live"},
]
SCHEDULERS: dict[str, Any] = {
    "theirs": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
    "ours": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
}


def new_trainer(scheduler: str) -> tuple[Trainer, dict[str, Any]]:
    model = tiny_model(seed=1)
    callbacks = [
        EarlyStoppingCallback(9),
        SaveBestModelCallback("best.pt"),
        ModelEmaCallback(save_path="ema.pt"),
        MetricsCallback(torchmetrics.MeanSquaredError(num_outputs=2)),
        CSVLoggerCallback("metrics.csv"),
    ]
    trainer = Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), 0.01), callbacks=callbacks, seed=3)
    arguments = {
        "train_dataset": regression_data(7),
        "eval_dataset": regression_data(3),
        "per_device_batch_size": 3,
        "create_scheduler_fn": SCHEDULERS[scheduler],
    }
    return trainer, arguments


@pytest.fixture(scope="module", params=SCHEDULERS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A state in the middle of a run."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer, arguments = new_trainer(request.param)
        trainer.train(num_epochs=2, **arguments)
    trainer.save_training_state(folder / "state", {"note": "mine"})
    return request.param, folder / "state"


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a structure, but few of many that are alike."""
    yield path
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    for key, child in items if len(items) < 30 else [*items[:2], *items[-2:]]:
        yield from places(child, (*path, key))


def forge(folder: Path, part: str, chance: random.Random) -> str:
    """Change something in a part; returns what."""
    file = folder / f"{part}.json"
    structure = [json.loads(file.read_bytes())]
    path = chance.choice(list(places(structure))[1:])
    *steps, last = path
    parent: Any = at(structure, steps)
    way = chance.choice(["other"] * 6 + ["missing", "twice", "of another place"])
    if way == "missing" and steps:
        del parent[last]
    elif way == "twice" and steps and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[last]))
    elif way == "of another place":
        parent[last] = copy.deepcopy(at(structure, chance.choice(list(places(structure))[1:])))
    else:
        parent[last] = chance.choice(OTHERS)
    file.write_text(json.dumps(structure[0]))
    sign(folder)
    return f"{part}: {path} {way} {parent!r:.200}"


def at(structure: Any, path: Iterable[Any]) -> Any:
    for step in path:
        structure = structure[step]
    return structure


def test_forged_parts_are_rejected_as_a_whole_or_can_be_resumed_from(
    saved: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scheduler, state = saved
    trainer, arguments = new_trainer(scheduler)
    trainer.train(num_epochs=1, **arguments)
    chance = random.Random(11)
    parts = [path.stem for path in state.glob("*.json") if path.name != "manifest.json"]
    assert len(parts) == 8
    refused = 0
    for number in range(FORGERIES):
        folder = shutil.copytree(state, tmp_path / str(number))
        what = forge(folder, parts[number % len(parts)], chance)
        before = everything_of(trainer)
        try:
            trainer.load_training_state(folder)
        except CheckpointError:
            refused += 1
            try:
                assert_same_state(everything_of(trainer), before)
            except AssertionError as error:
                raise AssertionError(f"refused, but not as a whole: {what}") from error
        except Exception as error:
            raise AssertionError(f"another error: {what}") from error
        else:
            try:
                go_on_from(folder, scheduler)
            except Exception as error:
                raise AssertionError(f"accepted, but nobody can go on from it: {what}") from error
            trainer.load_training_state(state)
        shutil.rmtree(folder)
    assert FORGERIES / 3 < refused < FORGERIES
    record(f"forged parts, scheduler {scheduler}", {"forgeries": FORGERIES, "half taken over": 0, "other errors": 0})


def go_on_from(folder: Path, scheduler: str) -> None:
    """Train on from a state, with no other errors than ours."""
    trainer, arguments = new_trainer(scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.train(num_epochs=3, resume_from=folder, **arguments)
        except PytorchAcceleratedError:
            return
        except ValueError as error:
            if "Tried to step" not in str(error):  # torch's word for a schedule that has come to its end
                raise
            return
    assert trainer.run_state.updates >= 0
