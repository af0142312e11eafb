"""Mixtures keep their proportions in every part of an epoch, and batches by tokens keep within them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pytorch_accelerated.data import Mixture, TokenBatches
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from tests.chaos.size import some
from tests.support.mixing import (
    LENGTHS,
    LoggingMixture,
    by_tokens,
    check_every_resume,
    check_on_ranks,
    mixed,
    token_batches,
)
from tests.support.processes import run_on_ranks
from tests.support.resuming import assert_same
from tests.support.rows import SEED, trainer_of

SCRIPT = Path(__file__).parents[1] / "ranks" / "mixing.py"
weights_of_sets = st.lists(st.integers(1, 1000) | st.floats(0.01, 10), min_size=1, max_size=9)


# ------------------------------------------------------------------------------------------------------------ mixtures


def datasets_of(order: Sequence[int], lengths: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.searchsorted(np.cumsum(lengths), order, side="right")


@settings(deadline=None)
@given(weights=weights_of_sets, rows=st.integers(1, 3000), seed=st.integers(0, 9))
# The turn of the set that lags behind most would be more than a row behind here.
@example(weights=[5, 194, 3, 35, 1, 27, 1, 990, 990, 1], rows=3000, seed=0)
@example(weights=[0.7, 0.2, 0.1], rows=25, seed=0)
# Six shares are rounded in the same direction, which the largest pays for.
@example(weights=[1, 1, 1, 1, 1, 509, 1.0822048401655169, 3.4375], rows=1, seed=0)
def test_every_prefix_has_each_share_to_less_than_a_row(weights: list[float], rows: int, seed: int) -> None:
    lengths = [7 + 5 * number for number in range(len(weights))]
    mixture = Mixture([range(length) for length in lengths], weights, rows=rows)
    order = mixture.order(seed=seed, epoch=1)
    assert (len(order), order.dtype) == (rows, torch.int64)
    number_of_each = datasets_of(order.tolist(), lengths)
    # Each is rounded by half a step at most, and so their sum by half a step for each.
    largest_error = (len(weights) + 1) / 2 * 2**-20
    assert mixture.weights == pytest.approx([weight / sum(weights) for weight in weights], abs=largest_error, rel=0)
    for number, weight in enumerate(mixture.weights):
        given_ = np.cumsum(number_of_each == number)
        assert np.abs(given_ - weight * np.arange(1, rows + 1)).max() < 1 + 1e-6
        own = order[torch.from_numpy(number_of_each == number)]
        for part in own.split(lengths[number]):  # each pass over a set has no row twice
            assert len(part.unique()) == len(part)


@settings(deadline=None)
@given(weights=weights_of_sets, lengths=st.lists(st.integers(1, 60), min_size=9, max_size=9))
def test_an_epoch_ends_before_the_first_repetition(weights: list[float], lengths: list[int]) -> None:
    sets = [range(length) for length in lengths[: len(weights)]]
    rows = Mixture(sets, weights).rows
    order = Mixture(sets, weights, rows=rows + 1).order(seed=0, epoch=0).tolist()
    assert len(set(order[:rows])) == rows
    counts = np.bincount(datasets_of(order, lengths[: len(weights)]), minlength=len(sets))
    assert (counts > [len(each) for each in sets]).any()


def test_orders_differ_by_seed_and_epoch_and_not_otherwise() -> None:
    mixture, again = LoggingMixture(), LoggingMixture()
    orders = [mixture.order(seed=seed, epoch=epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert again.order(seed=1, epoch=0).tolist() == orders[2]
    # A pass over a set that is used up does not repeat the one before.
    own = [row for row in LoggingMixture(rows=400).order(seed=0, epoch=0).tolist() if 19 <= row < 23]
    assert len({tuple(own[start : start + 4]) for start in range(0, 80, 4)}) > 5


def test_as_a_dataset_it_has_the_rows_of_all_sets_in_turn() -> None:
    class Many(Dataset[int]):
        asked: list[int] = []

        def __len__(self) -> int:
            return 3

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.asked.append(len(indices))
            return [100 + index for index in indices]

    mixture = Mixture([torch.arange(4), Many(), ["a", "b"]], [1, 1, 1])
    assert mixture.__getitems__([5, 0, 8, 4, 3]) == [101, 0, "b", 100, 3]
    assert Many.asked == [2]
    assert [mixture[index] for index in range(len(mixture))] == [0, 1, 2, 3, 100, 101, 102, "a", "b"]
    assert mixture[-1] == "b"
    assert (mixture.rows, Mixture([range(5), range(10)], [5, 10]).rows) == (8, 15)


def test_evaluations_read_each_row_once() -> None:
    trainer = trainer_of()
    together = trainer.evaluate(data := LoggingMixture(), per_device_batch_size=32)["evaluation_loss"]
    assert sorted(data.log[-32:]) == list(range(32))
    loader = DataLoader(LoggingMixture(), batch_size=32)
    assert trainer.evaluate(loader)["evaluation_loss"] == together


def test_a_mixture_is_the_same_with_workers_and_resumes_at_every_update(tmp_path: Path) -> None:
    whole = mixed()
    same = mixed(train_dataloader_kwargs={"num_workers": 2})
    assert_same(same.model.state_dict(), whole.model.state_dict())
    check_every_resume(mixed, tmp_path, whole)


def test_a_run_leaves_rows_of_a_mixture_out_as_of_any_dataset() -> None:
    trainer = trainer_of()
    trainer.train(data := LoggingMixture(), 2, per_device_batch_size=4, leave_out={"rows": [20, 3]})
    expected = [row for row in data.order(seed=SEED, epoch=0).tolist() if row not in (20, 3)]
    rows = [row for update in range(1, 5) for row in trainer.rows_of(update)]
    assert rows == expected[:16]


@pytest.mark.processes
@pytest.mark.parametrize("ranks", some([1, 3], [1, 2, 3]))
def test_rows_and_runs_are_those_of_the_orders_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    check_on_ranks() if ranks == 1 else run_on_ranks(SCRIPT, ranks, tmp_path)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("sets", "weights", "error", "words"),
    [
        ([range(3)], [1, 2], ConfigurationError, "1 datasets to mix, and 2 weights"),
        ([], [], ConfigurationError, "0 datasets to mix"),
        ([range(3), range(3)], [1, 0], ConfigurationError, "weight 0 is not a number above 0"),
        ([range(3), range(3)], [1, "2"], ConfigurationError, "weight '2' is not"),
        ([range(3), []], [1, 1], ConfigurationError, "A list cannot be mixed"),
        ([range(3), Stream()], [1, 1], ConfigurationError, "A Stream cannot be mixed"),
    ],
)
def test_sets_that_cannot_be_mixed_are_refused(sets: Any, weights: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        Mixture(sets, weights)
    with pytest.raises(ConfigurationError, match="`rows` is 0"):
        Mixture([range(3)], [1], rows=0)


# ---------------------------------------------------------------------------------------------------- batches by tokens


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 40), max_size=200), most=st.integers(40, 300), mixed_batches=st.integers(1, 9))
def test_batches_have_each_row_once_and_keep_within_their_tokens(
    lengths: list[int], most: int, mixed_batches: int
) -> None:
    batches = TokenBatches(torch.tensor(lengths, dtype=torch.int64), most, mixed_batches=mixed_batches)
    for _ in range(2):
        epoch = list(batches)
        assert len(epoch) == len(batches)
        assert sorted(row for batch in epoch for row in batch) == list(range(len(lengths)))
        assert all(batch and len(batch) * max(lengths[row] for row in batch) <= most for batch in epoch)


def test_rows_of_similar_lengths_come_together_in_other_batches_of_each_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 512, 5000)
    batches = TokenBatches(lengths, 4096)
    epochs = [list(batches) for _ in range(2)]
    assert len(batches) * 4096 < 1.1 * lengths.sum()
    assert not {tuple(sorted(batch)) for batch in epochs[0]} & {tuple(sorted(batch)) for batch in epochs[1]}
    longest = [int(lengths[batch].max()) for batch in epochs[0]]
    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.2


def test_a_run_by_tokens_is_the_same_with_workers_and_resumes_at_every_update(tmp_path: Path) -> None:
    whole = by_tokens()
    assert [whole.rows_of(update) for update in range(1, 5)] == token_batches(0)[:4]
    same = by_tokens(train_dataloader_kwargs={"num_workers": 2})
    assert_same(same.model.state_dict(), whole.model.state_dict())
    check_every_resume(by_tokens, tmp_path, whole)


@pytest.mark.parametrize(
    ("lengths", "most", "error", "words"),
    [
        ([3, 9, 4, 8], 7, ConfigurationError, "Row 1 has 9 tokens, and 2 in all have more than the 7"),
        ([[3], [4]], 7, ArgumentTypeError, r"the shape \(2, 1\)"),
        ([3.0, 4.0], 7, ArgumentTypeError, "the dtype torch.float32"),
        (LENGTHS, 0, ConfigurationError, "`max_tokens` is 0"),
    ],
)
def test_lengths_that_make_no_batches_are_refused(lengths: Any, most: int, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        TokenBatches(lengths, most)
