"""Changed, missing and foreign files: none is accepted, nothing in them is run, and trying changes nothing."""

import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError
from pytorch_accelerated.states.portable import load_portable, save_portable
from pytorch_accelerated.states.verify import find_state
from tests.chaos.record import record
from tests.chaos.saved_runs import everything_of, files_below, sign, trained
from tests.chaos.size import IS_RELEASE, size
from tests.checkpointing.same_state import assert_same_state
from tests.support.tool import run_tool

FLIPS = size(small=200, release=10_000)
CHANGES = size(small=400, release=10_000)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two states, ``step_2`` and ``step_4``, of one run."""
    states = tmp_path_factory.mktemp("saved")
    for epochs in (1, 2):
        trained(epochs).save_training_state(states / f"step_{2 * epochs}", {"note": "mine"})
    return states


@pytest.fixture
def states(saved: Path, tmp_path: Path) -> Path:
    """A copy of them, to be damaged."""
    return shutil.copytree(saved, tmp_path / "states")


@pytest.fixture(scope="module")
def other_trainer() -> Trainer:
    """With other values in every part. Refused states leave it as it is, so that all tests can share it."""
    return trained(1, seed=5)


# What a disk, or a copy that was interrupted, may do to a file: its content afterwards; None: it is gone.
DAMAGE: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "nothing": lambda content, other: b"",
    "one byte": lambda content, other: content[:1],
    "half": lambda content, other: content[: len(content) // 2],
    "all but one byte": lambda content, other: content[:-1],
    "a byte too many": lambda content, other: content + b"\0",
    "gone": lambda content, other: None,
    "the file of another state": lambda content, other: other,
}


def refuse_changes(states: Path, trainer: Trainer, changes: Any) -> None:
    """For each file and new content: loading names the file, and a run goes on from the other state with a warning."""
    before = everything_of(trainer)
    for file, content in changes:
        original = file.read_bytes()
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(InvalidCheckpointError) as caught:
            trainer.load_training_state(states / "step_4")
        assert str(file) in str(caught.value)
        with pytest.warns(UserWarning, match="Resuming from") as told:
            assert find_state(states) == states / "step_2"
        (warning,) = told
        assert str(file) in str(warning.message)
        file.write_bytes(original)
    assert_same_state(everything_of(trainer), before)
    assert find_state(states) == states / "step_4", "the files are not as they were"


def files_of(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    assert len(files) > 10
    return files


def test_no_flipped_bit_is_accepted(states: Path, other_trainer: Trainer) -> None:
    files, chance = files_of(states / "step_4"), random.Random(FLIPS)
    chosen = [files[number % len(files)] for number in range(FLIPS)]
    flips = ((file, flipped(content := file.read_bytes(), chance.randrange(8 * len(content)))) for file in chosen)
    refuse_changes(states, other_trainer, flips)
    record("flipped bits", {"flips": FLIPS, "states accepted": 0})


def test_no_damaged_file_is_accepted(states: Path, other_trainer: Trainer) -> None:
    changes = []
    for file in files_of(states / "step_4"):
        content, other = file.read_bytes(), (states / "step_2" / file.name).read_bytes()
        is_same = file.name == "manifest.json" or content == other
        changes += [(file, damage(content, content[1:] if is_same else other)) for damage in DAMAGE.values()]
    refuse_changes(states, other_trainer, changes)
    record("files of another length", {"ways, for each file": 5, "states accepted": 0})


# What nobody's run has written, with right checksums: nothing is executed, and kinds and shapes are checked first.


class Gadget:
    """Runs a command when it is unpickled."""

    def __init__(self, trap: str) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.trap}'",)


def put(folder: Path, file: str, content: bytes | str) -> None:
    (folder / file).unlink()
    (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)


def change(folder: Path, part: str, path: str, value: Any) -> None:
    """Put `value` at a place of a part's structure, which is given as keys and indices with slashes between."""
    structure = json.loads((folder / f"{part}.json").read_bytes())
    *parents, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    node = structure
    for step in parents:
        node = node[step]
    node[last] = value
    put(folder, f"{part}.json", json.dumps(structure))


