"""What is measured of a finished run equals what was logged while it trained, to the bit."""

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import nn
from torch.utils.data import IterableDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.__main__ import main
from pytorch_accelerated.callbacks import ReportCallback, SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from pytorch_accelerated.extras.report.reading import read_run
from pytorch_accelerated.tracking import RunHistory
from pytorch_accelerated.utils import read_run_history
from tests.chaos.size import size
from tests.looking.worlds import everything
from tests.proving.runs import ADAMW, At, BadOnce, ByBatches, Interrupt, make, train
from tests.support.processes import run_on_ranks
from tests.support.reference import regression_data
from tests.support.resuming import assert_same

END, START = "on_optimizer_step_end", "on_optimizer_step_start"


def probe(trainer: Trainer) -> dict[str, Any]:
    """The loss of other rows, and the size of the weights."""
    inputs, targets = regression_data(11)
    model = trainer.get_model()
    mode = model.training
    with torch.no_grad():
        loss = nn.functional.mse_loss(model.eval()(inputs), targets)
    model.train(mode)
    return {"other_loss": loss.item(), "size": sum(each.detach().square().sum() for each in model.parameters())}


def norms(trainer: Trainer) -> dict[str, float]:
    """The norm of the gradient of each parameter."""
    named = trainer.get_model().named_parameters()
    return {f"gradient of {name}": each.grad.norm().item() for name, each in named if each.grad is not None}


def weight(trainer: Trainer) -> float:
    """One weight."""
    return float(trainer.get_model().get_parameter("0.weight")[0, 0].item())


class Logged(TrainerCallback):
    """Logs both while the run trains: epoch, update and value by name. A run that goes back logs again."""

    takes_part_in_preflight = False

    def __init__(self) -> None:
        self.values: dict[str, dict[int, tuple[int, float]]] = {}

    def log(self, trainer: Trainer, update: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.values.setdefault(name, {})[update] = trainer.run_history.current_epoch, float(value)

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.log(trainer, trainer.run_state.updates + 1, norms(trainer))

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.log(trainer, trainer.run_state.updates, probe(trainer))


def measured(history: RunHistory) -> dict[str, dict[int, tuple[int, float]]]:
    """What was measured, as `Logged` has it."""
    found: dict[str, dict[int, tuple[int, float]]] = {}
    for record in history.records:
        if record.name in history.names_measured_afterwards:
            found.setdefault(record.name, {})[record.update] = record.epoch, record.value
    return found


def check(history: RunHistory, log: Logged, updates: Any) -> None:
    """The history has what was logged at some updates, and nothing else."""
    assert measured(history) == {name: {each: of[each] for each in updates} for name, of in log.values.items()}


DIFFICULT: dict[str, Any] = {
    "per_device_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clip_norm": 0.5,
    "dataset": {"noise": 0.1},
    "create_scheduler_fn": functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.999),
}


def test_each_update_has_the_values_that_were_logged_live(tmp_path: Path) -> None:
    changes = {**DIFFICULT, "num_epochs": size(5, 167)}
    trainer, _ = train(tmp_path, log := Logged(), every=7, **changes)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    new, arguments = make(**changes)
    before = everything(new)
    history = new.measure(tmp_path, probe, **arguments)
    history = new.measure(tmp_path, norms, event=START, **arguments)
    updates = range(1, 6 * changes["num_epochs"] + 1)
    assert trainer.run_state.updates == updates[-1] >= size(30, 1000)
    check(history, log, updates)
    assert_same(everything(new), before)
    now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert now.pop(tmp_path / "measured.json")
    assert now == files


def test_values_stand_where_they_would_if_they_had_been_logged(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path, every=4)
    recorded = read_run_history(tmp_path)
    history = trainer.measure(tmp_path, weight, name="corner", updates=[9, 12, 20])
    assert {each.name for each in history.records} == {*recorded.get_metric_names(), "corner"}
    assert [each for each in history.records if each.name != "corner"] == list(recorded.records)
    updates = [each.update for each in history.records]
    assert updates == sorted(updates)
    table = history.to_dataframe()
    assert table["corner"].dropna().index.tolist() == [(2, 9), (2, 12), (4, 20)]
    assert table.loc[(2, 12)]["train_loss_epoch"] == recorded.to_dataframe().loc[(2, 12)]["train_loss_epoch"]
    assert history.step_records == recorded.step_records
    # A single state has what it was saved with.
    assert "corner" not in read_run_history(tmp_path / "step_20").get_metric_names()


