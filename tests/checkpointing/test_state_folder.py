import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.states.layout import FileEntry
from pytorch_accelerated.states.publish import begin
from pytorch_accelerated.states.state_folder import read_state
from pytorch_accelerated.states.verify import find_state, list_states
from tests.checkpointing.same_state import assert_same_state
from tests.checkpointing.writing import write_state

STATE: dict[str, Any] = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "run": {"updates": 3, "best": math.inf}}


def entries_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_state_comes_back_with_its_facts_or_only_the_parts_asked_for(tmp_path):
    facts = {"updates": 3, "value": math.nan, "shape": (2, 3)}
    write_state(tmp_path / "state", facts, STATE)
    found_facts, found = read_state(tmp_path / "state")
    assert_same_state(found_facts, facts)
    assert_same_state(found, STATE)
    (tmp_path / "state" / "model.safetensors").write_bytes(b"damaged")
    assert read_state(tmp_path / "state", ["run"])[1] == {"run": STATE["run"]}


def test_a_value_that_cannot_be_stored_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"callbacks\.hook is a builtins\.function"):
        write_state(tmp_path / "new" / "state", {}, {**STATE, "callbacks": {"hook": lambda: None}})
    assert entries_of(tmp_path) == set()


def test_facts_that_a_manifest_cannot_hold_leave_the_previous_state(tmp_path):
    write_state(tmp_path / "state", {"updates": 1}, STATE)
    with pytest.raises(CheckpointError, match="facts"):
        write_state(tmp_path / "state", {"a": {1, 2}}, STATE)
    assert entries_of(tmp_path) == {"state"}
    assert read_state(tmp_path / "state")[0] == {"updates": 1}


@pytest.mark.parametrize("content", ["a file", "a folder of a user"])
def test_a_folder_that_is_not_a_state_is_not_replaced(content, tmp_path):
    target = tmp_path / "target"
    if content == "a file":
        target.write_text("thesis")
    else:
        target.mkdir()
        (target / "thesis.txt").write_text("thesis")
    with pytest.raises(CheckpointError, match="not a training state"):
        write_state(target, {}, STATE)
    assert (target if target.is_file() else target / "thesis.txt").read_text() == "thesis"
    assert entries_of(tmp_path) == {"target"}


def test_the_newest_state_is_the_one_that_was_saved_last(tmp_path):
    """Not the one with most updates: after going back to an older state, the new branch counts."""
    for name, updates in [("step_1", 1), ("step_3", 3), ("step_2", 2)]:
        write_state(tmp_path / name, {"updates": updates}, STATE)
    assert find_state(tmp_path) == tmp_path / "step_2"
    write_state(tmp_path / "step_1", {"updates": 1}, STATE)
    assert find_state(tmp_path) == tmp_path / "step_1"
    assert [folder.name for folder, _ in list_states(tmp_path)] == ["step_3", "step_2", "step_1"]


def test_a_file_that_the_publishing_rank_cannot_see_is_an_error(tmp_path):
    staged = begin(tmp_path / "state")
    files = staged.write_files([("rank_0.json", [b"1"])])
    with pytest.raises(CheckpointError, match=r"cannot see rank_1\.json there.*all machines share"):
        staged.commit({}, [*files, FileEntry("rank_1.json", 1, "0" * 64)])
    staged.abort()
    staged.abort()
    assert entries_of(tmp_path) == set()