def change_first_tensor(folder: Path, **changes: Any) -> None:
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    next(iter(header.values())).update(changes)
    text = json.dumps(header).encode()
    put(folder, "model.safetensors", len(text).to_bytes(8, "little") + text + data[end:])


def link(folder: Path, file: str) -> None:
    (folder / file).rename(folder.parent / file)
    (folder / file).symlink_to(folder.parent / file)


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(folder: Path, file: str) -> None:
    (folder / file).unlink()
    os.mkfifo(folder / file)


SIGNED: dict[str, Callable[[Path], Any]] = {
    "a structure that is not JSON": lambda folder: put(folder, "run.json", b"\x80\x04K\x01."),
    "a tensor of another part": lambda folder: change(folder, "run", "config", {"$": "tensor", "name": "0.weight"}),
    "a pickle as a structure": lambda folder: put(folder, "run.json", pickle.dumps(Gadget("trap"))),
    "a pickle as tensors": lambda folder: put(folder, "model.safetensors", pickle.dumps(Gadget("trap"))),
    "a tensor that claims a petabyte": lambda folder: change_first_tensor(
        folder, shape=[2**47], data_offsets=[0, 2**50]
    ),
    "weights that are whole numbers": lambda folder: change_first_tensor(folder, dtype="I64"),
    "weights of another shape": lambda folder: change_first_tensor(folder, shape=[3, 4]),
    "a model that is a list": lambda folder: put(folder, "model.json", "[]"),
    "a model with a number for a tensor": lambda folder: change(folder, "model", "items/0/1", 3),
    "a model too many": lambda folder: change(folder, "model", "items/0/0", "../../weight"),
    "an optimizer that is text": lambda folder: put(folder, "optimizer.json", '"adam"'),
    "a group that is a list": lambda folder: change(folder, "optimizer", "param_groups/0", []),
    "a function that nobody has": lambda folder: change(folder, "optimizer", "param_groups/0/lr", {"$": "live"}),
    "no run": lambda folder: put(folder, "run.json", "null"),
    "an unknown phase": lambda folder: change(folder, "run", "run_state/phase", "__class__"),
    "a generator of text": lambda folder: change(folder, "rank_0", "generators/torch", "x"),
    "numpy at a position far outside": lambda folder: change(folder, "rank_0", "generators/numpy/2", 10**6),
    "a generator with one number": lambda folder: change(folder, "rank_0", "generators/random/1", [1]),
}
UNSIGNED: dict[str, Callable[[Path], Any]] = {
    "a pickle as the manifest": lambda folder: put(folder, "manifest.json", pickle.dumps(Gadget("trap"))),
    "no checksum": lambda folder: put(folder, "manifest.json", '{"format": 1, "serial": 1, "facts": {}, "files": []}'),
    "a future format": lambda folder: sign(folder, format=2),
    "a part that is not listed": lambda folder: sign(folder, files=[]),
    "a file that is a link": lambda folder: link(folder, "model.safetensors"),
    "a file that is a folder": lambda folder: into_folder(folder / "model.json"),
    "a file that is a pipe": lambda folder: pipe(folder, "run.json"),
    "a manifest that is a pipe": lambda folder: pipe(folder, "manifest.json"),
}