@pytest.mark.processes
def test_processes_find_what_was_logged(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path, log := Logged(), every=5)
    history = trainer.measure(tmp_path, probe, processes=2, factory=make)
    assert measured(history) == {name: log.values[name] for name in ("other_loss", "size")}


def by_epoch(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


KINDS: dict[str, dict[str, Any]] = {
    "dicts": {"is_of_dicts": True, "is_evaluated": False},
    "a schedule of epochs": {"create_scheduler_fn": by_epoch, "step_scheduler": "epoch"},
    "a record now and then": {"record_every_n_steps": 4, "per_device_batch_size": 2},
    "one record of each epoch": {"record_every_n_steps": 100},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_run_can_be_measured(kind: str, tmp_path: Path) -> None:
    changes = {"num_epochs": 2, **KINDS[kind]}
    train(tmp_path, log := LoggedWeight(), every=4, **changes)
    new, arguments = make(**changes)
    arguments.pop("record_every_n_steps", None)
    last = 48 if "per_device_batch_size" in changes else 12
    for updates in ([1], [6, 7], [last]):
        history = new.measure(tmp_path, weight, updates=updates, **arguments)
        assert measured(history)["weight"] == {update: log.values[update] for update in updates}


class LoggedWeight(TrainerCallback):
    takes_part_in_preflight = False

    def __init__(self) -> None:
        self.values: dict[int, tuple[int, float]] = {}

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.values[trainer.run_state.updates] = trainer.run_history.current_epoch, weight(trainer)


def test_a_run_that_was_interrupted_can_be_measured(tmp_path: Path) -> None:
    train(tmp_path, log := LoggedWeight(), Interrupt(), every=4, dataset={"noise": 0.1})
    train(tmp_path, rest := LoggedWeight(), every=4, resume=True, dataset={"noise": 0.1})
    new, arguments = make(dataset={"noise": 0.1})
    assert measured(new.measure(tmp_path, weight, **arguments))["weight"] == {**log.values, **rest.values}


def test_weights_of_a_schedule_free_optimizer_at_the_end_are_no_difference(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": functools.partial(schedulefree.AdamWScheduleFree, lr=0.01), "num_epochs": 1}
    train(tmp_path, log := LoggedWeight(), every=4, **changes)
    new, arguments = make(**changes)
    assert measured(new.measure(tmp_path, weight, updates=[6], **arguments))["weight"] == {6: log.values[6]}


@pytest.mark.filterwarnings("ignore:In epoch 1, update 6", "ignore:The optimizer resumes with the settings")
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_run_that_left_an_update_out_can_be_measured(policy: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"base": BadOnce, "nonfinite_policy": policy, "num_epochs": 2}
    train(tmp_path, ByBatches(), log := LoggedWeight(), every=4, **changes)
    new, arguments = make(ByBatches(), **changes)
    history = new.measure(tmp_path, weight, updates=range(5, 13), **arguments)
    assert measured(history)["weight"] == {update: log.values[update] for update in range(5, 13)}


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        inputs, targets = regression_data(24)
        return iter(zip(inputs + 0.1 * torch.randn_like(inputs), targets, strict=True))


def test_a_stream_can_be_measured(tmp_path: Path) -> None:
    def made(*callbacks: Any) -> tuple[Trainer, dict[str, Any]]:
        trainer, arguments = make(*callbacks, num_epochs=3)
        return trainer, {**arguments, "train_dataset": Rows()}

    trainer, arguments = made(log := LoggedWeight(), SaveTrainingStateCallback(tmp_path, save_every_n_steps=2))
    trainer.train(**arguments)
    new, arguments = made()
    history = new.measure(tmp_path, weight, **arguments)
    assert measured(history)["weight"] == log.values
    assert len(log.values) == 9


@pytest.mark.processes
def test_two_ranks_measure_together(tmp_path: Path) -> None:
    run_on_ranks(Path(__file__).parents[1] / "ranks" / "measure.py", 2, tmp_path)


def disturbs(trainer: Trainer) -> float:
    """Does all that a function must not do to a run."""
    model = trainer.get_model()
    model(torch.randn(5, 3, dtype=torch.float64)).sum().backward()  # gradients, statistics, generators
    model.eval()
    model[0].requires_grad_(True)
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[1].running_mean.add_(1)
    return torch.rand(()).item()


@pytest.mark.parametrize("event", [START, END])
def test_what_the_function_does_to_the_run_is_undone(event: str, tmp_path: Path) -> None:
    train(tmp_path, every=24)
    new, arguments = make()
    new.measure(tmp_path, disturbs, event=event, **arguments)  # compares losses and weights with those of the run


# ----------------------------------------------------------------------------------------------------- other code, data


def nothing_measured(folder: Path, match: str, updates: list[int] | None = None, **changes: Any) -> None:
    callbacks = changes.pop("callbacks", ())
    new, arguments = make(*callbacks, **changes)
    with pytest.raises(ConfigurationError, match=match):
        new.measure(folder, weight, updates=updates, **arguments)
    assert not (folder / "measured.json").exists()


def decay(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] = 1.0


@pytest.mark.filterwarnings("ignore:The run resumes", "ignore:The optimizer resumes")
def test_a_run_that_changed_is_an_error(tmp_path: Path) -> None:
    train(tmp_path, every=4)
    words = r"recorded train_loss \S+ in updates \d+ to \d+, and training it again gives"
    nothing_measured(tmp_path, words, dataset={"changed_label": 3})
    nothing_measured(tmp_path, words, dropout=0.1)
    nothing_measured(tmp_path, words, first_weights=1)
    nothing_measured(tmp_path, words, [7], dataset={"noise": 0.1})
    # What an update has done to the weights shows in the next loss only, or after the last one in the states.
    nothing_measured(tmp_path, words, [1], optimizer=functools.partial(ADAMW, weight_decay=1.0))
    nothing_measured(tmp_path, "weights after update 24, .* others", [24], callbacks=[At(24, decay)])
    nothing_measured(tmp_path, "recorded learning_rates", optimizer=functools.partial(torch.optim.AdamW, lr=0.03))
    nothing_measured(tmp_path, "recorded samples|There is no update", per_device_batch_size=16)
    new, arguments = make()
    assert measured(new.measure(tmp_path, weight, **arguments))["weight"].keys() == set(range(1, 25))


def double(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.get_model().get_parameter("0.weight").mul_(2)


def test_a_change_behind_the_last_loss_on_disk_is_an_error(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"per_device_batch_size": 2, "num_epochs": 2}
    train(tmp_path, every=4, record_every_n_steps=100, **changes)
    for state in {*tmp_path.iterdir()} - {*tmp_path.glob("step_*")}:  # as if the run had been killed in its last update
        shutil.rmtree(state)
    assert read_run_history(tmp_path).step_records[-1].update == 24  # the record of the second epoch is not in a state
    nothing_measured(tmp_path, "weights after update 48, .* others", [45], callbacks=[At(47, double)], **changes)


# ------------------------------------------------------------------------------------------------------- where it shows


def test_reports_and_comparisons_show_what_was_measured_and_say_so(tmp_path: Path) -> None:
    page, states = tmp_path / "report.html", tmp_path / "states"
    trainer, _ = train(states, ReportCallback(page), every=4)
    before = [read_run(place) for place in (page, states)]
    trainer.measure(states, lambda trainer: weight(trainer) + 5, name="test_accuracy", updates=[9, 12])
    for place, known in zip((page, states), before, strict=True):
        run = read_run(place)
        new = [each for each in run.metrics if each["name"] == "test_accuracy"]
        assert [(each["update"], each["is_measured"]) for each in new] == [([9, 12], True)]
        assert not any(each["is_measured"] for each in known.metrics)
        # By which metric runs are ranked does not change.
        assert [each for each in run.best if each["is_main"]] == [each for each in known.best if each["is_main"]]
        assert max(new[0]["value"]) == next(each["value"] for each in run.best if each["name"] == "test_accuracy")
    assert main(["runs", str(tmp_path), "--metric", "test_accuracy"]) == 0


def test_the_command_measures_what_the_method_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, log := LoggedWeight(), every=4)
    given = ["tests.proving.test_measure:weight", "--run", "tests.proving.runs:make", "--every", "5", "--json"]
    assert main(["measure", str(tmp_path), *given]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    assert found == {"weight": [[update, log.values[update][1]] for update in range(5, 25, 5)]}


# ------------------------------------------------------------------------------------------------------ again, and bad


def test_what_is_measured_again_replaces_the_values_and_other_names_stay(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path, every=4)
    trainer.measure(tmp_path, weight, updates=[9])
    trainer.measure(tmp_path, weight, name="other", updates=[9, 10])
    history = trainer.measure(tmp_path, weight, updates=[11, 12])
    assert {name: [*values] for name, values in measured(history).items()} == {"weight": [11, 12], "other": [9, 10]}
    nan = trainer.measure(tmp_path, lambda trainer: math.nan, name="nothing", updates=[9])
    assert math.isnan(nan.get_latest_metric("nothing"))


def not_a_number(trainer: Trainer) -> Any:
    return "text"


def train_loss_epoch(trainer: Trainer) -> float:
    return 0.0


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no function": ({"function": 5}, "It takes a function of the trainer"),
    "another event": ({"event": "on_train_step_end"}, "one of the events on_optimizer_step_end and"),
    "no number": ({"function": not_a_number}, "takes a number, or numbers by name, but got 'text'"),
    "two numbers": ({"function": lambda trainer: torch.zeros(2)}, "takes a number, or numbers by name"),
    "a name of the run": ({"function": train_loss_epoch}, "The run itself has recorded train_loss_epoch"),
    "both": ({"every": 3, "updates": [9]}, "Give one of them"),
    "none": ({"updates": []}, "numbers from 1 to 24"),
    "behind the end": ({"updates": [25]}, "the newest state in .* is after update 24"),
    "no numbers": ({"updates": "every"}, "numbers from 1 to 24"),
    "before the beginning": ({"updates": [0, 9]}, "numbers from 1 to 24"),
    "too far apart": ({"every": 25}, "numbers from 1 to 24"),
    "no distance": ({"every": 0}, "`every`"),
    "no process": ({"processes": 0}, "`processes`"),
    "out of reach": ({"updates": [2]}, "this trainer has trained"),
    "arguments of the factory": ({"factory": make, "num_epochs": 2}, "which its `factory` returns"),
    "a function that no process finds": ({"function": lambda trainer: 1.0, "processes": 2}, "cannot be sent"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    folder = tmp_path_factory.mktemp("finished")
    return train(folder)[0], folder


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_an_error(kind: str, finished: tuple[Trainer, Path]) -> None:
    (trainer, folder), (given, words) = finished, BAD[kind]
    if not {"every", "updates"} & given.keys():
        given = {"updates": [9], **given}
    before = everything(trainer)
    with pytest.raises(ConfigurationError, match=words):
        trainer.measure(folder, **{"function": weight, **given})
    assert_same(everything(trainer), before)
    assert not (folder / "measured.json").exists()


def test_what_is_missing_or_decided_is_an_error(finished: tuple[Trainer, Path], tmp_path: Path) -> None:
    trainer, folder = finished
    with pytest.raises(CheckpointError, match="There is no training state in"):
        trainer.measure(tmp_path, weight)
    with pytest.raises(ConfigurationError, match="is a single training state. Give the folder"):
        trainer.measure(folder / "step_12", weight)
    with pytest.raises(ArgumentTypeError, match="`measure` got `resume_from`"):
        trainer.measure(folder, weight, resume_from=folder)
    new, arguments = make()
    with pytest.raises(ConfigurationError, match="has not trained"):
        new.measure(folder, weight)
    (tmp_path / "measured.json").write_text('{"format": 2}')
    trainer, _ = train(tmp_path)
    with pytest.raises(ConfigurationError, match="format 2, which a newer version may read"):
        read_run_history(tmp_path)
