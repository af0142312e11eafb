"""Every sample exactly once, however an epoch is cut and wherever it is continued."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pytorch_accelerated.data.sampling import (
    BatchListPlan,
    TrainingPlan,
    Window,
    epoch_order,
    evaluation_rounds,
)
from pytorch_accelerated.facts.accumulation import Accumulation

sizes = st.integers(0, 120)
batch_sizes = st.integers(1, 7)
rank_counts = st.integers(1, 5)
step_counts = st.builds(Accumulation, st.integers(1, 5))
# Ranks, batch size and accumulation steps of one stretch of an epoch.
layouts = st.tuples(rank_counts, batch_sizes, step_counts)

training_plans = st.builds(
    TrainingPlan,
    size=sizes,
    batch_size=batch_sizes,
    ranks=rank_counts,
    accumulation=step_counts,
    drop_last=st.booleans(),
)


def positions(windows: Iterable[Window]) -> list[int]:
    """The positions of all cells, as the ranks meet them."""
    cells = (cell for window in windows for round_ in window.rounds for cell in round_)
    return [position for cell in cells for position in range(cell.start, cell.start + cell.size)]


def assert_well_formed(windows: Iterable[Window], *, ranks: int) -> None:
    """Requirements for any plan: windows follow each other, and borrowed samples exist."""
    position = None
    for window in windows:
        assert position in (None, window.start)
        position = window.start + window.size
        assert window.size > 0
        for cells in window.rounds:
            assert len(cells) == ranks
            assert any(cell.size for cell in cells), "a round in which nobody has anything"
            for cell in cells:
                assert cell.size or window.start <= cell.start < window.start + window.size, (
                    "there is nothing to borrow"
                )


# ------------------------------------------------------------------------------------------------------------- training


def samples_used(plan: TrainingPlan) -> int:
    return plan.size - plan.size % (plan.batch_size * plan.ranks) if plan.drop_last else plan.size


@given(plan=training_plans)
def test_an_epoch_uses_each_sample_once_in_order(plan: TrainingPlan) -> None:
    windows = list(plan.windows())
    assert_well_formed(windows, ranks=plan.ranks)
    assert positions(windows) == list(range(samples_used(plan)))


@given(plan=training_plans)
def test_updates_but_the_last_are_full_batches_no_larger_than_asked_and_cells_empty_only_if_they_must(
    plan: TrainingPlan,
) -> None:
    windows = list(plan.windows())
    full = plan.batch_size * plan.ranks * plan.accumulation.steps
    assert [window.size for window in windows[:-1]] == [full] * (len(windows) - 1)
    for window in windows:
        assert max(cell.size for cells in window.rounds for cell in cells) <= plan.batch_size
        assert len(window.rounds) == -(-window.size // (plan.batch_size * plan.ranks)), "as few batches as hold it"
        empty = sum(not cell.size for cells in window.rounds for cell in cells)
        assert empty == max(0, plan.ranks * len(window.rounds) - window.size)
        if plan.batch_size >= 2:  # single samples cannot be divided
            assert empty == max(0, plan.ranks - window.size)


@given(plan=training_plans, max_batches=st.integers(0, 40))
def test_a_limit_cuts_the_end_off_and_changes_nothing_before_it(plan: TrainingPlan, max_batches: int) -> None:
    limited = list(plan.windows(max_batches=max_batches))
    assert_well_formed(limited, ranks=plan.ranks)
    assert positions(limited) == positions(plan.windows())[: max_batches * plan.batch_size * plan.ranks]
    assert sum(len(window.rounds) for window in limited) == min(max_batches, plan.num_batches)


class Growing(Accumulation):
    """One batch for the first update of an epoch, two for the second, and so on."""

    def sizes(self, batches_done: int = 0) -> Iterator[int]:
        return itertools.count(1 + self.updates(batches_done))

    def updates(self, batches: int) -> int:
        return next(updates for updates in itertools.count() if updates * (updates + 1) // 2 >= batches)


@pytest.mark.parametrize("plan", [TrainingPlan(40, 2, 1, Growing()), BatchListPlan([2] * 20, 1, Growing())])
def test_another_rule_of_accumulation_cuts_an_epoch_and_continues_it(plan: Any) -> None:
    windows = list(plan.windows())
    assert [len(window.rounds) for window in windows] == [1, 2, 3, 4, 5, 5]
    assert positions(windows) == list(range(40))
    assert [list(plan.windows(window.start)) for window in windows] == [windows[done:] for done in range(6)]


@given(size=sizes, legs=st.lists(st.tuples(layouts, st.integers(1, 4)), max_size=5), last=layouts)
def test_an_epoch_continued_with_another_layout_uses_each_remaining_sample_once(
    size: int, legs: list[tuple[tuple[int, int, Accumulation], int]], last: tuple[int, int, Accumulation]
) -> None:
    seen: list[int] = []
    for (ranks, batch_size, steps), updates in legs:
        windows = list(itertools.islice(TrainingPlan(size, batch_size, ranks, steps).windows(len(seen)), updates))
        assert_well_formed(windows, ranks=ranks)
        seen += positions(windows)
    ranks, batch_size, steps = last
    seen += positions(TrainingPlan(size, batch_size, ranks, steps).windows(len(seen)))
    assert seen == list(range(size))


@given(plan=training_plans, done=st.integers(0, 10))
def test_an_epoch_continued_with_the_same_layout_has_the_windows_it_would_have_had(
    plan: TrainingPlan, done: int
) -> None:
    whole = list(plan.windows())
    start = whole[done].start if done < len(whole) else samples_used(plan)
    assert list(plan.windows(start)) == whole[done:]


# ---------------------------------------------------------------------------------------------- a user's own batches


@st.composite
def lists_of_batches(draw: Any, ranks: st.SearchStrategy[int] = rank_counts) -> BatchListPlan:
    return BatchListPlan(draw(st.lists(st.integers(1, 6), max_size=25)), draw(ranks), draw(step_counts))


@st.composite
def shares_of_ranks(draw: Any) -> BatchListPlan:
    """Batches of distributed samplers, distributed in turn: a rank that has run out of batches has empty ones."""
    ranks = draw(rank_counts)
    shares = draw(st.lists(st.lists(st.integers(1, 6), max_size=8), min_size=ranks, max_size=ranks))
    rows = itertools.zip_longest(*shares, fillvalue=0)
    return BatchListPlan(list(itertools.chain.from_iterable(rows)), ranks, draw(step_counts))


batch_plans = st.one_of(lists_of_batches(), shares_of_ranks())


@given(plan=batch_plans)
# Its last cell lies behind the last sample.
@example(plan=BatchListPlan([2, 2, 2, 0], ranks=2, accumulation=Accumulation(1)))
@example(plan=BatchListPlan([0, 2, 0, 2], ranks=2, accumulation=Accumulation(2)))
def test_custom_batches_stay_whole_and_come_once_and_in_order(plan: BatchListPlan) -> None:
    windows = list(plan.windows())
    assert_well_formed(windows, ranks=plan.ranks)
    assert [cell.size for window in windows for cells in window.rounds for cell in cells if cell.size] == [
        size for size in plan.sizes if size
    ]
    assert positions(windows) == list(range(sum(plan.sizes)))
    assert len(windows) == -(-plan.num_batches // plan.accumulation.steps)
    assert sum(len(window.rounds) for window in windows) == plan.num_batches


@given(plan=shares_of_ranks())
def test_batches_of_a_rank_stay_on_it(plan: BatchListPlan) -> None:
    for rank in range(plan.ranks):
        cells = [cell for window in plan.windows() for cell in (cells[rank] for cells in window.rounds)]
        assert [cell.size for cell in cells] == list(plan.sizes[rank :: plan.ranks])


@given(plan=batch_plans, max_batches=st.integers(0, 12))
def test_a_limit_counts_batches_of_a_rank(plan: BatchListPlan, max_batches: int) -> None:
    limited = list(plan.windows(max_batches=max_batches))
    whole = [cells for window in plan.windows() for cells in window.rounds]
    sizes_of = [[cell.size for cell in cells] for window in limited for cells in window.rounds]
    assert sizes_of == [[cell.size for cell in cells] for cells in whole[:max_batches]]


@given(plan=batch_plans, done=st.integers(0, 10))
@example(plan=BatchListPlan([1, 1, 1, 0, 1, 0, 1, 0], ranks=2, accumulation=Accumulation(1)), done=2)
@example(plan=BatchListPlan([1, 1, 0, 1, 0, 1], ranks=2, accumulation=Accumulation(1)), done=1)
def test_batches_continued_on_as_many_ranks_are_those_that_would_have_come(plan: BatchListPlan, done: int) -> None:
    whole = list(plan.windows())
    start = whole[done].start if done < len(whole) else sum(plan.sizes)
    assert list(plan.windows(start)) == whole[done:]


@given(plan=lists_of_batches(), ranks=rank_counts, steps=step_counts, done=st.integers(0, 5))
def test_batches_continued_on_another_number_of_ranks_come_once(
    plan: BatchListPlan, ranks: int, steps: Accumulation, done: int
) -> None:
    before = list(itertools.islice(plan.windows(), done))
    start = before[-1].start + before[-1].size if before else 0
    after = list(BatchListPlan(plan.sizes, ranks, steps).windows(start))
    assert_well_formed(after, ranks=ranks)
    assert positions(before) + positions(after) == list(range(sum(plan.sizes)))


# ----------------------------------------------------------------------------------------------------------- evaluation


def every_evaluation() -> Iterator[tuple[int, int, int]]:
    for ranks, batch_size in itertools.product(range(1, 7), range(1, 6)):
        for size in range(5 * ranks * batch_size + 2):
            yield size, batch_size, ranks


@pytest.mark.parametrize("drop_last", [False, True])
def test_rounds_show_each_sample_once_in_order_and_are_as_few_and_as_full_as_can_be(
    drop_last: bool,
) -> None:
    for size, batch_size, ranks in every_evaluation():
        rounds = list(evaluation_rounds(size, batch_size=batch_size, ranks=ranks, drop_last=drop_last))
        assert_well_formed(rounds, ranks=ranks)
        assert positions(rounds) == list(range(size - size % (batch_size * ranks) if drop_last else size))
        assert len(rounds) == (size // (batch_size * ranks) if drop_last else math.ceil(size / (batch_size * ranks)))
        assert all(len(window.rounds) == 1 for window in rounds)
        cells = [cell for window in rounds for cell in window.rounds[0]]
        assert all(cell.size <= batch_size for cell in cells)
        empty = sum(not cell.size for cell in cells)
        if drop_last or (size >= ranks and batch_size >= 2):
            assert empty == 0, (size, batch_size, ranks)
        else:
            assert empty == -size % ranks, "only the last round may have empty cells"


# ---------------------------------------------------------------------------------------------------------------- order


@given(size=st.integers(0, 50), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 100))
def test_an_order_is_a_permutation_that_follows_from_seed_and_epoch_alone(size: int, seed: int, epoch: int) -> None:
    before = torch.default_generator.get_state()
    order = epoch_order(size, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(size))
    assert torch.equal(order, epoch_order(size, seed=seed, epoch=epoch))
    assert torch.equal(torch.default_generator.get_state(), before)


def test_every_seed_and_epoch_has_its_own_order() -> None:
    # Seeds that differ by an epoch, and seeds beyond the 32 bits that torch's generator keeps, included.
    seeds = [*range(20), 2**32, 2**32 + 1, 2**63]
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch).tolist()) for seed in seeds for epoch in range(20)}
    assert len(orders) == len(seeds) * 20
