"""Two processes give what one gives."""

from pathlib import Path

import pytest
import torch

from tests.support.processes import REPOSITORY, run_forked, run_on_ranks
from tests.support.resuming import assert_same

SCRIPT = REPOSITORY / "tests" / "ranks" / "huggingface.py"


@pytest.mark.processes
def test_two_processes_evaluate_predict_and_resume_as_one(tmp_path: Path) -> None:
    run_forked(SCRIPT, tmp_path)
    output = run_on_ranks(SCRIPT, 2, tmp_path)
    assert output.stdout.count("done") == 2
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert_same(first, second)
    assert len(one["exact"]) == 11
    assert_same(first["exact"], one["exact"])
    torch.testing.assert_close(first["rounded"], one["rounded"], rtol=1e-5, atol=1e-6)


@pytest.mark.processes
def test_a_flag_of_one_process_is_one_of_all(tmp_path: Path) -> None:
    assert run_on_ranks(SCRIPT.with_name("huggingface_flags.py"), 2, tmp_path).stdout.count("done") == 2
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for case, (by_one, by_both) in ranks[0].items():
        assert_same(by_one, by_both, case)
    assert_same(ranks[0], ranks[1])


@pytest.mark.processes
def test_the_processes_are_grouped_as_the_arguments_say_and_the_first_one_alone_writes_and_prints(
    tmp_path: Path,
) -> None:
    output = run_on_ranks(SCRIPT.with_name("huggingface_parallel.py"), 2, tmp_path)
    assert output.stdout.count("done") == 2
    tables = [text.count("metrics *****") for text in output.stdout_of_ranks]
    assert sorted(tables) == [0, 1]
    assert "***** rank-0 metrics *****\n  rank = 0\n" in output.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("fsdp", 2),  # a model in pieces trains as a whole one
        ("signals", 1),  # a signal leaves a checkpoint to resume from
        ("signals", 2),
        ("theirs", 2),  # where rows do not divide, our loss on two processes is exact and theirs is not
    ],
)
def test_what_a_script_shows_by_itself_is_so(script: str, ranks: int, tmp_path: Path) -> None:
    output = run_on_ranks(SCRIPT.with_name(f"huggingface_{script}.py"), ranks, tmp_path)
    assert output.stdout.count("done") == ranks
