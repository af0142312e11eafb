"""A branch has the past of its trunk to the bit, and differs by its change only, from the next update on."""

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    ReportCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
)
from pytorch_accelerated.errors import ConfigurationError, InvalidCheckpointError
from pytorch_accelerated.extras.proving import diff
from pytorch_accelerated.extras.report.reading import read_run
from pytorch_accelerated.schedulers import CosineLrScheduler, LinearLrScheduler, one_cycle
from pytorch_accelerated.states import read_state
from pytorch_accelerated.states.verify import list_states, read_manifest
from tests.proving.runs import ADAMW, At, Interrupt, Log, make, train
from tests.support.processes import run_on_ranks, run_script
from tests.support.reference import regression_data
from tests.support.resuming import assert_same
from tests.support.tool import run_tool

UPDATES = 24
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """The states and the trainer of a run, after updates 6, 12, 18 and 24."""
    folder = tmp_path_factory.mktemp("trunk") / "states"
    return folder, train(folder)[0]


def branch(
    states: Path, update: int, into: Path, *callbacks: Any, trunk: Any = make, loss: Any = None, **changes: Any
) -> Trainer:
    trainer, arguments = make(*callbacks, SaveTrainingStateCallback(into), **changes)
    trainer.loss_func = loss or trainer.loss_func
    trainer.branch(states, update, into, trunk=trunk, **arguments)
    return trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return dict(trainer.get_model().state_dict())


def rates(trainer: Trainer) -> list[Any]:
    return [record.learning_rates for record in trainer.run_history.step_records]


def averages(folder: Path) -> list[Any]:
    """Two callbacks that differ in their paths only, whose states count."""
    paths = {0.9: folder / "slow.pt", 0.5: folder / "fast.pt"}
    return [ModelEmaCallback(decay, save_path=path, name=path.stem) for decay, path in paths.items()]


EVERYTHING: dict[str, Any] = {
    "optimizer": SGD,
    "create_scheduler_fn": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
    "gradient_clip_norm": 1.0,
    "per_device_batch_size": 4,
    "gradient_accumulation_steps": 2,
}


@pytest.mark.filterwarnings("ignore:The best .*(so far|gone)")  # whose file is the trunk's
@pytest.mark.parametrize(
    ("update", "changes"),
    [(1, {}), (24, {}), (12, EVERYTHING), (15, EVERYTHING)],
    ids=["the first", "the last", "with a state", "without a state"],
)
def test_without_a_change_the_branch_is_the_trunk(update: int, changes: dict[str, Any], tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "states", *averages(tmp_path / "a"), **changes)
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "states").rglob("*"))
    same = functools.partial(make, *averages(tmp_path / "a"), **changes)
    callbacks = averages(tmp_path / "b")
    found = branch(tmp_path / "states", update, tmp_path / "b", *callbacks, trunk=same, **changes)
    assert_same(weights(found), weights(whole), "weights")
    assert_same(found.optimizer.state_dict(), whole.optimizer.state_dict(), "optimizer")
    assert found.run_history.records == whole.run_history.records
    assert rates(found) == rates(whole)
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "states").rglob("*")) == before
    assert all("branch_of" in manifest.facts for _, manifest in list_states(tmp_path / "b"))


def add(amount: float, trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.get_model()[0].weight[0, 0] += amount


def update_with(row: int) -> int:
    """The first update after the twelfth that has a row."""
    trainer, arguments = make(log := Log())
    trainer.train(**arguments)
    return next(update for update, rows in log.rows.items() if row in rows and update > 12)


PLANTED: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "rate": ({"optimizer": functools.partial(ADAMW, lr=0.01)}, 13, "settings"),
    "weight decay": ({"optimizer": functools.partial(ADAMW, weight_decay=0.3)}, 13, "settings"),
    "momentum": ({"optimizer": functools.partial(ADAMW, betas=(0.8, 0.999))}, 13, "settings"),
    "schedule": ({"create_scheduler_fn": CosineLrScheduler.create_scheduler_fn()}, 13, "settings"),
    "loss": ({"loss": nn.L1Loss()}, 13, "losses"),
    "a row left out": ({"leave_out": {"rows": [30]}}, 0, "rows"),
    "an update left out": ({"leave_out": {"updates": [15]}}, 15, "rows"),
    "dropout": ({"dropout": 0.5}, 13, "losses"),
    "clipping": ({"gradient_clip_norm": 0.01}, 13, "weights_after"),
    "accumulation": ({"per_device_batch_size": 4, "gradient_accumulation_steps": 2}, 13, "gradients"),
    "a callback": ({"at": (17, functools.partial(add, 1e-9))}, 17, "weights"),
    "augmentation": ({"dataset": {"noise": 1e-3}}, 13, "batch"),
    "evaluation set": ({"eval_dataset": regression_data(9)}, 12, None),
}