@pytest.mark.parametrize("name", [*SIGNED, *UNSIGNED])
def test_foreign_folders_are_refused_and_change_nothing(
    name: str, states: Path, other_trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(states)
    folder = states / "step_4"
    {**SIGNED, **UNSIGNED}[name](folder)
    if name in SIGNED:
        sign(folder)
    files, state = files_below(states), everything_of(other_trainer)
    with pytest.raises(CheckpointError):
        other_trainer.load_training_state(folder)
    assert_same_state(everything_of(other_trainer), state)
    for command in ("list", "verify", "show"):
        assert run_tool("checkpoints", command, folder) in (0, 1, 2)
    assert files_below(states) == files
    record("hostile folders", {"folders": len(SIGNED) + len(UNSIGNED), "states accepted": 0, "programs started": 0})


def test_the_folders_above_are_refused_for_what_was_done_to_them(states: Path) -> None:
    sign(states / "step_4")
    trainer = trained(1, seed=5)
    trainer.load_training_state(states / "step_4")
    assert_same_state(everything_of(trainer)["model"], everything_of(trained(2))["model"])


# Single files.


def torch_saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def as_folder(data: bytes) -> bytes:
    """With the bit that marks the data of a tensor as a folder; its checksum still fits, and torch reads nothing."""
    changed = bytearray(data)
    start = data.index(b"PK\x01\x02")
    while data[start + 46 : start + 46 + 14].find(b"/data/0") < 0:
        start = data.index(b"PK\x01\x02", start + 1)
    changed[start + 38] |= 0x10
    return bytes(changed)


FILES: dict[str, Callable[[], bytes]] = {
    "the bit of a folder": lambda: as_folder(torch_saved({"a": torch.arange(4.0)})),
    "an object of a class": lambda: torch_saved({"a": Gadget("trap")}),
    "a plain pickle": lambda: pickle.dumps({"a": Gadget("trap")}, 2),
    "nothing": lambda: b"",
    "half a file": lambda: (whole := torch_saved({"a": torch.arange(4.0)}))[: len(whole) // 2],
    "all but one byte": lambda: torch_saved({"a": torch.arange(4.0)})[:-1],
    "a list": lambda: torch_saved([1, 2]),
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_files_are_refused_and_nothing_is_run(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.pt").write_bytes(FILES[name]())
    with pytest.raises(InvalidCheckpointError):
        load_portable(tmp_path / "file.pt")
    assert os.listdir(tmp_path) == ["file.pt"]


@pytest.mark.parametrize("writer", ["ours", "torch's"])
def test_a_changed_file_is_refused_or_holds_the_same(writer: str, tmp_path: Path) -> None:
    """Checksums cover the contents, but not all that describes them, such as the time of a record."""
    path = tmp_path / "model.pt"
    contents = {"weight": torch.arange(4.0), "half": torch.ones(3, dtype=torch.float16), "epoch": 7}
    save_portable(path, contents) if writer == "ours" else torch.save(contents, path)
    data = path.read_bytes()
    chance = random.Random(CHANGES)
    bits = list(range(8 * len(data))) if IS_RELEASE else chance.sample(range(8 * len(data)), CHANGES)
    refused = 0
    for bit in bits:
        changed = bytearray(flipped(data, bit))
        if bit % 5 == 0:
            start, other = chance.randrange(len(data)), chance.randrange(len(data))
            changed[start : start + 8] = data[other : other + 8]
        path.write_bytes(changed)
        try:
            torch.testing.assert_close(load_portable(path), contents, rtol=0, atol=0)
        except InvalidCheckpointError:
            refused += 1
    assert refused > len(bits) / 3
    record(f"changed files of {writer}", {"changes": len(bits), "other contents accepted": 0})


def test_no_flipped_bit_of_stored_predictions_is_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "predictions"
    stored = trained(1).predict((torch.ones(5, 3, dtype=torch.float64),), output_path=folder)
    bits = [(file, bit) for file in sorted(folder.iterdir()) for bit in range(8 * file.stat().st_size)]
    chosen = bits if IS_RELEASE else random.Random(3).sample(bits, size(small=300, release=0))

    def read() -> Any:
        found = type(stored)(folder)
        return found.load(), list(found.blocks(block_bytes=40))

    assert len(read()[0]) == 5
    for file, bit in chosen:
        content = file.read_bytes()
        file.write_bytes(flipped(content, bit))
        with pytest.raises(InvalidCheckpointError):
            read()
        file.write_bytes(content)
    record("flipped bits of stored predictions", {"flips": len(chosen), "stores accepted": 0})
