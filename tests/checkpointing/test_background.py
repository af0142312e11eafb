"""A state written in the background holds the values at the time of the request."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.states import disk
from pytorch_accelerated.states.codec import encode
from pytorch_accelerated.states.state_folder import BackgroundWriter, read_state
from pytorch_accelerated.states.verify import list_states
from tests.checkpointing.faulty_disk import FaultyDisk
from tests.checkpointing.same_state import assert_same_state
from tests.support.reference import regression_data, tiny_trainer

DATA = regression_data(24)


class SlowDisk:
    """Blocks the first write until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached = threading.Event()
        self.may_go_on = threading.Event()
        write = disk.write

        def slow(*args: Any) -> None:
            self.is_reached.set()
            assert self.may_go_on.wait(600)
            write(*args)

        monkeypatch.setattr(disk, "write", slow)


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    writer = BackgroundWriter()
    yield writer
    writer.close()


def trained(folder: Path, *callbacks: Any, background: bool, **saving: Any) -> Trainer:
    saver = SaveTrainingStateCallback(folder, background=background, **saving)
    trainer = tiny_trainer(saver, *callbacks, seed=3)
    trainer.train(DATA, 2, per_device_batch_size=4)
    return trainer


def test_the_written_state_is_the_one_at_the_time_of_the_request(
    writer: BackgroundWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tensors = {"plain": torch.arange(6.0), "transposed": torch.arange(6.0).reshape(2, 3).T, "empty": torch.empty(0, 2)}
    tensors["tied"] = tensors["plain"]
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    slow = SlowDisk(monkeypatch)
    for version in (1, 2):  # the second time in the copies of the first
        encoded = {"model": encode(tensors, path="model")}
        writer.write(tmp_path / str(version), {"version": version}, encoded)
        assert slow.is_reached.wait(600)
        assert version == 2 or writer.is_busy
        for tensor in tensors.values():
            tensor += 1
        slow.may_go_on.set()
        writer.wait()
        assert not writer.is_busy
        facts, parts = read_state(tmp_path / str(version))
        assert facts == {"version": version}
        for name, tensor in parts["model"].items():
            assert torch.equal(tensor, wanted[name])
            assert tensor.stride() == wanted[name].stride()
        wanted = {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("operation", range(3))
def test_a_failed_write_is_reported_once_and_the_next_state_is_written(
    operation: int, writer: BackgroundWriter, tmp_path: Path
):
    encoded = {"model": encode({"weight": torch.ones(2)}, path="model")}
    with FaultyDisk(operation).installed():
        writer.write(tmp_path / "first", {}, encoded)
        with pytest.raises(CheckpointError, match="No space left on device"):
            writer.wait()
    writer.wait()
    writer.write(tmp_path / "second", {}, encoded)
    writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


@pytest.mark.parametrize(
    "saving", [{"save_every_n_steps": 1, "max_checkpoints": 2}, {"save_every_n_epochs": 1, "save_at_end": False}]
)
def test_runs_that_save_in_the_background_leave_the_same_states(saving: dict[str, Any], tmp_path: Path):
    for background in (False, True):
        trained(tmp_path / str(background), background=background, **saving)
    found = [
        {folder.name: read_state(folder) for folder, _ in list_states(tmp_path / str(background))}
        for background in (False, True)
    ]
    assert found[0].keys() == found[1].keys() != set()
    for name, (facts, parts) in found[0].items():
        other_facts, other_parts = found[1][name]
        assert facts == other_facts
        for run in (parts["run"], other_parts["run"]):
            del run["recorder"], run["history"]["step_records"]  # times differ
        assert_same_state([parts["run"], parts["model"]], [other_parts["run"], other_parts["model"]])
    names = {path.name for path in (tmp_path / "True").iterdir()}
    assert names == found[1].keys()  # nothing is left in the making


def test_a_state_waits_until_the_one_before_is_written(
    writer: BackgroundWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slow = SlowDisk(monkeypatch)
    value = torch.zeros(4)
    writer.write(tmp_path / "0", {}, {"model": encode({"value": value}, path="model")})
    assert slow.is_reached.wait(600)
    value += 1
    release = threading.Timer(0.5, slow.may_go_on.set)
    release.start()
    writer.write(tmp_path / "1", {}, {"model": encode({"value": value}, path="model")})
    writer.wait()
    release.join()
    for version in (0, 1):  # the copies of the first are used again for the second
        assert torch.equal(read_state(tmp_path / str(version))[1]["model"]["value"], torch.full((4,), float(version)))


def test_a_failed_save_ends_the_run_between_two_updates_with_its_own_error(tmp_path: Path):
    class Slowly(TrainerCallback):
        """Waits for the save, so that the failure is there after this update."""

        def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
            while trainer.run_context.control.saves.writer.is_busy:
                pass

    (tmp_path / "states").mkdir()
    with FaultyDisk(3).installed() as faulty, pytest.raises(CheckpointError, match="No space left on device"):
        trained(tmp_path / "states", watcher := Slowly(), background=True, save_every_n_steps=2)
    assert faulty.operations
    assert watcher is not None
    assert list_states(tmp_path / "states") == []


def test_an_error_in_the_run_is_not_hidden_by_one_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Failing(TrainerCallback):
        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            if trainer.run_state.updates == 4:
                slow.may_go_on.set()  # a save that fails before this would end the run first
                raise ZeroDivisionError

    with FaultyDisk(4).installed() as faulty:
        slow = SlowDisk(monkeypatch)
        with pytest.warns(UserWarning, match="No space left on device"), pytest.raises(ZeroDivisionError):
            trained(tmp_path, Failing(), background=True, save_every_n_steps=3)
    assert "write" in faulty.operations[:4], faulty.operations


class CountsStates(TrainerCallback):
    """The most complete states that there were after an update."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.most = 0

    def on_optimizer_step_end(self, trainer: Any, **kwargs: Any) -> None:
        self.most = max(self.most, len(list_states(self.folder)))


def test_states_do_not_pile_up_where_saving_takes_longer_than_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = disk.flush

    def slow(file: Any) -> None:
        time.sleep(0.005)  # for each of many files, so a state takes many times as long as an update
        flush(file)

    monkeypatch.setattr(disk, "flush", slow)
    counter = CountsStates(tmp_path / "states")
    trainer = trained(tmp_path / "states", counter, background=True, save_every_n_steps=1, max_checkpoints=2)
    assert trainer.run_state.updates == 12
    assert 2 <= counter.most <= 3  # two are kept, and the one that has just been completed
    assert {folder.name for folder, _ in list_states(tmp_path / "states")} == {"final", "step_12"}