@pytest.mark.filterwarnings("ignore:The run resumes from .* data has changed")
@pytest.mark.parametrize("name", PLANTED)
def test_a_change_counts_from_the_next_update_on(name: str, trunk: tuple[Path, Trainer], tmp_path: Path) -> None:
    changes, update, part = PLANTED[name]
    update, changes = update or update_with(30), dict(changes)
    callbacks = [At(*changes.pop("at"))] if "at" in changes else []
    found = branch(trunk[0], 12, tmp_path / "b", *callbacks, **changes)
    loss = changes.pop("loss", None)

    def make_branch() -> tuple[Trainer, dict[str, Any]]:
        trainer, arguments = make(*callbacks, **changes)
        trainer.loss_func = loss or trainer.loss_func
        return trainer, arguments

    difference = diff(trunk[0], tmp_path / "b", make, make_branch)
    assert difference.parting == (None if part is None else (update, part))
    assert difference.is_reproduced == (True, True)
    if part is None:
        assert difference.metric is not None
        assert difference.metric.update == update
        assert_same(weights(found), weights(trunk[1]), "weights")
    assert found.run_history.step_records[:12] == trunk[1].run_history.step_records[:12]


def test_after_an_update_without_a_state_a_change_counts_from_the_next_one_on(
    trunk: tuple[Path, Trainer], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"optimizer": functools.partial(ADAMW, lr=0.01)}
    branch(trunk[0], 14, tmp_path / "b", **changes)
    assert diff(trunk[0], tmp_path / "b", make, functools.partial(make, **changes)).parting == (15, "settings")


def test_a_changed_rate_is_one_that_a_callback_sets_after_the_resume(
    trunk: tuple[Path, Trainer], tmp_path: Path
) -> None:
    found = branch(trunk[0], 12, tmp_path / "b", optimizer=functools.partial(ADAMW, lr=0.01))

    def set_rate(trainer: Trainer) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.01

    by_hand, arguments = make(At(13, set_rate))
    by_hand.train(**arguments, resume_from=trunk[0] / "step_12")
    assert_same(weights(found), weights(by_hand), "weights")


def two_optimizers(parameters: Any, second: float = 0.1) -> Any:
    first, *others = parameters
    return {"one": torch.optim.AdamW([first], 0.02), "two": torch.optim.SGD(others, second, momentum=0.9)}


SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of this library": (
        {"create_scheduler_fn": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=3)},
        {"create_scheduler_fn": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1)},
    ),
    "its rate": (
        {"create_scheduler_fn": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1)},
        {
            "create_scheduler_fn": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
            "optimizer": functools.partial(ADAMW, lr=0.005),
        },
    ),
    "of torch, its length": (
        {"create_scheduler_fn": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=24)},
        {"create_scheduler_fn": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=40)},
    ),
    "of torch, its rate": (
        {"create_scheduler_fn": functools.partial(lr_scheduler.StepLR, step_size=5)},
        {
            "create_scheduler_fn": functools.partial(lr_scheduler.StepLR, step_size=5),
            "optimizer": functools.partial(ADAMW, lr=0.3),
        },
    ),
    "of another kind": (
        {"create_scheduler_fn": functools.partial(lr_scheduler.StepLR, step_size=5)},
        {"create_scheduler_fn": one_cycle(0.1)},
    ),
    "none any more": ({"create_scheduler_fn": LinearLrScheduler.create_scheduler_fn()}, {}),
    "by epoch": (
        {"create_scheduler_fn": functools.partial(lr_scheduler.ExponentialLR, gamma=0.5), "step_scheduler": "epoch"},
        {"create_scheduler_fn": functools.partial(lr_scheduler.ExponentialLR, gamma=0.8), "step_scheduler": "epoch"},
    ),
    "one of two": (
        {"optimizer": two_optimizers, "create_scheduler_fn": {"one": one_cycle(0.1)}},
        {"optimizer": functools.partial(two_optimizers, second=0.3), "create_scheduler_fn": {"one": one_cycle(0.2)}},
    ),
    "its number of epochs": (
        {"create_scheduler_fn": CosineLrScheduler.create_scheduler_fn()},
        {"create_scheduler_fn": CosineLrScheduler.create_scheduler_fn(), "num_epochs": 6},
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_changed_schedule_stands_where_it_would_from_the_start(name: str, tmp_path: Path) -> None:
    (before, after), update = SCHEDULES[name], 14  # after which there is no state
    whole, _ = train(tmp_path / "states", **before)
    other, _ = train(tmp_path / "other", **after)  # whose rates don't depend on its weights
    found = branch(tmp_path / "states", update, tmp_path / "b", trunk=functools.partial(make, **before), **after)
    assert rates(found) == [*rates(whole)[:update], *rates(other)[update:]]
    assert rates(found)[update:UPDATES] != rates(whole)[update:]


def bytes_of(*folders: Path) -> int:
    """The space of files, each counted once."""
    files = {path.stat().st_ino: path.stat().st_size for folder in folders for path in folder.rglob("*")}
    return sum(files.values())


def test_a_branch_takes_next_to_no_space_and_stays_when_the_trunk_is_deleted(tmp_path: Path) -> None:
    states, into = tmp_path / "states", tmp_path / "b"
    make_wide = functools.partial(make_trainer_of_width, 200)
    for folder, rate in ((states, 0.02), (into, 0.01)):
        trainer, arguments = make_wide(folder, rate)
        if folder == states:
            trainer.train(**arguments)
        else:
            arguments["num_epochs"] = 2  # the branch is over where it begins
            trainer.branch(states, 12, into, trunk=functools.partial(make_wide, states), **arguments)
    assert bytes_of(states, into) <= 1.1 * bytes_of(states)
    assert bytes_of(states, into) - bytes_of(states) < 0.05 * bytes_of(states / "step_12")
    facts, parts = read_state(states / "step_12")
    shutil.rmtree(states)
    _, own = read_state(into / "branch_12")  # which compares every byte
    assert own["optimizer"]["param_groups"][0].pop("lr") == 0.01
    del parts["optimizer"]["param_groups"][0]["lr"]
    assert_same(own, parts, "parts")


def make_trainer_of_width(width: int, folder: Path, rate: float = 0.02) -> tuple[Trainer, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2)).double()
    saver = SaveTrainingStateCallback(folder, save_every_n_steps=6, save_at_end=False)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), rate), callbacks=[saver], seed=5)
    return trainer, {"train_dataset": regression_data(48), "num_epochs": 4, "per_device_batch_size": 8}


def test_a_branch_of_a_branch_says_both(trunk: tuple[Path, Trainer], tmp_path: Path) -> None:
    slow: dict[str, Any] = {"optimizer": functools.partial(ADAMW, lr=0.01)}
    slower: dict[str, Any] = {"optimizer": functools.partial(ADAMW, lr=0.005)}
    one = branch(trunk[0], 12, tmp_path / "one", **slow)
    same = branch(tmp_path / "one", 15, tmp_path / "same", trunk=functools.partial(make, **slow), **slow)
    assert_same(weights(same), weights(one), "weights")
    branch(tmp_path / "one", 15, tmp_path / "two", trunk=functools.partial(make, **slow), **slower)
    for folder in ("branch_15", "final"):
        origins = read_manifest(tmp_path / "two" / folder).facts["branch_of"]
        assert [(each["trunk"], each["update"]) for each in origins] == [
            (str(trunk[0].resolve()), 12),
            (str((tmp_path / "one").resolve()), 15),
        ]
        assert [each["changed"] for each in origins] == [
            {"lr of group 0": ["0.02", "0.01"]},
            {"lr of group 0": ["0.01", "0.005"]},
        ]
    makes = functools.partial(make, **slow), functools.partial(make, **slower)
    assert diff(tmp_path / "one", tmp_path / "two", *makes).parting == (16, "settings")


def test_a_branch_that_was_stopped_is_continued_by_the_same_call(trunk: tuple[Path, Trainer], tmp_path: Path) -> None:
    stopped = branch(trunk[0], 12, tmp_path / "b", Interrupt())
    assert stopped.run_state.updates == 15
    begin = (tmp_path / "b" / "branch_12").stat().st_ino
    assert_same(weights(branch(trunk[0], 12, tmp_path / "b")), weights(trunk[1]), "weights")
    assert (tmp_path / "b" / "branch_12").stat().st_ino == begin
    with pytest.raises(ConfigurationError, match="has states of another run, not only of a branch of"):
        branch(trunk[0], 18, tmp_path / "b")
    with pytest.raises(ConfigurationError, match="has states of another run"):
        branch(tmp_path / "b", 18, trunk[0])


