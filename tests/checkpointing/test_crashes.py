"""Every file operation of a save fails, or is the last thing that a process does."""

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.states import disk, layout
from pytorch_accelerated.states.layout import HiddenName, hidden_sibling
from pytorch_accelerated.states.portable import load_portable, save_portable
from pytorch_accelerated.states.publish import remove_state
from pytorch_accelerated.states.state_folder import read_state
from pytorch_accelerated.states.verify import find_state
from tests.checkpointing.faulty_disk import FaultyDisk, Killed, count_operations
from tests.checkpointing.writing import write_state

Death = Literal["death before", "death after", "torn"]
DEATHS: tuple[Death, ...] = ("death before", "death after", "torn")


def save(path: Path, version: int) -> None:
    """Write a state, or the single file of `save_portable`."""
    weight = torch.full((9,), float(version))
    if path.suffix == ".pt":
        save_portable(path, {"weight": weight, "version": version})
    else:
        write_state(path, {"version": version}, {"model": {"weight": weight}, "run": {"version": version}})


def version_found(place: Path) -> int | None:
    """Which version a resuming run would find; fails if it is a mix of several."""
    if place.suffix == ".pt":
        contents = load_portable(place)
        (version,) = {contents["version"], *map(int, contents["weight"].tolist())}
        return int(version)
    folder = find_state(place)
    if folder is None:
        return None
    facts, parts = read_state(folder)
    (version,) = {facts["version"], parts["run"]["version"], *map(int, parts["model"]["weight"].tolist())}
    return int(version)


def become_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, this process has the pid of a dead one, as in a restarted container."""
    monkeypatch.setattr(layout, "_process_token", lambda pid: "feedbeef")


SAVES: dict[str, Any] = {
    # name: what the first and the second save write, and where a run looks for them
    "a new name beside the old": ("step_1", "step_2", "."),
    "the same name": ("state", "state", "state"),
    "the same name, found by its parent": ("state", "state", "."),
}


@pytest.mark.parametrize("how", DEATHS)
@pytest.mark.parametrize(("first", "second", "place"), [*SAVES.values(), ("best.pt",) * 3], ids=[*SAVES, "a file"])
def test_a_death_at_any_operation_leaves_the_old_or_the_new_save(first, second, place, how, tmp_path, monkeypatch):
    def paths(number: int) -> tuple[Path, Path, Path]:
        parent = tmp_path / str(number)
        return parent / first, parent / second, parent / place

    whole_old, whole_new, _ = paths(-1)
    save(whole_old, 1)
    versions = []
    for number in range(count_operations(lambda: save(whole_new, 2))):
        old, new, where = paths(number)
        save(old, 1)
        with FaultyDisk(number, how).installed(), pytest.raises(Killed):
            save(new, 2)
        versions.append(version_found(where))
    switch = versions.index(2)  # once the new one was there it stays
    assert versions == [1] * switch + [2] * (len(versions) - switch)

    become_another_process(monkeypatch)
    for number in range(len(versions)):
        old, new, where = paths(number)
        save(new, 3)
        assert version_found(where) == 3
        assert {path.name for path in new.parent.iterdir()} == {first, second}


def test_a_second_death_on_the_way_back_loses_nothing_either(tmp_path, monkeypatch):
    """The next process never deletes the only complete state when it cleans up before its first save."""
    save(tmp_path / "whole" / "state", 1)
    operations = count_operations(lambda: save(tmp_path / "whole" / "state", 2))
    half_replaced = []
    for first in range(operations):
        save(tmp_path / str(first) / "state", 1)
        with FaultyDisk(first, "death before").installed(), pytest.raises(Killed):
            save(tmp_path / str(first) / "state", 2)
        if list((tmp_path / str(first)).glob(".state.*.replaced")):
            half_replaced.append(first)
    assert half_replaced
    become_another_process(monkeypatch)
    for first in half_replaced:
        versions = []
        for second in range(operations):
            copy = shutil.copytree(tmp_path / str(first), tmp_path / f"{first} {second}")
            with FaultyDisk(second, "death before").installed(), pytest.raises(Killed):
                save(copy / "state", 3)
            versions.append(version_found(copy / "state"))
        assert versions[0] in (1, 2)
        assert set(versions) <= {versions[0], 3}


@pytest.mark.parametrize("how", ["death before", "death after"])
def test_a_death_while_deleting_leaves_the_whole_state_or_none(how, tmp_path, monkeypatch):
    save(tmp_path / "whole" / "old", 1)
    versions = []
    for number in range(count_operations(lambda: remove_state(tmp_path / "whole" / "old"))):
        save(tmp_path / str(number) / "old", 1)
        with FaultyDisk(number, how).installed(), pytest.raises(Killed):
            remove_state(tmp_path / str(number) / "old")
        versions.append(version_found(tmp_path / str(number)))
    assert versions[-1] is None
    assert set(versions) <= {1, None}
    become_another_process(monkeypatch)
    for number in range(len(versions)):
        save(tmp_path / str(number) / "new", 2)
        assert {path.name for path in (tmp_path / str(number)).iterdir()} <= {"old", "new"}


@pytest.mark.parametrize(("first", "second", "place"), SAVES.values(), ids=SAVES)
def test_a_full_disk_at_any_operation_is_reported_and_loses_nothing(first, second, place, tmp_path, monkeypatch):
    save(tmp_path / "whole" / first, 1)
    operations = count_operations(lambda: save(tmp_path / "whole" / second, 2))
    for number in range(operations):
        parent = tmp_path / str(number)
        save(parent / first, 1)
        with FaultyDisk(number, "error").installed():
            try:
                save(parent / second, 2)
                reported = None
            except CheckpointError as error:
                reported = str(error)
        found = version_found(parent / place)
        assert (parent / first / "manifest.json").is_file()  # under its own name, not only to be found
        if reported is None:
            assert found == 2  # only deleting the old one failed
        else:
            assert found in (1, 2)
            assert f"Saving {parent / second} failed" in reported
            assert "No space left on device" in reported
        save(parent / second, 3)  # the disk has room again
        assert version_found(parent / place) == 3
    become_another_process(monkeypatch)
    for number in range(operations):
        save(tmp_path / str(number) / second, 4)
        assert {path.name for path in (tmp_path / str(number)).iterdir()} == {first, second}


def test_a_failed_write_says_which_file_and_how_much_and_is_cleaned_up(tmp_path):
    with FaultyDisk(2, "error").installed() as full, pytest.raises(CheckpointError) as caught:
        save(tmp_path / "state", 1)
    assert full.operations[2] == "write"
    assert "bytes at position 0 of 'model.json'" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_is_cleaned_up(tmp_path, monkeypatch):
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(disk, "flush_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "state", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_any_operation_keeps_the_file(tmp_path):
    path = tmp_path / "best.pt"
    save(path, 1)
    for number in range(count_operations(lambda: save(path, 1))):
        with (
            FaultyDisk(number, "error").installed() as full,
            pytest.raises(CheckpointError, match="No space left on device"),
        ):
            save(path, 2)
        is_moved = "move" in full.operations[:-1]  # then only the last flush failed
        assert version_found(path) == (2 if is_moved and number == len(full.operations) - 1 else 1)
        assert [child.name for child in tmp_path.iterdir()] == ["best.pt"]
        save(path, 1)


# What is left behind belongs to somebody.


def hidden(final: str, kind: Any) -> HiddenName:
    name = HiddenName.parse(hidden_sibling(Path(final), kind).name)
    assert name is not None
    return name


def leftover(path: Path) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"half")
    return path


def test_threads_that_ask_at_once_are_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them would take the other's unfinished save for that of a dead process, and delete it."""
    drawn = secrets.token_hex

    def slowly(size: int) -> str:
        time.sleep(0.05)
        return drawn(size)

    monkeypatch.setattr(layout, "_tokens", {})
    monkeypatch.setattr(secrets, "token_hex", slowly)
    with ThreadPoolExecutor(4) as threads:
        names = list(threads.map(lambda _: hidden("a", "partial"), range(4)))
    assert len({name.process for name in names}) == 1
    assert all(name.is_of_this_process for name in names)


