"""When the power goes off at any moment of a save, the old state or the new one is on the disk, whole."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytorch_accelerated.checkpointing.publish import remove_state
from pytorch_accelerated.checkpointing.state_folder import read_state
from pytorch_accelerated.checkpointing.verify import find_state
from tests.chaos.power import RecordingDisk, by_dice, everything, nothing, restore
from tests.chaos.record import record
from tests.chaos.size import size
from tests.checkpointing.writing import write_state


def save(folder: Path, version: int) -> None:
    write_state(folder, {"version": version}, {"model": {"weight": torch.full((50,), float(version))}, "run": version})


def save_three_times_the_same(states: Path, report: Callable[[int], None]) -> None:
    for version in (1, 2, 3):
        save(states / "state", version)
        report(version)


def save_three_and_keep_one(states: Path, report: Callable[[int], None]) -> None:
    for version in (1, 2, 3):
        save(states / f"step_{version}", version)
        report(version)
        if version > 1:
            remove_state(states / f"step_{version - 1}")


@pytest.mark.parametrize("saves", [save_three_times_the_same, save_three_and_keep_one])
def test_the_power_may_go_off_after_any_operation(saves: Callable[[Path, Callable[[int], None]], None], tmp_path: Path):
    root = tmp_path / "disk"
    root.mkdir()
    recording = RecordingDisk(root)

    def report(version: int) -> None:
        recording.saves_reported = version

    with recording.installed():
        saves(root / "states", report)
    choices = [nothing, everything, *map(by_dice, range(size(2, 100)))]
    for number, (tree, reported) in enumerate(recording.moments):
        for index, choose in enumerate(choices):
            after = tmp_path / f"{number} {index}"
            restore(tree, after, choose)
            state = find_state(after / "states")
            if state is None:
                assert reported == 0
                continue
            facts, parts = read_state(state)
            version = facts["version"]
            assert version in (reported, reported + 1)
            assert parts["run"] == version
            assert torch.equal(parts["model"]["weight"], torch.full((50,), float(version)))
    figures = {
        "operations": len(recording.moments),
        "disks": len(recording.moments) * len(choices),
        "states lost": 0,
    }
    record(f"power loss, {saves.__name__.replace('_', ' ')}", figures)
