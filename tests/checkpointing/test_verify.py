"""Damaged and hostile folders: nothing in them is trusted, nothing beside them is touched."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.checkpointing import layout
from pytorch_accelerated.checkpointing.state_folder import read_state, write_state
from pytorch_accelerated.checkpointing.verify import find_state, newest_valid, read_manifest, verify
from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError

FILES = ["manifest.json", "model.json", "model.safetensors", "run.json", "run.safetensors"]


def save(folder: Path, updates: int = 1) -> Path:
    write_state(
        folder,
        {"updates": updates, "value": 0.25},
        {"model": {"weight": torch.arange(5.0)}, "run": {"updates": updates, "name": "é"}},
    )
    return folder


def expect_refusal(folder: Path, file: str) -> None:
    """Neither checking nor reading the state succeeds, and both say which file it was."""
    with pytest.raises(InvalidCheckpointError) as caught:
        verify(folder)
    assert f"{folder / file} " in str(caught.value)
    with pytest.raises(InvalidCheckpointError) as caught:
        read_state(folder)
    assert f"{folder / file} " in str(caught.value)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_at_any_byte_is_noticed(file, tmp_path):
    path = save(tmp_path / "state") / file
    content = path.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        path.write_bytes(changed)
        expect_refusal(tmp_path / "state", file)
    path.write_bytes(content)
    assert verify(tmp_path / "state").facts == {"updates": 1, "value": 0.25}


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_another_length_is_noticed(file, tmp_path):
    path = save(tmp_path / "state") / file
    content = path.read_bytes()
    for changed in (b"", content[:1], content[: len(content) // 2], content[:-1], content + b"\n", content * 2):
        path.write_bytes(changed)
        expect_refusal(tmp_path / "state", file)


def delete(path: Path) -> None:
    path.unlink()


def make_link(path: Path) -> None:
    path.rename(path.with_name("copy"))
    path.symlink_to(path.with_name("copy"))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [delete, make_link, make_folder, make_pipe])
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_no_plain_file_is_noticed(file, damage, tmp_path):
    damage(save(tmp_path / "state") / file)
    expect_refusal(tmp_path / "state", file)


def test_all_damaged_files_are_named(tmp_path):
    folder = save(tmp_path / "state")
    (folder / "model.json").write_text("{}")
    (folder / "run.safetensors").unlink()
    with pytest.raises(InvalidCheckpointError) as caught:
        verify(folder)
    assert "model.json has 2 bytes; its manifest says" in str(caught.value)
    assert "run.safetensors cannot be read: No such file" in str(caught.value)
    assert "model.safetensors" not in str(caught.value)


def test_parts_of_different_saves_do_not_mix(tmp_path):
    save(tmp_path / "old", 1)
    save(tmp_path / "new", 2)
    shutil.copy(tmp_path / "old" / "run.json", tmp_path / "new" / "run.json")
    with pytest.raises(InvalidCheckpointError, match=r"run\.json was changed"):
        verify(tmp_path / "new")


def test_files_that_the_manifest_does_not_list_are_ignored(tmp_path):
    folder = save(tmp_path / "state")
    (folder / "notes.txt").write_text("a good one")
    (folder / "code.json").write_text("not json")
    (folder / "folder").mkdir()
    verify(folder)
    assert set(read_state(folder)[1]) == {"model", "run"}


def test_a_copied_state_is_as_good(tmp_path):
    shutil.copytree(save(tmp_path / "state"), tmp_path / "copy")
    assert read_state(tmp_path / "copy")[0] == {"updates": 1, "value": 0.25}


# Falling back.


@pytest.mark.parametrize(
    "damage", [delete, make_link, lambda path: path.write_bytes(b"x")], ids=["gone", "link", "short"]
)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_newest_state_is_skipped_with_one_warning(file, damage, tmp_path):
    for updates in (1, 2, 3):
        save(tmp_path / f"step_{updates}", updates)
    damage(tmp_path / "step_3" / file)
    with pytest.warns(UserWarning, match="Going on from") as warned:
        assert newest_valid(tmp_path) == tmp_path / "step_2"
    (warning,) = warned
    assert str(tmp_path / "step_2") in str(warning.message).splitlines()[0]
    assert str(tmp_path / "step_3" / file) in str(warning.message)


def test_a_damaged_older_state_is_not_even_read(tmp_path):
    for updates in (1, 2):
        save(tmp_path / f"step_{updates}", updates)
    (tmp_path / "step_1" / "model.safetensors").write_bytes(b"x")
    assert newest_valid(tmp_path) == tmp_path / "step_2"


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
    assert newest_valid(place) is None


def test_a_state_that_was_named_itself_is_not_replaced_by_another_one(tmp_path):
    for updates in (1, 2):
        save(tmp_path / f"step_{updates}", updates)
    assert find_state(tmp_path / "step_1") == tmp_path / "step_1"
    (tmp_path / "step_2" / "run.json").unlink()
    with pytest.raises(InvalidCheckpointError, match=r"step_2 is damaged"):
        find_state(tmp_path / "step_2")


def test_a_file_is_no_place_to_resume_from(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="load_checkpoint"):
        find_state(tmp_path / "model.pt")


def test_reading_changes_nothing_on_the_disk(tmp_path):
    for updates in (1, 2):
        save(tmp_path / f"step_{updates}", updates)
    (tmp_path / "step_2" / "run.json").write_text("{}")
    before = {path: path.lstat() for path in sorted(tmp_path.rglob("*"))}
    with pytest.warns(UserWarning, match="skipped"):
        folder = find_state(tmp_path)
    assert folder is not None
    read_state(folder)
    after = {path: path.lstat() for path in sorted(tmp_path.rglob("*"))}
    assert {path: (one.st_mtime_ns, one.st_size) for path, one in after.items()} == {
        path: (one.st_mtime_ns, one.st_size) for path, one in before.items()
    }


# Manifests with a correct checksum and hostile content.

ENTRY = {"name": "model.json", "size_bytes": 2, "sha256": "0" * 64}


def content(**changes: Any) -> dict[str, Any]:
    return {"format": 1, "serial": 1, "facts": {}, "files": [ENTRY], **changes}


NAMES = ["../model.json", "/etc/passwd", "a/b", "..", ".", "", "a\0", "C:\\x", "~", "manifest.json", 3, None]
HOSTILE: dict[str, Any] = {
    "a list": [],
    "nothing": {},
    "no files": {"format": 1, "serial": 1, "facts": {}},
    "an older format": content(format=0),
    "a format that is text": content(format="1"),
    "a format that is true": content(format=True),
    "a negative serial": content(serial=-1),
    "a serial that is text": content(serial="1"),
    "a serial that is a fraction": content(serial=1.5),
    "facts that are a list": content(facts=[]),
    "facts with a tensor": content(facts={"a": {"$": "tensor", "name": "x"}}),
    "facts of an unknown kind": content(facts={"a": {"$": "call", "name": "os.system"}}),
    "files that are a dict": content(files={"model.json": ENTRY}),
    "files that are names": content(files=["model.json"]),
    "a file twice": content(files=[ENTRY, ENTRY]),
    "a field too many": content(files=[{**ENTRY, "mode": 0o777}]),
    "a negative size": content(files=[{**ENTRY, "size_bytes": -2}]),
    "a size that is text": content(files=[{**ENTRY, "size_bytes": "2"}]),
    "a size that is true": content(files=[{**ENTRY, "size_bytes": True}]),
    "a short checksum": content(files=[{**ENTRY, "sha256": "00"}]),
    "a checksum that is a number": content(files=[{**ENTRY, "sha256": 0}]),
    **{f"the name {name!r}": content(files=[{**ENTRY, "name": name}]) for name in NAMES},
}


def write_manifest(folder: Path, value: Any) -> None:
    signed = layout._with_checksum(value) if isinstance(value, dict) else json.dumps(value).encode()
    (folder / "manifest.json").write_bytes(signed)


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_hostile_manifests_are_refused(value, tmp_path):
    folder = save(tmp_path / "state")
    write_manifest(folder, value)
    expect_refusal(folder, "manifest.json")


def test_the_manifests_above_are_refused_for_what_they_say():
    """With other content, the same way of writing them gives a valid one."""
    manifest = layout.parse_manifest(layout._with_checksum(content()), what="it")
    assert manifest == layout.Manifest(1, {}, (layout.FileEntry(**ENTRY),))  # type: ignore[arg-type]


def test_a_newer_format_asks_for_an_update(tmp_path):
    folder = save(tmp_path / "state")
    write_manifest(folder, content(format=2))
    with pytest.raises(InvalidCheckpointError, match=r"has format 2.*reads up to 1.*Update"):
        read_manifest(folder)


def test_pickles_under_our_names_are_never_run(tmp_path):
    trap = tmp_path / "trap"
    gadget = b"cos\nsystem\n(S'touch " + str(trap).encode() + b"'\ntR."
    for file in FILES:
        folder = save(tmp_path / f"state_{file}")
        (folder / file).write_bytes(gadget)
        if file != "manifest.json":
            resign(folder)
            verify(folder)  # so that it is the reader that has to refuse
        with pytest.raises(InvalidCheckpointError):
            read_state(folder)
    assert not trap.exists()


def resign(folder: Path) -> None:
    """Make the manifest fit the files, whatever they are."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    for entry in manifest["files"]:
        data = (folder / entry["name"]).read_bytes()
        entry.update(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    write_manifest(folder, manifest)


def swap(folder: Path) -> None:
    (folder / "model.json").write_bytes((folder / "run.json").read_bytes())
    (folder / "run.json").write_text('{"$":"tensor","name":"weight"}')


CONSISTENT_BUT_WRONG: dict[str, Callable[[Path], object]] = {
    "a tensor in another part": swap,
    "too large a structure": lambda folder: (folder / "run.json").write_bytes(b" " * (2**24 + 1)),
    "deep nesting": lambda folder: (folder / "run.json").write_bytes(b"[" * 10**6),
    "a cut tensor file": lambda folder: (folder / "run.safetensors").write_bytes(b"\x02"),
    "an empty tensor file": lambda folder: (folder / "run.safetensors").write_bytes(b""),
    "an empty structure": lambda folder: (folder / "run.json").write_bytes(b""),
}


@pytest.mark.parametrize("change", CONSISTENT_BUT_WRONG.values(), ids=CONSISTENT_BUT_WRONG)
def test_files_that_fit_their_manifest_but_make_no_sense_are_refused(change, tmp_path):
    folder = save(tmp_path / "state")
    change(folder)
    resign(folder)
    with pytest.raises(InvalidCheckpointError):
        read_state(folder)


def test_a_folder_of_somebody_else_does_not_disturb(tmp_path, monkeypatch):
    save(tmp_path / "state")
    (tmp_path / "lost+found").mkdir()
    iterdir = Path.iterdir

    def guarded(path: Path) -> Any:
        if path.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", guarded)
    assert newest_valid(tmp_path) == tmp_path / "state"
