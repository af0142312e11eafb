"""Records of runs in the real trackers: complete, the same after a kill, and never the end of a run."""

import json
import math
import signal
import sqlite3
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import tracking

from pytorch_accelerated.errors import ConfigurationError, MissingDependencyError
from pytorch_accelerated.extras.trackers import TrackerCallback
from pytorch_accelerated.loop.callback import TrainerCallback
from tests.callbacks.runs import DATA, Die, DieAfter, a_trainer, assert_same_weights, fit, weights_of
from tests.chaos.size import some
from tests.support.processes import run_forked, run_on_ranks

SCRIPT = Path(__file__).parents[1] / "ranks" / "trackers.py"

Scalars = dict[str, list[tuple[int, float]]]


class ListTracker(tracking.GeneralTracker):  # type: ignore[misc]  # accelerate has no types
    """A tracker of a user's own, which can be told to fail."""

    name = "list"
    requires_logging_directory = False

    def __init__(self, fails_at: str = "") -> None:
        super().__init__()
        self.fails_at = fails_at
        self.calls: list[str] = []
        self.hyperparameters: dict[str, Any] = {}
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    def start(self) -> None:
        self._called("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._called("store")
        self.hyperparameters = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._called("log")
        self.rows.append((step, dict(values)))

    def finish(self) -> None:
        self._called("finish")

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise OSError("the service is away")

    def scalars(self) -> Scalars:
        found: Scalars = {}
        for step, values in self.rows:
            assert step is not None
            for name, value in values.items():
                found.setdefault(name, []).append((step, value))
        return found


def events_of(folder: Path) -> Any:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    return events.Reload()


def tensorboard_scalars(folder: Path) -> Scalars:
    events = events_of(folder)
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def mlflow_scalars(database: Path) -> Scalars:
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT key, step, value FROM metrics ORDER BY step, timestamp").fetchall()
    connection.close()
    found: Scalars = {}
    for name, step, value in rows:
        found.setdefault(name, []).append((step, value))
    return found


def wandb_records(folder: Path) -> list[Any]:
    """All records of a W&B offline run."""
    protocol: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")

    (file,) = folder.glob("*.wandb")
    content = file.read_bytes()
    # LevelDB's format of logs: after a header, blocks of 32 KiB with chunks of a checksum, a length, a kind and data.
    records, data, position = [], b"", 7
    while len(content) - position > 7:
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        _, length, kind = struct.unpack_from("<IHB", content, position)
        data += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(protocol.Record.FromString(data))
            data = b""
    return records


def assert_has_history(scalars: Scalars, history: dict[str, Any], *, tolerance: float = 1e-6) -> None:
    """Every value of the history once, and within the epochs a curve without gaps or doubles."""
    expected: Scalars = {}
    for name, update, value in history["metrics"]:
        expected.setdefault(name, []).append((update, value))
    expected["train/loss"] = [(update, value) for update, value in history["steps"]]
    for name, values in expected.items():
        assert [step for step, _ in scalars[name]] == [step for step, _ in values], name
        np.testing.assert_allclose([value for _, value in scalars[name]], [value for _, value in values], tolerance)
    for name in scalars.keys() - expected.keys():
        assert [step for step, _ in scalars[name]] == [update for update, _ in history["steps"]], name


# ----------------------------------------------------------------------------------------- kills, on one and two ranks


@pytest.mark.processes
@pytest.mark.parametrize("world_size", some((2,), (1, 2)))
def test_a_killed_and_resumed_run_has_one_record_without_gaps_or_doubles(world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")
    env = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}

    def train(*killed_after: int) -> None:
        run_on_ranks(
            SCRIPT, world_size, tmp_path, world_size, "tensorboard,mlflow", *killed_after, env=env, cwd=tmp_path
        )

    # Between two saves: with one process in the first epoch, and always in the second.
    for update in (17, 36)[world_size - 1 :]:
        with pytest.raises(AssertionError, match="SIGKILL"):
            train(update)
    train()

    history = json.loads((tmp_path / "history.json").read_text())
    assert [step for step, _ in history["steps"]] == list(range(1, 49))  # 571 rows, 24 in an update, 2 epochs
    assert_has_history(tensorboard_scalars(tmp_path / "runs" / "digits"), history)
    assert_has_history(mlflow_scalars(tmp_path / "mlflow.db"), history)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits"]
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        assert connection.execute("SELECT status, name FROM runs").fetchall() == [("FINISHED", "digits")]
        params = dict(connection.execute("SELECT key, value FROM params").fetchall())
    connection.close()
    assert params["num_processes"] == str(world_size)
    assert params["gradient_clip_norm"] == "1.0"
    assert (params["optimizer"], params["scheduler"], params["model"]) == ("SGD", "StepLR", "Sequential")
    assert (params["model.parameters"], params["optimizer.group_1.parameters"]) == ("1210", "170")
    assert math.isclose(float(params["optimizer.lr"]), 0.1, rel_tol=1e-6)
    assert params["data.rows"] == "571"


@pytest.mark.processes
def test_a_wandb_run_that_is_resumed_offline_has_all_rows_under_one_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    # After a SIGTERM the run closes its record. After a SIGKILL, W&B loses what it has not written to its file yet.
    with pytest.raises(AssertionError, match=str(128 + signal.SIGTERM)):
        run_forked(SCRIPT, tmp_path, 1, "wandb", 25, "SIGTERM", env=env, cwd=tmp_path)
    output = run_forked(SCRIPT, tmp_path, 1, "wandb", env=env, cwd=tmp_path)

    folders = sorted((tmp_path / "runs" / "wandb").glob("offline-run-*"))
    assert len({folder.name.rsplit("-", 1)[1] for folder in folders}) == 1
    assert output.stdout.splitlines()[-1] == f"Logged to wandb: {folders[-1]} (`wandb sync` uploads it)"
    rows: dict[int, dict[str, float]] = {}
    for record in (record for folder in folders for record in wandb_records(folder) if record.HasField("history")):
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        rows.setdefault(int(values["_step"]), {}).update(values)
    history = json.loads((tmp_path / "history.json").read_text())
    assert list(rows) == [step for step, _ in history["steps"]]
    assert [row["train/loss"] for row in rows.values()] == [loss for _, loss in history["steps"]]
    for name, update, value in history["metrics"]:
        assert rows[update][name] == value
    (run,) = (record.run for record in wandb_records(folders[0]) if record.HasField("run"))
    assert (run.project, run.display_name) == ("pytorch-accelerated", "digits")


# ------------------------------------------------------------------------------------------------------- what is logged


def test_tensorboard_has_hyperparameters_scalars_and_figures(tmp_path: Path) -> None:
    tracker = TrackerCallback("tensorboard", folder=tmp_path, run_name="run", hyperparameters={"data": {"rows": 20}})

    class Pictures(TrainerCallback):
        def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            pyplot = pytest.importorskip("matplotlib.figure")
            figure = pyplot.Figure(figsize=(1, 1))
            figure.subplots().plot([1, 2])
            tracker.log_figure("curve", figure)
            tracker.log_figure("early", figure, step=3)

    trainer = a_trainer(tracker, Pictures())
    history = fit(trainer, 2)
    folder = tmp_path / "run"
    events = events_of(folder)
    assert [image.step for image in events.Images("curve")] == [5, 10]
    assert [image.step for image in events.Images("early")] == [3, 3]
    metrics = [[record.name, record.update, record.value] for record in history.records]
    steps = [[record.update, record.train_loss] for record in history.step_records]
    assert_has_history(tensorboard_scalars(folder), {"metrics": metrics, "steps": steps})
    (file,) = folder.rglob("hparams.yml")
    values = dict(line.split(": ") for line in file.read_text().splitlines())
    assert (values["data.rows"], values["num_epochs"], values["optimizer.lr"]) == ("20", "2", "0.01")
    assert (values["model.parameters"], values["model.trainable_share"]) == ("34", "1.0")


def test_a_second_run_gets_a_record_of_its_own_and_a_continued_one_does_not(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trainer = a_trainer(TrackerCallback("tensorboard", folder=tmp_path, run_name="run"))
    fit(trainer, 1)
    fit(trainer, 1, reset_run_history=False)
    trainer.evaluate(DATA)
    fit(trainer, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run_2"}
    first, second = tensorboard_scalars(tmp_path / "run"), tensorboard_scalars(tmp_path / "run_2")
    assert [step for step, _ in first["eval_loss_epoch"]] == [5, 10]
    assert [step for step, _ in first["evaluation_loss"]] == [10]
    assert [step for step, _ in second["eval_loss_epoch"]] == [5]


def test_several_trackers_get_the_same_and_the_last_lines_say_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    own = ListTracker()
    fit(a_trainer(TrackerCallback(["tensorboard", own], folder=tmp_path, run_name="run")), 2)
    assert own.calls[:2] == ["start", "store"]
    assert own.calls[-1] == "finish"
    logged, expected = own.scalars(), tensorboard_scalars(tmp_path / "run")
    assert {name: [step for step, _ in values] for name, values in logged.items()} == {
        name: [step for step, _ in values] for name, values in expected.items()
    }
    assert capsys.readouterr().out.splitlines()[-2:] == [f"Logged to tensorboard: {tmp_path / 'run'}", "Logged to list"]


def test_weights_are_the_same_to_the_bit_with_and_without_trackers() -> None:
    with_trackers, without = a_trainer(TrackerCallback(ListTracker())), a_trainer()
    fit(with_trackers), fit(without)
    assert_same_weights(weights_of(with_trackers.model), weights_of(without.model))


def test_an_instance_of_accelerate_is_used_as_the_user_made_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    fit(a_trainer(TrackerCallback(tracking.TensorBoardTracker("mine", tmp_path, filename_suffix=".mine"))), 1)
    assert list((tmp_path / "mine").glob("*.mine"))
    assert len(tensorboard_scalars(tmp_path / "mine")["train/loss"]) == 5


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("fails_at", "at", "updates"),
    [("start", "starting", 0), ("store", "starting", 0), ("log", "logging", 5), ("finish", "closing", 10)],
)
def test_a_failing_tracker_costs_one_warning_and_the_others_have_everything(
    fails_at: str, at: str, updates: int
) -> None:
    good, bad = ListTracker(), ListTracker(fails_at)
    bad.name = "bad"
    message = rf"'bad' failed at {at}, after {updates} updates \(OSError: the service is away\). The run continues"
    with pytest.warns(UserWarning, match=message) as caught:
        fit(a_trainer(TrackerCallback([bad, good])), 2)
    assert len(caught) == 1
    assert [step for step, _ in good.scalars()["eval_loss_epoch"]] == [5, 10]
    assert good.calls[-1] == "finish"
    assert bad.calls.count(fails_at) == 1


def test_a_tracker_without_figures_is_named_in_a_warning_and_figures_before_a_run_are_an_error() -> None:
    callback = TrackerCallback(ListTracker())
    with pytest.raises(ConfigurationError, match="log_figure` was called before a run"):
        callback.log_figure("curve", None)

    class Picture(TrainerCallback):
        def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            callback.log_figure("nothing", None)

    with pytest.warns(UserWarning, match="'list' takes no figures"):
        fit(a_trainer(callback, Picture()))


def test_the_record_is_complete_and_closed_after_an_exception() -> None:
    own = ListTracker()
    with pytest.raises(Die):
        fit(a_trainer(TrackerCallback(own), DieAfter(7)))
    assert own.calls[-1] == "finish"
    assert [step for step, _ in own.scalars()["eval_loss_epoch"]] == [5]


@pytest.mark.parametrize(
    "trackers", ["tensorbord", ["tensorboard", "tensorboard"], [], [3]], ids=["slip", "twice", "none", "number"]
)
def test_wrong_names_are_errors_before_a_run(trackers: Any) -> None:
    with pytest.raises(ConfigurationError, match="one or more, each once: of .*tensorboard"):
        TrackerCallback(trackers)


@pytest.mark.parametrize("name", ["mlflow", "aim", "wandb", "tensorboard"])
def test_a_missing_package_is_an_error_that_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=f"The tracker '{name}' needs.*pip install {name}$"):
        TrackerCallback(name)


def test_histograms_warn_that_they_are_not_logged_any_more(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="log_figure"):
        TrackerCallback("tensorboard", folder=tmp_path).log_histogram("weights", [1.0, 2.0])
