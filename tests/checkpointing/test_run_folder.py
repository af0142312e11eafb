"""A lock keeps other runs out of a folder for as long as its run lasts."""

import errno
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.states import run_folder
from pytorch_accelerated.states.run_folder import LOCK_NAME, FolderLock


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


def test_a_file_system_without_locks_keeps_out_runs_of_this_process_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.lockf", refuse)
    for lock in (FolderLock(tmp_path), FolderLock(tmp_path)):
        lock.acquire()
        with pytest.raises(CheckpointError, match="another run of this process"):
            FolderLock(tmp_path).acquire()
        lock.release()
