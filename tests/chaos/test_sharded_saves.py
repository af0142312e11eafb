"""A rank that dies while two of them save the parts that they have of a model: what was saved before is still there."""

import shutil
from pathlib import Path

import pytest

from pytorch_accelerated.checkpointing.publish import sweep
from pytorch_accelerated.checkpointing.state_folder import read_state
from pytorch_accelerated.checkpointing.verify import find_state
from tests.chaos.record import record
from tests.chaos.size import IS_RELEASE
from tests.support.processes import run_on_ranks
from tests.support.resuming import assert_same

DYING = Path(__file__).parents[1] / "ranks" / "dying_in_save.py"
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.processes
def test_a_rank_that_dies_while_it_saves_its_part_leaves_the_state_before(tmp_path: Path):
    output = run_on_ranks(DYING, 2, tmp_path / "whole", -1, 0, cwd=REPOSITORY)
    operations = [int(text) for text in output.stdout_of_ranks]
    _, expected = read_state(tmp_path / "whole" / "first")
    assert find_state(tmp_path / "whole") == tmp_path / "whole" / "second"
    deaths = [(rank, number) for rank in (0, 1) for number in range(operations[rank])]
    if not IS_RELEASE:
        deaths = [(1, operations[1] - 1), (0, operations[0] // 2)]
    for rank, number in deaths:
        folder = tmp_path / f"{rank}_{number}"
        with pytest.raises(AssertionError, match="SIGKILL"):
            run_on_ranks(DYING, 2, folder, rank, number, cwd=REPOSITORY)
        state = find_state(folder)
        assert state is not None
        assert_same(dict(read_state(state)[1]["model"]), dict(expected["model"]), str(folder))
        sweep(folder, now=0.0)
        assert {path.name for path in folder.iterdir()} <= {"first", "second"}
        shutil.rmtree(folder)
    record("rank killed while it saves a part of a model", {"deaths": len(deaths), "states lost": 0})
