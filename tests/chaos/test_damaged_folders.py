"""Flipped bits, cut files, missing files: none is accepted, and nothing is changed by trying."""

import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.checkpointing.verify import find_state
from pytorch_accelerated.errors import InvalidCheckpointError
from tests.chaos.record import record
from tests.chaos.saved_runs import everything_of, trained
from tests.chaos.size import size
from tests.checkpointing.same_state import assert_same_state

FLIPS = size(small=500, release=10_000)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two states, ``step_2`` and ``step_4``, of one run."""
    states = tmp_path_factory.mktemp("saved")
    for epochs in (1, 2):
        trained(epochs).save_training_state(states / f"step_{2 * epochs}")
    return states


@pytest.fixture
def states(saved: Path, tmp_path: Path) -> Path:
    """A copy of them, to be damaged."""
    return shutil.copytree(saved, tmp_path / "states")


@pytest.fixture(scope="module")
def other_trainer() -> Trainer:
    """With other values in every part. Refused states leave it as it is, so that all tests can share it."""
    return trained(1, seed=5)


def files_of(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    assert len(files) > 10
    return files


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    original = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(original)


def assert_refused(trainer: Trainer, damaged: Path, states: Path, file: Path) -> None:
    """Loading the state itself is an error that names the file; a run goes on from the other one, with one warning."""
    with pytest.raises(InvalidCheckpointError) as caught:
        trainer.load_training_state(damaged)
    assert str(file) in str(caught.value)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert find_state(states) == states / "step_2"
    (warning,) = told
    assert str(file) in str(warning.message)


def test_no_flipped_bit_is_accepted(states: Path, other_trainer: Trainer) -> None:
    before = everything_of(other_trainer)
    files = files_of(states / "step_4")
    chance = random.Random(FLIPS)
    for number in range(FLIPS):
        file = files[number % len(files)]
        content = bytearray(file.read_bytes())
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << (bit % 8)
        with replaced(file, bytes(content)):
            assert_refused(other_trainer, states / "step_4", states, file)
    assert_same_state(everything_of(other_trainer), before)
    assert find_state(states) == states / "step_4", "the files are not as they were before the last flip"
    record("flipped bits", {"flips": FLIPS, "states accepted": 0})


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda content: b"",
    "one byte": lambda content: content[:1],
    "half": lambda content: content[: len(content) // 2],
    "all but one byte": lambda content: content[:-1],
    "a byte too many": lambda content: content + b"\0",
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_no_file_of_another_length_is_accepted(
    cut: Callable[[bytes], bytes], states: Path, other_trainer: Trainer
) -> None:
    before = everything_of(other_trainer)
    for file in files_of(states / "step_4"):
        with replaced(file, cut(file.read_bytes())):
            assert_refused(other_trainer, states / "step_4", states, file)
    assert_same_state(everything_of(other_trainer), before)
    record("files of another length", {"ways, for each file": len(CUTS), "states accepted": 0})


def test_no_missing_file_is_overlooked(states: Path, other_trainer: Trainer) -> None:
    before = everything_of(other_trainer)
    for file in files_of(states / "step_4"):
        content = file.read_bytes()
        file.unlink()
        assert_refused(other_trainer, states / "step_4", states, file)
        file.write_bytes(content)
    assert_same_state(everything_of(other_trainer), before)


def test_no_file_of_another_state_is_accepted(states: Path, other_trainer: Trainer) -> None:
    before = everything_of(other_trainer)
    differing = 0
    for file in files_of(states / "step_4"):
        content = (states / "step_2" / file.name).read_bytes()
        if content != file.read_bytes() and file.name != "manifest.json":
            differing += 1
            with replaced(file, content):
                assert_refused(other_trainer, states / "step_4", states, file)
    assert differing > 3
    assert_same_state(everything_of(other_trainer), before)


def test_an_undamaged_state_is_accepted(states: Path) -> None:
    """Without this the tests above would say nothing."""
    trainer = trained(1, seed=5)
    trainer.load_training_state(states / "step_4")
    assert_same_state(everything_of(trainer)["model"], everything_of(trained(2))["model"])
