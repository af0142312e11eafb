"""Where two runs part: planted differences are found in the update and in the part where they are, and no others."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    ReportCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.proving import diff
from tests.huggingface.runs import make_trainer
from tests.proving.runs import ADAMW, At, Interrupt, Log, make, train
from tests.report.digits import TRAIN, trainer_with
from tests.support.tool import run_tool


@pytest.fixture(scope="module")
def run_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a")
    train(folder)
    return folder


def update_with(row: int) -> int:
    """The first update of these runs that has a row."""
    trainer, arguments = make(log := Log())
    trainer.train(**arguments)
    return next(update for update, rows in log.rows.items() if row in rows)


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


PLANTED: dict[str, tuple[dict[str, Any], int, str]] = {
    "seed": ({"seed": 6}, 1, "rows"),
    "rate": ({"optimizer": functools.partial(ADAMW, lr=0.0200001)}, 1, "settings"),
    "rate from update 9 on": ({"at": (9, functools.partial(set_rate, 0.01))}, 9, "settings"),
    "batch size": ({"per_device_batch_size": 16}, 1, "rows"),
    "content of a row": ({"dataset": {"changed_row": 30}}, 0, "batch"),
    "order": ({"train_dataloader_kwargs": {"shuffle": False}}, 1, "rows"),
    "dropout": ({"dropout": 0.25}, 1, "losses"),
    "first weights": ({"first_weights": 1}, 1, "weights"),
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
    assert found.parting == (update, part)
    assert found.is_reproduced == (True, True)
    assert found.first_update is not None
    assert found.to_json()["is_equal"] is False
    assert found.equal_state == (update - 1) // 6 * 6 or (found.equal_state is None and update <= 6)
    json.dumps(found.to_json())
    assert f"The runs part in update {update}: " in str(found)


def test_the_same_rows_in_more_batches_part_in_the_rounding_of_gradients(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"has_norm": False, "dropout": 0.0, "is_evaluated": False}
    cut: dict[str, Any] = {"per_device_batch_size": 4, "gradient_accumulation_steps": 2}
    train(tmp_path / "a", **plain)
    train(tmp_path / "b", **plain, **cut)
    makes = functools.partial(make, **plain), functools.partial(make, **plain, **cut)
    found = diff(tmp_path / "a", tmp_path / "b", *makes)
    assert found.parting is not None
    assert found.parting.part == "gradients"
    assert found.parted is not None
    assert found.parted[0].rows == found.parted[1].rows
    assert [len(each.losses) for each in found.parted] == [1, 2]
    assert found.settings["gradient_accumulation_steps"] == (1, 2)
    assert 0 < max(part.distance for part in found.parts) < 1e-12


# What each change is called among the settings, without and with training again.
NAMED: dict[str, tuple[Any, str, Any]] = {
    "eps": ({"optimizer": functools.partial(ADAMW, eps=1e-6)}, "optimizer.0.eps", (1e-8, 1e-6)),
    "weight decay": (
        {"optimizer": functools.partial(ADAMW, weight_decay=0.1)},
        "optimizer.0.weight_decay",
        (0.01, 0.1),
    ),
    "a beta": ({"optimizer": functools.partial(ADAMW, betas=(0.9, 0.99))}, "optimizer.0.betas.1", (0.999, 0.99)),
    "dropout": ({"dropout": 0.25}, "model.2", ("Dropout(p=0.2, inplace=False)", "Dropout(p=0.25, inplace=False)")),
    "layer": (lambda trainer: trainer.get_model().__setitem__(3, nn.ReLU()), "model.3", ("Tanh()", "ReLU()")),
    "loss": (lambda trainer: setattr(trainer, "loss_func", nn.L1Loss()), "loss", ("MSELoss()", "L1Loss()")),
    "function": (
        lambda trainer: setattr(trainer, "loss_func", functools.partial(nn.functional.huber_loss, delta=2.0)),
        "loss",
        ("MSELoss()", "functools.partial(<function huber_loss>, delta=2.0)"),
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_was_changed_is_named(name: str, run_a: Path, tmp_path: Path) -> None:
    change, key, values = NAMED[name]
    if isinstance(change, dict):
        train(tmp_path, **change)
    else:
        trainer, arguments = make(SaveTrainingStateCallback(tmp_path, save_every_n_steps=6))
        change(trainer)
        trainer.train(**arguments)
    found = diff(run_a, tmp_path)
    assert found.settings == {key: values}
    assert found.is_equal is False
    assert key in str(found)
    assert str(values[1])[:30] in str(found)


def test_the_optimizer_of_a_hugging_face_run_is_compared(tmp_path: Path) -> None:
    for epsilon in (1e-8, 1e-6):
        arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "adam_epsilon": epsilon}
        make_trainer(tmp_path / str(epsilon), **arguments).train()
    found = diff(tmp_path / "1e-08", tmp_path / "1e-06")
    assert found.settings == {f"optimizer.{group}.eps": (1e-8, 1e-6) for group in (0, 1)}
    assert found.parts[-1].names[:2] == ["param_groups.0.eps", "param_groups.1.eps"]


@pytest.mark.parametrize("rows", [{"changed_row": 30}, {"changed_label": 7}])
def test_a_changed_row_is_named_by_its_index(rows: dict[str, int], run_a: Path, tmp_path: Path) -> None:
    train(tmp_path, dataset=rows)
    found = diff(run_a, tmp_path, make, functools.partial(make, dataset=rows))
    assert found.changed_rows == list(rows.values())
    assert str(found).startswith(
        f"The runs part in update {update_with(*rows.values())}: the contents of the batch of "
    )
    assert f"of the rows {found.changed_rows}\n" in str(found)


def test_a_rate_that_a_schedule_has_not_begun_with_is_no_difference(tmp_path: Path) -> None:
    """Both warm up from zero, so that the first update has one rate, and the second another one."""
    for rate in (0.1, 0.2):
        schedule = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda update: update > 3)
        train(tmp_path / str(rate), every=1, optimizer=functools.partial(ADAMW, lr=rate), create_scheduler_fn=schedule)
    found = diff(tmp_path / "0.1", tmp_path / "0.2")
    assert found.settings["optimizer.0.initial_lr"] == (0.1, 0.2)
    assert (found.equal_state, found.differing_state) == (3, 4)


def test_runs_without_anything_in_common_are_told(run_a: Path, tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{"per_device_batch_size": size, "record_every_n_steps": size} for size in (8, 7)]
    for each in changes:
        every = each["per_device_batch_size"]
        train(tmp_path / str(every), every=every, is_evaluated=False, max_num_train_steps=every, **each)
    found = diff(tmp_path / "8", tmp_path / "7")
    assert (found.is_equal, found.first_update) == (None, None)
    assert str(found).startswith("The runs have nothing in common: no state and no record is after the same updates")
    assert found.settings["train_per_device_batch_size"] == (8, 7)
    assert run_tool("diff", tmp_path / "8", tmp_path / "7") == 1
    plain = [{name: value for name, value in each.items() if name != "record_every_n_steps"} for each in changes]
    found = diff(tmp_path / "8", tmp_path / "7", *(functools.partial(make, **each) for each in plain))
    assert found.parting == (1, "rows")
    trainer_with(SaveTrainingStateCallback(tmp_path / "digits", save_every_n_steps=6)).train(TRAIN, 1)
    found = diff(run_a, tmp_path / "digits")
    assert str(found).startswith("The runs have nothing in common: no weight of the one has the name and the shape")
    assert diff(run_a, run_a).incomparable == ""


# ------------------------------------------------------------------------------------------------------ runs are equal


@pytest.mark.parametrize("kind", ["again", "other states", "interrupted", "other callbacks"])
def test_equal_runs_are_equal(kind: str, run_a: Path, tmp_path: Path) -> None:
    torch.rand(5)  # what the process did before does not matter
    if kind == "interrupted":
        train(tmp_path, Interrupt(), every=4)
        train(tmp_path, every=4, resume=True)
    elif kind == "other callbacks":
        train(tmp_path, EarlyStoppingCallback(20), ModelEmaCallback(0.9, save_path=tmp_path / "ema.pt"))
    else:
        train(tmp_path, every=4 if kind == "other states" else 6)
    found = diff(run_a, tmp_path, make)
    assert found.first_update is None, found
    assert found.updates == (24, 24)
    assert found.is_reproduced is None  # nothing had to be trained again
    assert str(found).startswith("The runs are equal")
    assert found.settings == {}


@pytest.mark.processes
def test_workers_change_nothing(run_a: Path, tmp_path: Path) -> None:
    train(tmp_path, train_dataloader_kwargs={"num_workers": 1})
    found = diff(run_a, tmp_path)
    assert found.first_update is None, found
    assert found.settings["train_dl_kwargs.num_workers"] == (0, 1)


def test_callbacks_that_keep_paths_and_times_may_write_elsewhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        callbacks = [ReportCallback(tmp_path / name / "report.html"), EarlyStoppingCallback(20)]
        train(tmp_path / name / "states", *callbacks, ModelEmaCallback(0.9, save_path=tmp_path / name / "ema.pt"))
    found = diff(tmp_path / "a", tmp_path / "b")  # pages, and states in the folders beside them
    assert found.first_update is None, found
    assert found.settings == {}
    train(tmp_path / "c" / "states", ReportCallback(tmp_path / "c" / "report.html"), optimizer=torch.optim.SGD)
    settings = diff(tmp_path / "a", tmp_path / "c").settings
    assert settings["model.optimizer"] == ("AdamW", "SGD")


def test_runs_of_other_lengths_are_equal_as_far_as_both_go(run_a: Path, tmp_path: Path) -> None:
    train(tmp_path, Interrupt())
    found = diff(run_a, tmp_path)
    assert found.first_update is None
    assert found.updates == (24, 15)
    assert "up to update 15, where one ends" in str(found)


# -------------------------------------------------------------------------------- what the code as it is now would give


def test_the_code_as_it_is_now_gives_one_of_both_or_neither(run_a: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"at": (10, functools.partial(add, 1e-9))}
    callbacks, _ = with_action(**changes)
    train(tmp_path, *callbacks)
    found = diff(run_a, tmp_path, make)
    assert (found.parting, found.is_reproduced, found.first_update) == (None, (True, False), 10)
    assert "gives only A as it was saved" in str(found)
    found = diff(run_a, tmp_path, make_b=functools.partial(made, changes))
    assert found.is_reproduced == (False, True)
    assert "gives only B as it was saved" in str(found)
    found = diff(run_a, tmp_path, functools.partial(make, dropout=0.5))
    assert found.is_reproduced == (False, False)
    assert "gives neither as it was saved" in str(found)


def test_training_again_leaves_everything_as_it_was(run_a: Path, tmp_path: Path) -> None:
    train(tmp_path, dropout=0.3)
    before = {path: path.read_bytes() for folder in (run_a, tmp_path) for path in folder.rglob("*") if path.is_file()}
    generators = torch.get_rng_state()
    diff(run_a, tmp_path, make)
    after = {path: path.read_bytes() for folder in (run_a, tmp_path) for path in folder.rglob("*") if path.is_file()}
    assert after == before
    assert torch.equal(torch.get_rng_state(), generators)


# ------------------------------------------------------------------------------------------------------------ bad input


def test_folders_without_the_states_of_one_run_are_refused(run_a: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"There are no training states in"):
        diff(run_a, tmp_path)
    for name in ("one", "two"):
        train(tmp_path / name)
    with pytest.raises(ConfigurationError, match=r"of several runs: one, two\. Give the folder of one"):
        diff(tmp_path, run_a)
    with pytest.raises(ConfigurationError, match=r"There are no training states in .*gone"):
        diff(run_a, tmp_path / "gone")


SCRIPT = """
from tests.proving.runs import make


def make_run(dropout=0.2):
    return make(dropout=dropout)
"""


def test_the_command_says_it_with_its_exit_code(
    run_a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script_of_diff.py"
    script.write_text(SCRIPT)
    train(tmp_path / "again")
    train(tmp_path / "other", dropout=0.3)
    assert run_tool("diff", run_a, tmp_path / "again") == 0
    assert "The runs are equal" in capsys.readouterr().out
    places = ("--run", f"{script}:make_run", "--run-b", f"{script}:make_run(dropout=0.3)")
    assert run_tool("diff", run_a, tmp_path / "other", *places) == 1
    assert "The runs part in update 1: the loss" in capsys.readouterr().out
    assert run_tool("diff", run_a, tmp_path / "other") == 1
    assert run_tool("diff", run_a, tmp_path / "gone") == 2
    assert run_tool("replay", run_a, 9, "--run", f"{script}:make_run") == 0
    assert "Update 9, in epoch 2, 3 updates from" in capsys.readouterr().out
    assert run_tool("replay", run_a, 0, "--run", f"{script}:make_run") == 2
    assert run_tool("replay", run_a, 9, "--run", f"{script}:gone") == 2