def test_files_written_by_a_running_process_are_left_alone(tmp_path, monkeypatch):
    mine = leftover(hidden_sibling(tmp_path / "a", "partial"))
    theirs = leftover(tmp_path / f".a.{layout.this_host()}-{os.getppid()}-00000000-00000000.partial")
    save(tmp_path / "state", 1)
    assert mine.is_dir()
    assert theirs.is_dir()


@pytest.mark.parametrize(("seconds", "stays"), [(3500, True), (3700, False)])
def test_files_written_by_another_host_are_left_alone_for_an_hour(seconds, stays, tmp_path):
    path = leftover(tmp_path / ".a.0a0a0a0a-1-00000000-00000000.partial")
    for one in (path / "model.safetensors", path):
        os.utime(one, (time.time() - seconds,) * 2)
    save(tmp_path / "state", 1)
    assert path.exists() == stays


def test_files_left_by_a_dead_process_are_removed(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    path = leftover(tmp_path / f".a.{layout.this_host()}-{child.pid}-00000000-00000000.partial")
    save(tmp_path / "state", 1)
    assert not path.exists()


@pytest.mark.parametrize(
    "name",
    ["..a.partial", ".a.partial", ".a.0a0a0a0a-1-00000000-00000000.partial.bak", ".git", ".a.0A0A0A0A-1-x-y.old"],
)
def test_hidden_things_of_others_are_never_touched(name, tmp_path):
    (tmp_path / name).mkdir()
    save(tmp_path / "state", 1)
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("kind", ["partial", "replaced"])
@pytest.mark.parametrize("final", ["state", ".state", "a.b", "with space", "é", "a\nb", "..."])
def test_hidden_names_can_be_read_back(final, kind):
    name = hidden(final, kind)
    assert (name.final, name.kind, name.host, name.pid) == (final, kind, layout.this_host(), os.getpid())
    assert name.is_of_this_process
    assert hidden_sibling(Path(final), kind) != hidden_sibling(Path(final), kind)


def test_no_other_module_changes_the_disk():
    """Otherwise the tests above would not see everything."""
    names = "fsync|mkdir|remove|rename|replace|rmdir|touch|unlink|write_bytes|write_text"
    change = re.compile(rf"\b(?!disk\.|dataclasses\.)\w+\.({names})\(|(?<!os\.)\bopen\((?!.*\"rb\")")
    found = {file.name: change.findall(file.read_text()) for file in Path(disk.__file__).parent.glob("*.py")}
    assert len(found.pop("disk.py")) > 5
    assert not {name: calls for name, calls in found.items() if calls}
