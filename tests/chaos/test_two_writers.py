"""Two runs that save to one folder: the second is refused, and the first goes on as if nothing had been."""

import json
import multiprocessing
from pathlib import Path

import pytest

from pytorch_accelerated.checkpointing import run_folder
from pytorch_accelerated.checkpointing.run_folder import LOCK_NAME, FolderLock
from pytorch_accelerated.errors import CheckpointError
from tests.chaos.record import record
from tests.chaos.size import size
from tests.support.processes import TIME_LIMIT_SECONDS, run_forked

SCRIPT = Path(__file__).parent / "two_writers.py"


@pytest.mark.processes
def test_a_second_run_in_a_folder_is_refused_and_the_first_one_is_none_the_worse(tmp_path: Path):
    trials = size(2, 200)
    output = run_forked(SCRIPT, trials, tmp_path, timeout_seconds=size(TIME_LIMIT_SECONDS, 3600))
    done = json.loads(output.stdout.splitlines()[-1])
    assert done == {
        "second runs": trials,
        "refused": trials,
        "first runs that ended differently": 0,
        "damaged states": 0,
    }
    record("two runs in one folder", done)


def test_a_folder_is_free_again_when_its_run_is_over(tmp_path: Path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    with pytest.raises(CheckpointError, match="another run of this process is saving to"):
        second.acquire()
    first.release()
    assert not (tmp_path / LOCK_NAME).exists()
    second.acquire()
    second.release()
    second.release()


def _try(folder: Path) -> str:
    run_folder._held.clear()  # which the fork has from its parent
    try:
        FolderLock(folder).acquire()
    except CheckpointError as error:
        return str(error)
    return "granted"


@pytest.mark.processes
def test_the_refusal_names_the_process_that_is_there(tmp_path: Path):
    lock = FolderLock(tmp_path / "states")
    lock.acquire()
    try:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            answer = pool.apply(_try, (tmp_path / "states",))
        assert f"process {multiprocessing.current_process().pid} on " in answer
    finally:
        lock.release()


def test_files_left_by_a_killed_run_lock_nothing(tmp_path: Path):
    (tmp_path / LOCK_NAME).write_text("process 1 on another")
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert (tmp_path / LOCK_NAME).read_text().startswith("process ")
    assert "another" not in (tmp_path / LOCK_NAME).read_text()
    lock.release()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path):
    (outside := tmp_path / "outside").write_text("precious")
    (tmp_path / LOCK_NAME).symlink_to(outside)
    with pytest.raises(CheckpointError):
        FolderLock(tmp_path).acquire()
    assert outside.read_text() == "precious"
