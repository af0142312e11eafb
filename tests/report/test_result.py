"""The result of a run in a file: what it says is what the run did, whatever ends it."""

import contextlib
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    LossSpikeCallback,
    ReportCallback,
    ResultCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TerminateOnNaNCallback,
    TrainerCallback,
)
from pytorch_accelerated.errors import CheckpointError, NonFiniteLossError, SignalExit
from pytorch_accelerated.extras.report import result as module
from tests.report.digits import EVAL, TRAIN, At, Broken, train, trainer_with
from tests.report.test_verdict import write_result
from tests.support.tool import run_tool

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "programs.md"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "result.json"


def read(path: Path) -> dict[str, Any]:
    result = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(result, dict)
    return result


def kinds(result: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(alert["kind"], alert["epoch"], alert["update"]) for alert in result["alerts"]]


def test_the_result_is_that_of_the_run(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(path.parents[1])
    before = time.time()
    saver = SaveBestModelCallback("best.pt")
    trainer = train(trainer_with(saver, ResultCallback(path, notes={"lr": 0.5, "limit": math.inf, "kind": Path})), 3)
    result, history = read(path), trainer.run_history
    best = history.best_record("eval_loss_epoch", False)
    assert best is not None
    assert (result["format"], result["status"], result["reason"]) == (1, "finished", "")
    assert (result["pid"], result["epoch"], result["updates"]) == (os.getpid(), 3, 30)
    assert before <= result["started"] <= result["updated"] <= time.time()
    assert 0 < result["startup_seconds"] < result["seconds"] <= time.time() - before
    assert result["peak_memory"] == history.step_records[-1].peak_memory
    place = {"epoch": best.epoch, "update": best.update}
    assert result["best"] == {"name": best.name, "value": best.value, **place, "greater_is_better": False}
    assert result["metrics"] == {name: history.get_latest_metric(name) for name in history.get_metric_names()}
    assert (result["error"], result["alerts"]) == (None, [])
    assert result["files"] == {"best model": str(Path("best.pt").absolute()), "result": str(path)}
    assert result["config"] == json.loads(json.dumps(trainer.run_config.to_dict()))
    assert result["notes"] == {"lr": 0.5, "limit": "inf", "kind": repr(Path)}
    assert [each.name for each in path.parent.iterdir()] == ["result.json"]


def test_the_result_is_there_and_whole_from_the_first_update_on(path: Path):
    seen = []

    class Reader(TrainerCallback):
        def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
            result = read(path)
            seen.append((result["status"], result["epoch"], result["startup_seconds"] is None))

    train(trainer_with(ResultCallback(path), Reader()), 3)
    # It is written after each epoch, and shows the next one with the write after that.
    assert seen == [("running", 1, True)] * 10 + [("running", 1, False)] * 10 + [("running", 2, False)] * 10


def test_long_epochs_have_a_heartbeat(path: Path, monkeypatch: pytest.MonkeyPatch):
    updates: list[int] = []
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 11 * len(updates))  # each takes 11 seconds more

    class Reader(TrainerCallback):
        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            updates.append(read(path)["updates"])

    trainer_with(ResultCallback(path), Reader()).train(TRAIN, 1, EVAL, per_device_batch_size=1)
    assert updates == [64 * (number // 64) for number in range(300)]


# What ends a run


def test_a_signal_stops_a_run_and_a_second_train_is_a_new_one(path: Path):
    terminate = At(13, lambda: signal.raise_signal(signal.SIGTERM))
    trainer = trainer_with(ResultCallback(path), terminate)
    with pytest.raises(SignalExit):
        train(trainer)
    stopped = read(path)
    assert (stopped["status"], stopped["reason"], stopped["error"]) == ("stopped", "SIGTERM came.", None)
    assert (stopped["epoch"], stopped["updates"]) == (2, 13)
    terminate.update = 0
    train(trainer)
    result = read(path)
    assert (result["status"], result["reason"], result["updates"]) == ("finished", "", 20)
    assert result["started"] > stopped["updated"]


@pytest.mark.parametrize("error", [RuntimeError("a power cut"), KeyboardInterrupt()])
def test_a_failed_run_has_its_error_with_its_notes(path: Path, error: BaseException):
    with pytest.raises(type(error)):
        train(trainer_with(ResultCallback(path), At(13, error)))
    result = read(path)
    text = f"RuntimeError: {error}" if str(error) else "KeyboardInterrupt"
    assert (result["status"], result["reason"], result["updates"]) == ("failed", text, 13)
    notes = list(getattr(error, "__notes__", []))
    assert result["error"] == {"type": type(error).__name__, "message": str(error), "notes": notes}
    assert bool(notes) == isinstance(error, RuntimeError)


def test_a_run_that_fails_in_its_set_up_has_a_result(path: Path):
    trainer = trainer_with(ResultCallback(path))
    train(trainer)
    with pytest.raises(ValueError, match="num_workers"):
        train(trainer, train_dataloader_kwargs={"num_workers": -1})
    result = read(path)
    assert result["status"] == "failed"
    assert result["error"]["type"] == "ValueError"
    assert (result["updates"], result["startup_seconds"], result["best"], result["metrics"]) == (0, None, None, {})


def test_an_error_at_the_end_of_a_run_is_in_its_result(path: Path):
    class Fails(TrainerCallback):
        def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
            raise RuntimeError("no upload")

    with pytest.raises(RuntimeError):
        train(trainer_with(ResultCallback(path), Fails()))
    assert (read(path)["status"], read(path)["reason"]) == ("failed", "RuntimeError: no upload")


def test_evaluations_and_predictions_after_a_run_leave_its_result(path: Path):
    class Fails(TrainerCallback):
        def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
            raise RuntimeError("after the run")

    trainer = train(trainer_with(ResultCallback(path), Fails()))
    text = path.read_text()
    with pytest.raises(RuntimeError):
        trainer.evaluate(EVAL)
    trainer.predict(EVAL)
    assert path.read_text() == text


def test_a_resumed_run_continues_its_result(path: Path, tmp_path: Path):
    def trainer(*others: TrainerCallback) -> Trainer:
        saving = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=7)
        return trainer_with(saving, ResultCallback(path), *others, trainer_class=Broken)

    with pytest.raises(RuntimeError), pytest.warns(UserWarning, match="left out"):
        train(trainer(At(25, RuntimeError("power cut"))), 4, nonfinite_policy="skip")
    failed = read(path)
    train(trainer(), 4, resume_from=tmp_path / "states", nonfinite_policy="skip")
    result = read(path)
    assert (result["status"], result["error"], result["updates"]) == ("finished", None, 40)
    assert result["started"] == failed["started"]
    assert result["seconds"] > failed["seconds"] * 21 / 25 / 2
    assert kinds(result) == kinds(failed) == [("non-finite loss", 1, 7)]  # noticed when the state was saved
    assert result["alerts"][0]["text"] == "2 updates skipped, gradients not finite"
    train(trainer_with(ResultCallback(path)), 1)
    assert read(path)["started"] > result["updated"]


# Full disks, kills, and neighbours


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(made, capture_output=True).returncode:
        pytest.skip("only the administrator can make a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("error", [None, RuntimeError("a power cut")])
def test_a_full_disk_ends_in_a_status(error: Exception | None, small_disk: Path):
    def fill() -> None:
        with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass

    class Ends(At):
        pass

    path, ends = small_disk / "result.json", [] if error is None else [Ends(15, error)]
    with pytest.raises(RuntimeError) if error else contextlib.nullcontext():
        train(trainer_with(At(3, fill), *ends, ResultCallback(path)), 3)
    status = "finished" if error is None else "failed"
    assert (read(path)["status"], read(path)["updates"]) == (status, 30 if error is None else 15)
    assert sorted(each.name for each in small_disk.iterdir()) == ["filler", "result.json"]


def test_a_result_whose_last_status_cannot_be_written_ends_the_run_with_an_error(path: Path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    shrink = At(13, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1])))
    try:
        with (
            pytest.warns(UserWarning, match="File too large"),
            pytest.raises(CheckpointError, match="result.json failed: .* Check free space"),
        ):
            train(trainer_with(shrink, ResultCallback(path)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert read(path)["status"] == "running"
    assert os.listdir(path.parent) == ["result.json"]


def test_a_killed_run_is_lost_and_a_live_one_is_running(path: Path, capsys: pytest.CaptureFixture[str]):
    def statuses() -> list[str]:
        capsys.readouterr()
        assert run_tool("runs", path.parents[1], "--json") == 0
        found = json.loads(capsys.readouterr().out)["runs"]
        assert all(bool(each["reason"]) == (each["status"] == "lost") for each in found)
        return [each["status"] for each in found]

    seen: list[str] = []
    train(trainer_with(ResultCallback(path), At(3, lambda: seen.extend(statuses()))))
    assert seen == ["running"]
    assert statuses() == ["finished"]
    process = subprocess.Popen(["sleep", "60"])
    here = {"status": "running", "pid": process.pid, "host": platform.node(), "updated": time.time()}
    write_result(path.parent, **here)
    assert statuses() == ["running"]
    write_result(path.parent, **{**here, "updated": 1.0})  # of an earlier process with this number
    assert statuses() == ["lost"]
    write_result(path.parent, **here)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its parent has not asked yet
    assert statuses() == ["lost"]
    process.wait()
    assert statuses() == ["lost"]
    elsewhere = {**here, "host": "elsewhere", "seconds": 10.0, "updates": 100}
    for age, status in ((600, "running"), (4000, "lost")):
        write_result(path.parent, **{**elsewhere, "updated": time.time() - age})
        assert statuses() == [status]
    slow = {**elsewhere, "seconds": 1000.0, "updates": 10, "updated": time.time() - 4000}  # 64 take 6,400 seconds
    write_result(path.parent, **slow)
    assert statuses() == ["running"]


def test_two_live_runs_that_write_one_result_are_told(path: Path):
    process = subprocess.Popen(["sleep", "60"])
    other = {"status": "running", "pid": process.pid, "host": platform.node(), "updated": time.time()}
    try:
        write_result(path.parent, **other)
        with pytest.warns(UserWarning, match=f"two live runs: this one, and process {process.pid} on") as seen:
            train(trainer_with(ResultCallback(path)))
        assert len(seen) == 1
    finally:
        process.kill()
        process.wait()
    write_result(path.parent, **other)
    train(trainer_with(ResultCallback(path)))  # that run is dead
    later = At(13, lambda: write_result(path.parent, **{**other, "host": "elsewhere"}) and None)
    with pytest.warns(UserWarning, match="on elsewhere. Give each a folder"):
        train(trainer_with(ResultCallback(path), later))
    assert read(path)["status"] == "finished"


# The best value


@pytest.mark.parametrize(
    ("callbacks", "arguments", "expected"),
    [
        ([], {}, ("eval_loss_epoch", False)),
        ([], {"watch_metric": "eval_accuracy"}, ("eval_accuracy", True)),
        ([], {"watch_metric": "eval_novelty"}, ("eval_novelty", False)),
        ([("eval_novelty", True)], {}, ("eval_novelty", True)),
        (
            [("eval_novelty", True), ("eval_loss_epoch", False)],
            {"watch_metric": "eval_loss_epoch"},
            ("eval_loss_epoch", False),
        ),
    ],
)
def test_the_best_value_is_that_of_the_metric_that_decides(
    callbacks: list[Any], arguments: dict[str, Any], expected: tuple[str, bool], path: Path
):
    class Records(TrainerCallback):
        def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            value = (0.2, 0.7, 0.5)[trainer.run_history.current_epoch - 1]
            trainer.run_history.update_metric("eval_accuracy", value)
            trainer.run_history.update_metric("eval_novelty", value)

    judges = [EarlyStoppingCallback(9, watch_metric=name, greater_is_better=greater) for name, greater in callbacks]
    trainer = train(trainer_with(Records(), *judges, ResultCallback(path, **arguments)), 3)
    best = read(path)["best"]
    record = trainer.run_history.best_record(*expected)
    assert record is not None
    assert (best["name"], best["greater_is_better"]) == expected
    assert (best["value"], best["epoch"]) == (record.value, record.epoch)


def test_without_an_evaluation_the_training_loss_decides(path: Path):
    trainer_with(ResultCallback(path)).train(TRAIN, 2)
    assert read(path)["best"]["name"] == "train_loss_epoch"


def test_a_metric_without_a_value_costs_one_warning(path: Path):
    message = "The metric 'eval_acuracy' has no value. Known metrics: .*'eval_loss_epoch'"
    with pytest.warns(UserWarning, match=message) as seen:
        train(trainer_with(ResultCallback(path, "eval_acuracy")))
    assert len(seen) == 1
    assert (read(path)["status"], read(path)["best"]) == ("finished", None)


def test_a_result_or_page_that_cannot_be_written_costs_one_warning(tmp_path: Path):
    (tmp_path / "file").touch()
    result = ResultCallback(tmp_path / "file" / "result.json")
    page = ReportCallback(tmp_path / "file" / "run.html", seconds_between_writes=0)
    with pytest.warns(UserWarning, match="The run continues") as seen:
        trainer = train(trainer_with(result, page))
    assert sorted(str(each.message).split()[0] for each in seen) == ["ReportCallback", "ResultCallback"]
    assert trainer.run_state.updates == 20


# Alerts


@pytest.mark.parametrize("ending", [[], [TerminateOnNaNCallback()]])
def test_a_loss_that_is_not_finite_is_an_alert(ending: list[TrainerCallback], path: Path):
    trainer = trainer_with(*ending, ResultCallback(path), trainer_class=Broken)
    with pytest.raises(NonFiniteLossError) if ending else contextlib.nullcontext():
        train(trainer, 1)
    result = read(path)
    assert kinds(result) == [("non-finite loss", 1, 10)] * (1 if ending else 2)
    assert result["status"] == ("failed" if ending else "finished")
    if ending:
        assert result["error"]["type"] == "NonFiniteLossError"
        assert result["reason"] == f"NonFiniteLossError: {result['error']['message']}"
        assert result["alerts"][0]["text"] == result["error"]["message"]
    else:
        texts = ["train_loss_epoch, in batch 3 of epoch 1", "eval_loss_epoch, in batch 0 of epoch 1"]
        assert [alert["text"] for alert in result["alerts"]] == texts
        assert (result["metrics"]["train_loss_epoch"], result["best"]) == ("nan", None)


def test_a_model_that_could_not_be_saved_at_the_end_is_a_failure(path: Path, tmp_path: Path):
    saving = SaveTrainingStateCallback(tmp_path / "states")
    with pytest.raises(NonFiniteLossError, match="2 of 2 parameters"):
        train(trainer_with(saving, ResultCallback(path), trainer_class=Broken))
    result = read(path)
    assert (result["status"], result["error"]["type"]) == ("failed", "NonFiniteLossError")
    assert "2 of 2 parameters" in result["reason"]


def test_a_spike_of_the_loss_is_an_alert(path: Path):
    class Spiking(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            return output | {"loss": output["loss"] * (1e3 if self.run_state.updates == 39 else 1)}

    train(trainer_with(LossSpikeCallback(), ResultCallback(path), trainer_class=Spiking), 4)
    (alert,) = read(path)["alerts"]
    assert (alert["kind"], alert["epoch"], alert["update"]) == ("loss spike", 4, 40)
    assert "where the median was" in alert["text"]
    assert "; training samples " in alert["text"]


class SlowRows(Dataset[Any]):
    """Takes 0.15 seconds for each of 8 rows the first time that they are read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads <= 8:
            time.sleep(0.15)
        return TRAIN[index]


def test_an_epoch_that_waits_for_data_is_an_alert(path: Path):
    trainer = trainer_with(ResultCallback(path))
    trainer.train(SlowRows(), 3, per_device_batch_size=2, train_dataloader_kwargs={"num_workers": 0})
    result, (timing, *_) = read(path), trainer.run_history.timings
    assert kinds(result) == [("slow data", 1, 4)]
    waited, seconds = f"{timing.data_wait_seconds:.3g}", f"{timing.seconds:.3g}"
    assert (
        result["alerts"][0]["text"]
        == f"waited for data {timing.data_wait_share:.0%} of the time, {waited} of {seconds} s"
    )


def test_the_last_hundred_alerts_are_kept(path: Path):
    class Bad(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            return output | {"loss": output["loss"] * torch.nan}

    trainer_with(ResultCallback(path), trainer_class=Bad).train(TRAIN, 110, per_device_batch_size=300)
    assert [alert["epoch"] for alert in read(path)["alerts"]] == list(range(11, 111))


# The page


def test_the_page_has_every_key_and_every_kind_of_alert(path: Path):
    with pytest.raises(NonFiniteLossError):
        train(trainer_with(TerminateOnNaNCallback(), ResultCallback(path), trainer_class=Broken))
    failed = read(path)
    train(trainer_with(ResultCallback(path)))
    text = PAGE.read_text(encoding="utf-8")
    rows = {
        key: cells
        for keys, cells in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", text, re.MULTILINE)
        for key in re.findall(r"\w+", keys)
    }
    assert list(rows) == list(read(path))
    for key, value in {"best": read(path)["best"], "error": failed["error"], "alerts": failed["alerts"][0]}.items():
        assert set(re.findall(r"`(\w+)`", rows[key])) == set(value)
    source = Path(module.__file__).read_text(encoding="utf-8")
    kinds_in_code = set(re.findall(r'_add_alert\(trainer, "([^"]+)"', source))
    assert set(re.findall(r"^\| `(\w+[ -]\w+(?: \w+)?)` \| ", text, re.MULTILINE)) == kinds_in_code
    assert f"| `format` | int | {module.FORMAT}. " in text