KILLED = """
import os, sys
from pathlib import Path
from tests.proving.test_branch import branch
left, link = int(sys.argv[3]), os.link

def dying(*arguments):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), 9)
    link(*arguments)

os.link = dying
branch(Path(sys.argv[1]), 14, Path(sys.argv[2]))
"""


@pytest.mark.processes
def test_a_kill_while_it_begins_leaves_nothing_half_written(trunk: tuple[Path, Trainer], tmp_path: Path) -> None:
    into = tmp_path / "b"
    with pytest.raises(AssertionError, match="SIGKILL|-9"):
        run_script(KILLED, trunk[0], into, 3)
    assert list_states(into) == []
    assert list(into.iterdir()) != []  # hidden folders of the dead process
    found = branch(trunk[0], 14, into)
    assert_same(weights(found), weights(trunk[1]), "weights")
    assert sorted(path.name for path in into.iterdir()) == ["branch_14", "final"]


RANKS = """
import functools, sys
from pathlib import Path
import torch
from pytorch_accelerated.extras.proving import diff
from tests.proving.runs import ADAMW, make, train
from tests.proving.test_branch import branch, weights
from tests.support.resuming import assert_same

folder = Path(sys.argv[1])
plain = {"per_device_batch_size": 4, "has_norm": False}
make_plain = functools.partial(make, **plain)
whole, _ = train(folder / "states", **plain)
same = branch(folder / "states", 14, folder / "same", trunk=make_plain, **plain)
assert_same(weights(same), weights(whole), "weights")
changes = {"optimizer": functools.partial(ADAMW, lr=0.01), **plain}
branch(folder / "states", 12, folder / "slow", trunk=make_plain, **changes)
found = diff(folder / "states", folder / "slow", make_plain, functools.partial(make, **changes))
assert found.parting == (13, "settings"), found
"""


@pytest.mark.processes
def test_two_ranks_branch_together(tmp_path: Path) -> None:
    run_on_ranks(RANKS, 2, tmp_path)


