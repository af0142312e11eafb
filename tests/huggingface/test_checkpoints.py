"""The folders ``checkpoint-<step>``: the last, and those that go."""

import os
from pathlib import Path

import pytest

from pytorch_accelerated.huggingface.trainer_utils import (
    checkpoint_name,
    get_last_checkpoint,
    rotate_checkpoints,
    sort_checkpoints,
)
from tests.support.states import begin


def save(folder: Path, *steps: int) -> None:
    """Complete checkpoints, one after the other, each with a manifest."""
    for step in steps:
        staged = begin(folder / checkpoint_name(step))
        staged.commit({}, staged.write_files([("trainer_state.json", [b"{}"])]))


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.iterdir())


def test_the_last_checkpoint_has_the_highest_number(tmp_path: Path) -> None:
    assert get_last_checkpoint(tmp_path) is None
    assert get_last_checkpoint(tmp_path / "missing") is None
    for name in ("checkpoint-2", "checkpoint-10", "checkpoint-x", "my-checkpoint-30", "checkpoint-40.bak", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-50").write_text("a file")
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("limit", [-1, 0, 1, 2, 3, 5])
@pytest.mark.parametrize("best", [None, 5, 10, 25])
def test_the_same_checkpoints_stay_as_with_transformers(limit: int, best: int | None, tmp_path: Path) -> None:
    from transformers.trainer_utils import rotate_checkpoints as genuine_rotation

    left = {}
    for name, rotate in (("ours", rotate_checkpoints), ("theirs", genuine_rotation)):
        folder = tmp_path / name
        save(folder, 5, 10, 15, 20, 25)
        rotate(str(folder), limit, None if best is None else str(folder / checkpoint_name(best)))
        left[name] = steps_in(folder)
    assert left["ours"] == left["theirs"]
    assert {25, best or 25} <= set(left["ours"])


def test_the_newest_is_what_was_saved_last_whatever_its_number_and_never_without_a_manifest(tmp_path: Path) -> None:
    for step in (40, 9):
        (tmp_path / checkpoint_name(step)).mkdir()
    save(tmp_path, 10, 20, 30)  # an earlier run
    save(tmp_path, 5)  # the first checkpoint of a new one
    order = [os.path.basename(path) for path in sort_checkpoints(tmp_path)]
    assert order[:2] == ["checkpoint-9", "checkpoint-40"]
    assert order[-1] == "checkpoint-5"
    rotate_checkpoints(tmp_path, 2)
    assert steps_in(tmp_path) == [5, 30]


def test_the_best_is_found_by_any_spelling_of_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "out", 5, 10, 15)
    monkeypatch.chdir(tmp_path)
    rotate_checkpoints("out", 1, tmp_path / "out" / ".." / "out" / "checkpoint-5")
    assert steps_in(tmp_path / "out") == [5, 15]
