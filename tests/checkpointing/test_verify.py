"""Damaged folders are noticed, and states before them used. Hostile ones: `test_damage`."""

import json
import threading
from pathlib import Path

import pytest
import torch

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError
from pytorch_accelerated.states import layout
from pytorch_accelerated.states.publish import begin
from pytorch_accelerated.states.state_folder import read_state
from pytorch_accelerated.states.verify import find_state, read_manifest, verify
from tests.checkpointing.writing import write_state


def save(folder: Path, updates: int = 1) -> Path:
    write_state(
        folder,
        {"updates": updates, "value": 0.25},
        {"model": {"weight": torch.arange(5.0)}, "run": {"updates": updates, "name": "é"}},
    )
    return folder


def test_files_that_the_manifest_does_not_list_are_ignored(tmp_path):
    folder = save(tmp_path / "state")
    (folder / "notes.txt").write_text("a good one")
    (folder / "code.json").write_text("not json")
    (folder / "folder").mkdir()
    verify(folder)
    assert set(read_state(folder)[1]) == {"model", "run"}


# Falling back.


def test_states_of_which_none_is_valid_are_an_error_that_names_all(tmp_path):
    for updates in (1, 2):
        save(tmp_path / f"step_{updates}", updates)
        (tmp_path / f"step_{updates}" / "model.json").unlink()
    with pytest.raises(InvalidCheckpointError, match="none of them is valid") as caught:
        find_state(tmp_path)
    assert str(tmp_path / "step_1" / "model.json") in str(caught.value)
    assert str(tmp_path / "step_2" / "model.json") in str(caught.value)


@pytest.mark.parametrize("content", ["missing", "missing, parent too", "empty", "other things"])
def test_without_any_state_there_is_nothing_to_resume(content, tmp_path):
    place = tmp_path / "missing" / "too" if content == "missing, parent too" else tmp_path / "states"
    if content in ("empty", "other things"):
        place.mkdir()
    if content == "other things":
        (place / "log.txt").write_text("epoch 1")
        (place / "best.pt").write_bytes(b"x")
        (place / "plots").mkdir()
        (place / ".hidden").mkdir()
        (place / "link").symlink_to(save(tmp_path / "elsewhere" / "state"))
    assert find_state(place) is None


def test_a_state_that_was_named_itself_is_not_replaced_by_another_one(tmp_path):
    for updates in (1, 2):
        save(tmp_path / f"step_{updates}", updates)
    assert find_state(tmp_path / "step_1") == tmp_path / "step_1"
    (tmp_path / "step_2" / "run.json").unlink()
    with pytest.raises(InvalidCheckpointError, match=r"step_2 is damaged"):
        find_state(tmp_path / "step_2")


def test_a_run_cannot_resume_from_a_file(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="load_checkpoint"):
        find_state(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("written", "read", "message"),
    [(2, 1, r"has format 2.*reads format 1.*Install the version"), (1, 2, r"has format 1.*reads format 2")],
)
def test_a_state_of_another_format_is_not_called_damaged(written, read, message, tmp_path, monkeypatch):
    folder = save(tmp_path / "state")
    manifest = {**json.loads((folder / "manifest.json").read_bytes()), "format": written}
    del manifest["sha256"]
    (folder / "manifest.json").write_bytes(layout._with_checksum(manifest))
    monkeypatch.setattr(layout, "FORMAT", read)
    with pytest.raises(InvalidCheckpointError, match=message) as caught:
        read_manifest(folder)
    assert "damaged" not in str(caught.value)


def test_a_small_state_starts_no_threads_but_those_that_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start of a thread is a moment at which garbage with threads of its own may block it (CPython 3.11)."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    files = {f"{number}.bin": b"a" * 1000 for number in range(9)}
    staged = begin(tmp_path / "state")
    staged.commit({}, staged.write_files((name, [content]) for name, content in files.items()))
    assert len(started) <= 2 * 4
    started.clear()
    assert len(verify(tmp_path / "state").files) == len(files)
    assert not started
