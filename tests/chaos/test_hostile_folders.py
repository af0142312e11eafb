"""What stands in a folder is judged, never believed: typed errors, nothing run, nothing written, nothing changed."""

import shutil
from pathlib import Path

import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.__main__ import main
from pytorch_accelerated.errors import CheckpointError
from tests.chaos.hostile import NAMES, make_hostile
from tests.chaos.record import record
from tests.chaos.saved_runs import everything_of, files_below, sign, trained
from tests.checkpointing.same_state import assert_same_state
from tests.support.processes import REPOSITORY, run_script


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "state"
    trained(2).save_training_state(folder, {"note": "mine"})
    return folder


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    """Refused states leave it as it is, so that all tests can share it."""
    return trained(1, seed=5)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_folders_are_refused_and_change_nothing(
    name: str, saved: Path, trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, trap = shutil.copytree(saved, tmp_path / "state"), tmp_path / "trap"
    shutil.copy(saved / "model.safetensors", tmp_path)
    make_hostile(folder, name, trap)
    files, state = files_below(tmp_path), everything_of(trainer)
    with pytest.raises(CheckpointError):
        trainer.load_training_state(folder)
    assert_same_state(everything_of(trainer), state)
    for command in ("list", "verify", "show"):
        assert main(["checkpoints", command, str(folder)]) in (0, 1, 2)
    assert max(map(len, "".join(capsys.readouterr()).splitlines())) < 2000
    assert files_below(tmp_path) == files
    assert not trap.exists()


def test_the_folders_above_are_refused_for_what_was_done_to_them(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "state")
    sign(folder)
    trainer = trained(1, seed=5)
    trainer.load_training_state(folder)
    assert_same_state(everything_of(trainer)["model"], everything_of(trained(2))["model"])


@pytest.mark.processes
def test_no_hostile_folder_takes_much_memory_starts_a_process_or_opens_a_file_to_write(
    saved: Path, tmp_path: Path
) -> None:
    for number, name in enumerate(NAMES):
        folder = shutil.copytree(saved, tmp_path / str(number) / "state")
        shutil.copy(saved / "model.safetensors", tmp_path / str(number))
        make_hostile(folder, name, tmp_path / "trap")
    output = run_script(REPOSITORY / "tests" / "chaos" / "reading.py", tmp_path, len(NAMES))
    assert output.stdout.splitlines()[-1] == f"{len(NAMES)} refused"
    assert not (tmp_path / "trap").exists()
    record("hostile folders", {"folders": len(NAMES), "states accepted": 0, "programs started": 0})
