"""The mean loss of an epoch, whenever and however often it is read."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytorch_accelerated.tracking import LossTracker

BATCHES = [(0.5, 4), (2.25, 4), (1.0, 3), (8.0, 1)]  # losses and weights
MEAN = (0.5 * 4 + 2.25 * 4 + 1.0 * 3 + 8.0) / 12

AS_GIVEN: dict[str, Callable[[float], Any]] = {
    "numbers": float,
    "0-dim tensors": torch.tensor,
    "tensors with one element": lambda value: torch.tensor([[value]]),
    "tensors with a graph": lambda value: torch.tensor(value, requires_grad=True) * 1,
    "half precision": lambda value: torch.tensor(value, dtype=torch.float16),
    "numbers and tensors": lambda value: value if value > 1 else torch.tensor(value),
    "tensors of several dtypes": lambda value: torch.tensor(value, dtype=torch.float16 if value > 1 else torch.float32),
    "whole numbers among them": lambda value: int(value) if value == int(value) else torch.tensor(value),
}


def tracked(batches: list[tuple[Any, Any]]) -> LossTracker:
    tracker = LossTracker()
    for loss, weight in batches:
        tracker.update(loss, weight)
    return tracker


@pytest.mark.parametrize("weight_as", [int, float, torch.tensor, lambda weight: torch.tensor(float(weight))])
@pytest.mark.parametrize("loss_as", AS_GIVEN.values(), ids=AS_GIVEN)
def test_the_mean_is_that_of_the_items(loss_as: Callable[[float], Any], weight_as: Callable[[int], Any]):
    tracker = tracked([(loss_as(loss), weight_as(weight)) for loss, weight in BATCHES])
    assert tracker.average == MEAN
    assert tracker.total_loss == 12 * MEAN
    assert tracker.running_count == 12
    assert tracker.loss_value == 8.0
    assert tracker.first_non_finite is None


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 1000)), min_size=1, max_size=200),
    st.sets(st.integers(0, 199)),
)
@settings(deadline=None)
def test_reading_in_bulk_gives_the_mean_of_a_plain_sum_in_double_precision(batches, read_after):
    tracker = LossTracker()
    for index, (loss, weight) in enumerate(batches):
        tracker.update(torch.tensor(loss, dtype=torch.float64), weight)
        if index in read_after:
            tracker.read()
    size = math.fsum(abs(loss) * weight for loss, weight in batches)
    assert tracker.total_loss == pytest.approx(math.fsum(loss * weight for loss, weight in batches), abs=1e-13 * size)
    assert tracker.running_count == sum(weight for _, weight in batches)
    count = tracker.running_count
    assert tracker.average == (tracker.total_loss / count if count else 0.0)
    assert tracker.loss_value == batches[-1][0]


def test_a_batch_of_weight_0_counts_nowhere_even_if_its_loss_is_not_a_number():
    tracker = tracked([(torch.tensor(2.0), 3), (torch.tensor(math.nan), 0)])
    assert tracker.average == 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("read_after", [[], [0], [2], [0, 1, 2, 3, 4]])
def test_the_first_loss_that_is_not_finite_is_named_by_its_index(bad: float, read_after: list[int]):
    tracker = LossTracker()
    for index, loss in enumerate([1.0, 2.0, 3.0, bad, 4.0, math.nan]):
        tracker.update(torch.tensor(loss))
        if index in read_after:
            tracker.read()
    tracker.look_for_non_finite()
    assert tracker.first_non_finite == 3
    tracker.read()
    assert tracker.first_non_finite == 3
    assert not math.isfinite(tracker.average)
    tracker.reset()
    assert tracker.first_non_finite is None


def random_batches(number: int) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.rand((), generator=generator), index % 3 + 1) for index in range(number)]


@pytest.mark.parametrize("reads_first", [False, True])
def test_losses_that_are_infinite_both_ways_make_a_part_without_a_mean(reads_first: bool):
    tracker = LossTracker()
    for loss in (math.inf, -math.inf):
        tracker.update(torch.tensor(loss), 2)
    tracker.end_part()
    if reads_first:
        tracker.read()
    ((total, weight),) = tracker.take_parts()
    assert math.isnan(total)
    assert weight == 4
    assert math.isnan(tracker.average)
    assert tracker.first_non_finite == 0


def test_looking_changes_nothing_to_the_bit():
    batches = random_batches(50)
    plain, looked_at = tracked(batches), LossTracker()
    for number, (loss, weight) in enumerate(batches, start=1):
        looked_at.update(loss, weight)
        looked_at.look_for_non_finite()
        assert looked_at.peek() == pytest.approx(tracked(batches[:number]).average, rel=1e-15)
        looked_at.state_dict()
    assert looked_at.total_loss == plain.total_loss


def test_a_tracker_does_not_keep_the_graph_of_a_loss():
    weight = torch.ones(1000, requires_grad=True)
    tracker = LossTracker()
    doubled, of_graph = weight * 2, {1}
    doubled.register_hook(lambda gradient, held=of_graph: None)  # the graph holds its hooks
    is_held = weakref.ref(of_graph)
    tracker.update(doubled.sum())
    del doubled, of_graph
    gc.collect()
    assert is_held() is None
    assert tracker.average == 2000