WRONG: dict[str, tuple[int, dict[str, Any], str]] = {
    "seed": (12, {"seed": 6}, "The trunk has seed 5, this trainer 6: with other rows and dropout masks"),
    "batch size": (12, {"per_device_batch_size": 4}, "An update of the trunk has 8 rows, one of this run 4"),
    "accumulation": (12, {"gradient_accumulation_steps": 2}, "An update of the trunk has 8 rows, one of this run 16"),
    "optimizer": (12, {"optimizer": SGD}, "The trunk's optimizer is AdamW, this one SGD"),
    "groups": (12, {"optimizer": two_optimizers}, "optimizer has 1 groups of parameters, this one 2"),
    "the future": (25, {}, "There is no update 25: with these arguments the run ends after 24"),
    "zero": (0, {}, "`update` is 0, but updates are counted from 1"),
    "negative": (-3, {}, "`update` is -3"),
    "a fraction": (1.5, {}, "`update` is 1.5"),  # type: ignore[dict-item]
    "a resume": (12, {"resume_from": "states"}, "`branch` got `resume_from`, which it determines itself"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_a_branch_is_an_error(name: str, trunk: tuple[Path, Trainer], tmp_path: Path) -> None:
    update, changes, message = WRONG[name]
    with pytest.raises(Exception, match=message):
        branch(trunk[0], update, tmp_path / "b", **changes)
    assert list_states(tmp_path / "b") == []
    assert not (tmp_path / "b").exists() or list((tmp_path / "b").iterdir()) == []


def test_a_trunk_that_is_another_one_when_it_is_trained_again_is_an_error(
    trunk: tuple[Path, Trainer], tmp_path: Path
) -> None:
    changed = functools.partial(make, dropout=0.1)
    with pytest.raises(ConfigurationError, match=r"recorded train_loss \S+ for update 13, and training it again gives"):
        branch(trunk[0], 14, tmp_path / "b", trunk=changed)
    assert list_states(tmp_path / "b") == []
    branch(trunk[0], 12, tmp_path / "b", trunk=changed)  # nothing is trained again


def test_patience_counts_on_where_the_trunk_has_no_state(tmp_path: Path) -> None:
    def patience() -> EarlyStoppingCallback:
        return EarlyStoppingCallback(2, early_stopping_threshold=100.0)

    whole, _ = train(tmp_path / "states", patience())
    same = functools.partial(make, patience())
    found = branch(tmp_path / "states", 8, tmp_path / "b", patience(), trunk=same)
    assert found.run_state.updates == whole.run_state.updates == 18


def test_a_branch_writes_to_no_file_of_its_trunk(trunk: tuple[Path, Trainer], tmp_path: Path) -> None:
    trainer, arguments = make(SaveTrainingStateCallback(trunk[0]))
    with pytest.raises(
        ConfigurationError, match="a branch is resumed from its own folder, and must not replace states"
    ):
        trainer.branch(trunk[0], 12, tmp_path / "b", trunk=make, **arguments)
    best = tmp_path / "best.pt"
    with pytest.raises(ConfigurationError, match=r"SaveBestModelCallback\(.*best.pt\) of the trunk writes there, too"):
        branch(
            trunk[0],
            12,
            tmp_path / "b",
            SaveBestModelCallback(best),
            trunk=functools.partial(make, SaveBestModelCallback(best)),
        )


def test_a_trainer_that_has_trained_is_no_branch(trunk: tuple[Path, Trainer], tmp_path: Path) -> None:
    trainer, arguments = make()
    trainer.train(**arguments)
    with pytest.raises(ConfigurationError, match="This trainer has trained"):
        trainer.branch(trunk[0], 12, tmp_path / "b", trunk=make, **arguments)


def test_a_damaged_state_of_the_trunk_is_no_beginning(trunk: tuple[Path, Trainer], tmp_path: Path) -> None:
    states = shutil.copytree(trunk[0], tmp_path / "states")
    file = states / "step_12" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(InvalidCheckpointError, match=r"step_12 is damaged:\n .*model.safetensors was changed"):
        branch(states, 12, tmp_path / "b")
    shutil.rmtree(states / "step_12")  # from the one before
    assert_same(weights(branch(states, 12, tmp_path / "b")), weights(trunk[1]), "weights")
    with pytest.raises(ConfigurationError, match="There is no training state in"):
        branch(tmp_path / "nothing", 12, tmp_path / "c")


def test_a_schedule_that_follows_a_metric_stays_or_is_an_error(tmp_path: Path) -> None:
    def plateau(factor: float) -> dict[str, Any]:
        schedule = functools.partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1.0, factor=factor)
        return {"create_scheduler_fn": schedule}

    whole, _ = train(tmp_path / "states", **plateau(0.5))
    same = functools.partial(make, **plateau(0.5))
    found = branch(tmp_path / "states", 14, tmp_path / "b", trunk=same, **plateau(0.5))
    assert rates(found) == rates(whole)
    assert len(set(rates(whole))) > 2
    with pytest.raises(ConfigurationError, match="a ReduceLROnPlateau follows a metric"):
        branch(tmp_path / "states", 14, tmp_path / "c", trunk=same, **plateau(0.1))


def test_runs_reports_and_comparisons_show_the_branch(
    trunk: tuple[Path, Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trunk[0], tmp_path / "states")
    into = tmp_path / "slow"
    branch(
        tmp_path / "states", 12, into, ReportCallback(into / "report.html"), optimizer=functools.partial(ADAMW, lr=0.01)
    )
    described = {"trunk": str((tmp_path / "states").resolve()), "after_update": 12, "lr of group 0": "0.02 -> 0.01"}
    for place in (into / "final", into / "report.html"):
        assert read_run(place).branch == described
    assert read_run(tmp_path / "states").branch == {}
    capsys.readouterr()
    assert run_tool("runs", tmp_path) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.endswith("branch of")
    assert [row.endswith(" states after update 12") for row in rows].count(True) == 1
    assert run_tool("checkpoints", "show", into) == 0
    assert re.search(r"branch_of +\S+states after update 12\n", capsys.readouterr().out)
    shutil.rmtree(into / "branch_12")  # the later states know it, too
    capsys.readouterr()
    assert run_tool("compare", tmp_path / "states", into, "--output", tmp_path / "page.html") == 0
    assert "since their losses parted after update 13" in capsys.readouterr().out
    assert run_tool("compare", tmp_path / "states", into, "--output", tmp_path / "page.html", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parted_after"] == 13
    losses = [[each.train_loss for each in read.step_records[13:]] for read in (trunk[1].run_history, history_of(into))]
    differences = [b - a for a, b in zip(*losses, strict=True)]
    by_name = {each["name"]: each for each in found["differences"]}
    assert by_name["train_loss"]["difference"] == pytest.approx(sum(differences) / 11, rel=1e-12)
    assert (by_name["train_loss"]["values"], by_name["train_loss"]["margin"]) == (11, None)
    assert by_name["train_loss"]["end"] == differences[-1]
    assert by_name["eval_loss_epoch"]["values"] == 2


def history_of(folder: Path) -> Any:
    from pytorch_accelerated.utils import read_run_history

    return read_run_history(folder)
