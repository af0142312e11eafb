"""Each rank gets its own states of callbacks and histories back, and equal states are stored once."""

import json
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.states.state_folder import read_state
from tests.support.processes import run_forked, run_on_ranks

SCRIPT = Path(__file__).parents[1] / "ranks" / "rank_differences.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A folder with the state of two ranks, and how the whole run ended on each."""
    folder = tmp_path_factory.mktemp("ranks")
    output = run_on_ranks(SCRIPT, 2, folder, "save")
    return folder, [json.loads(lines.splitlines()[-1]) for lines in output.stdout_of_ranks]


def test_each_rank_gets_its_own_state_and_history_back(saved: tuple[Path, list[Any]]) -> None:
    folder, whole = saved
    resumed = run_on_ranks(SCRIPT, 2, folder, "resume")
    assert [json.loads(lines.splitlines()[-1]) for lines in resumed.stdout_of_ranks] == whole
    first, second = whole
    assert first["states"]["Mine"]["sums"]["inputs"] != second["states"]["Mine"]["sums"]["inputs"]
    assert first["mine"] != second["mine"]
    assert "OfLastRank" not in first["states"]
    assert second["states"]["OfLastRank"] == second["states"]["Mine"]


def test_equal_parts_are_stored_once(saved: tuple[Path, list[Any]]) -> None:
    _, parts = read_state(saved[0] / "state")
    assert not {"callbacks", "history"} & parts["rank_0"].keys()
    own = parts["rank_1"]["callbacks"]
    assert [path for path, _ in own["Mine"]] == [["sums", "inputs"], ["rows"], ["seen"]]
    assert [path for path, _ in own["OfLastRank"]] == [[]]
    (average,) = (difference for key, difference in own.items() if key.startswith("ModelEma"))
    # Of an average only the statistics, which each rank has for itself.
    assert {path[-1] for path, _ in average} <= {
        "module.1.running_mean",
        "module.1.running_var",
        "1.running_mean",
        "1.running_var",
    }
    assert not any(key.startswith("Shared") for key in own)
    assert [path for path, _ in parts["rank_1"]["history"]] == [["records", "table"]]


def test_another_number_of_ranks_loads_the_first_ones_and_says_so(saved: tuple[Path, list[Any]]) -> None:
    folder, whole = saved
    resumed = run_forked(SCRIPT, folder, "resume")
    assert "different states of Mine, ModelEmaCallback" in resumed.stderr
    words = "OfLastRank, the run history. With another number (1) each of them loads those of the first one"
    assert words in resumed.stderr
    assert json.loads(resumed.stdout.splitlines()[-1])["mine"][:3] == whole[0]["mine"][:3]
