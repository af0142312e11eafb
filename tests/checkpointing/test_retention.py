import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytorch_accelerated.checkpointing.retention import Retention, SavedState
from pytorch_accelerated.errors import ConfigurationError

values = st.none() | st.floats(allow_nan=True) | st.sampled_from([1.0, 2.0])
counts = st.none() | st.integers(1, 5)


@st.composite
def histories(draw: Any) -> list[SavedState]:
    """States in the order of saving; updates may go back, as after resuming from an older state."""
    updates = draw(st.lists(st.integers(0, 50), max_size=12))
    return [SavedState(f"step_{serial}", serial, count, draw(values)) for serial, count in enumerate(updates, start=1)]


retentions = st.builds(
    Retention, last=counts, best=counts, every_n_updates=st.none() | st.integers(1, 20), greater_is_better=st.booleans()
)


def kept(retention: Retention, states: list[SavedState]) -> list[int]:
    deleted = retention.states_to_delete(states)
    return [state.serial for state in states if state not in deleted]


def numbered(*values: float | None) -> list[SavedState]:
    return [SavedState(f"step_{serial}", serial, 10 * serial, value) for serial, value in enumerate(values, start=1)]


def test_the_last_ones_stay():
    assert kept(Retention(last=2), numbered(None, None, None, None)) == [3, 4]
    assert kept(Retention(last=9), numbered(None, None)) == [1, 2]


def test_the_best_ones_stay_and_the_newest():
    states = numbered(0.5, 0.1, math.nan, 0.1, None, 0.2, 0.9)
    assert kept(Retention(best=1), states) == [2, 7]
    assert kept(Retention(best=3), states) == [2, 4, 6, 7]
    assert kept(Retention(best=2, greater_is_better=True), states) == [1, 7]


@pytest.mark.parametrize("greater_is_better", [True, False])
def test_nan_is_never_best(greater_is_better):
    states = numbered(math.nan, 3.0, None, math.nan)
    assert kept(Retention(best=1, greater_is_better=greater_is_better), states) == [2, 4]


def test_infinite_values_are_compared_like_others():
    states = numbered(math.inf, 1.0, -math.inf, 2.0)
    assert kept(Retention(best=1), states) == [3, 4]
    assert kept(Retention(best=1, greater_is_better=True), states) == [1, 4]


def test_one_state_stays_for_each_multiple():
    states = [SavedState(str(updates), updates, updates) for updates in (4, 8, 10, 14, 19, 23, 26, 30)]
    assert kept(Retention(every_n_updates=10), states) == [10, 23, 30]


def test_without_rules_everything_stays():
    assert Retention().states_to_delete(numbered(1.0, 2.0, 3.0)) == []


@given(retentions, histories())
def test_the_newest_is_never_deleted(retention, states):
    assert states[-1:] == [state for state in states[-1:] if state not in retention.states_to_delete(states)]


@given(retentions, histories())
def test_rules_are_a_union(retention, states):
    alone = [
        Retention(last=retention.last),
        Retention(best=retention.best, greater_is_better=retention.greater_is_better),
        Retention(every_n_updates=retention.every_n_updates),
    ]
    rules = [rule for rule in alone if rule != Retention(greater_is_better=rule.greater_is_better)]
    expected = sorted({serial for rule in rules for serial in kept(rule, states)}) if rules else kept(alone[0], states)
    assert kept(retention, states) == expected


@given(retentions, histories())
def test_deleting_twice_deletes_nothing_more(retention, states):
    deleted = retention.states_to_delete(states)
    rest = [state for state in states if state not in deleted]
    assert retention.states_to_delete(rest) == []


@given(retentions, histories())
def test_deleting_after_each_save_keeps_what_the_rules_hold_at_the_end(retention, states):
    """A folder that is cleaned all the time ends with the same states as one that is cleaned once."""
    folder: list[SavedState] = []
    for state in states:
        folder.append(state)
        deleted = retention.states_to_delete(folder)
        folder = [one for one in folder if one not in deleted]
    assert [state.serial for state in folder] == kept(retention, states)


@given(retentions, histories(), st.randoms())
def test_the_order_in_which_states_are_listed_does_not_matter(retention, states, random):
    shuffled = random.sample(states, len(states))
    assert retention.states_to_delete(shuffled) == retention.states_to_delete(states)


@given(st.integers(1, 5), histories(), st.booleans())
def test_no_deleted_state_is_better_than_a_kept_best(best, states, greater):
    retention = Retention(best=best, greater_is_better=greater)
    deleted = retention.states_to_delete(states)
    known = [state.value for state in states if state not in deleted and state != states[-1]]
    sign = -1 if greater else 1
    for state in deleted:
        if state.value is not None and not math.isnan(state.value):
            better = [value for value in known if value is not None and sign * value <= sign * state.value]
            assert len(better) >= best - 1


def test_all_impossible_numbers_are_named():
    with pytest.raises(ConfigurationError, match="last=0, every_n_updates=-1"):
        Retention(last=0, best=1, every_n_updates=-1)
