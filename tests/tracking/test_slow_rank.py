"""Where ranks spent their time, in step records."""

from pathlib import Path

import torch

from pytorch_accelerated.record.step_records import records_of, table_of
from pytorch_accelerated.tracking import InMemoryRunHistory, RankTimes, SlowRank, StepRecord
from tests.support.processes import run_on_ranks


def test_a_slow_rank_is_named_in_the_output_the_result_and_the_report(tmp_path: Path) -> None:
    first, *others = run_on_ranks(Path(__file__).parents[1] / "ranks/slow_rank.py", 3, tmp_path).stdout_of_ranks
    sentence = others[0].strip()
    assert sentence.endswith("% of the time for rank 1 (computation)")
    assert first.count(sentence) == 2  # the script's, and that of the table


def record(update: int, *slow: int, epoch: int = 1, rates: int = 1, ranks: int = 3) -> StepRecord:
    times = [RankTimes(9.0, 1.0, 0.0) if rank in slow else RankTimes(4.0, 1.0, 5.0) for rank in range(ranks)]
    return StepRecord(epoch, update, 8 * update, 0.5 * update, 0.1, (0.1,) * rates, None, 16.0, 0.1, 7, tuple(times))


def slow_rank(*records: StepRecord) -> SlowRank | None:
    history = InMemoryRunHistory()
    for each in records:
        history.add_step_record(each)
    return history.slow_rank


def test_a_rank_is_named_if_the_others_wait_for_it_all_the_time() -> None:
    assert record(1, 2).slow_rank == SlowRank(2, 0.5, "computation")
    on_gpus = RankTimes(6.0, 4.0, 0.0), RankTimes(9.0, 1.0, 0.0)
    assert record(1)._replace(ranks=on_gpus).slow_rank == (0, 0.3, "data")
    assert record(1, 0, 1, 2).slow_rank is record(1, ranks=0).slow_rank is slow_rank() is None
    assert slow_rank(*(record(update, 2) for update in range(1, 20))) is None  # fewer than 20 updates
    assert slow_rank(*(record(update, 2) for update in range(1, 21))) == (2, 0.5, "computation")
    assert slow_rank(*(record(update, update % 3) for update in range(1, 41))) is None  # another one each time
    assert slow_rank(*(record(update, 2) if update > 20 else record(update) for update in range(1, 41))) is None
    of_last_epoch = [record(update, 2, epoch=2) for update in range(31, 61)]
    assert slow_rank(*(record(update) for update in range(1, 31)), *of_last_epoch) == (2, 0.5, "computation")
    assert slow_rank(*(record(update, 2, epoch=update) for update in range(1, 41))) == (2, 0.5, "computation")
    assert slow_rank(*(record(update, 1, ranks=2 + update // 20) for update in range(1, 31))) is None


def test_saved_records_have_the_times_of_ranks_and_older_tables_load() -> None:
    records = [record(1, 2), record(2, rates=3, ranks=0), record(3, 0, rates=2, ranks=5)]
    assert records_of(table_of(records)) == records
    older = [each._replace(ranks=()) for each in records]
    table = torch.zeros(3, 14, dtype=torch.float64)  # as version 1.1 began: 11 columns, and three of learning rates
    for row, each in zip(table, older, strict=True):
        numbers = [*each[:5], 0, 0, *each[7:10], len(each.learning_rates), *each.learning_rates]
        row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    assert records_of(table) == older
    assert torch.equal(table_of(older), table)
    assert "ranks" not in records[0].columns()
