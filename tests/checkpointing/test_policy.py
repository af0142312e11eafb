import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.states.policy import Retention, SavePolicy


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_all_impossible_numbers_are_named(value):
    with pytest.raises(ConfigurationError, match=f"every_n_updates={value}, every_n_minutes={value}"):
        SavePolicy(every_n_updates=value, every_n_epochs=3, every_n_minutes=value)
    with pytest.raises(ConfigurationError, match="last=0, best=-1"):
        Retention(last=0, best=-1)


# Which states stay.

values = st.none() | st.floats(allow_nan=True) | st.sampled_from([1.0, 2.0])
counts = st.none() | st.integers(1, 5)


def saved(values: Sequence[float | None]) -> dict[Path, float | None]:
    """The values of states in the order of saving."""
    return {Path(str(number)): value for number, value in enumerate(values, start=1)}


histories = st.lists(values, max_size=12).map(saved)
retentions = st.builds(Retention, last=counts, best=counts, greater_is_better=st.booleans())


def kept(retention: Retention, states: dict[Path, float | None]) -> list[int]:
    deleted = retention.states_to_delete(states)
    return [int(state.name) for state in states if state not in deleted]


@pytest.mark.parametrize(
    ("retention", "values", "expected"),
    [
        (Retention(), [1.0, 2.0, 3.0], [1, 2, 3]),
        (Retention(last=2), [None] * 4, [3, 4]),
        (Retention(last=9), [None] * 2, [1, 2]),
        (Retention(best=1), [0.5, 0.1, math.nan, 0.1, None, 0.2, 0.9], [2, 7]),
        (Retention(best=3), [0.5, 0.1, math.nan, 0.1, None, 0.2, 0.9], [2, 4, 6, 7]),
        (Retention(best=2, greater_is_better=True), [0.5, 0.1, math.nan, 0.1, None, 0.2, 0.9], [1, 7]),
        (Retention(best=1), [math.nan, 3.0, None, math.nan], [2, 4]),
        (Retention(best=1, greater_is_better=True), [math.nan, 3.0, None, math.nan], [2, 4]),
    ],
)
def test_the_last_and_the_best_stay_and_always_the_newest(retention, values, expected):
    assert kept(retention, saved(values)) == expected


@given(retentions, histories)
def test_rules_are_a_union(retention, states):
    alone = [
        Retention(last=retention.last),
        Retention(best=retention.best, greater_is_better=retention.greater_is_better),
    ]
    rules = [rule for rule in alone if not rule.keeps_all]
    expected = sorted({number for rule in rules for number in kept(rule, states)}) if rules else kept(alone[0], states)
    assert kept(retention, states) == expected


@given(retentions, histories)
def test_deleting_after_each_save_keeps_what_the_rules_hold_at_the_end(retention, states):
    """A folder that is cleaned all the time ends with the same states as one that is cleaned once."""
    folder: dict[Path, float | None] = {}
    for state, value in states.items():
        folder[state] = value
        for deleted in retention.states_to_delete(folder):
            del folder[deleted]
    assert [int(state.name) for state in folder] == kept(retention, states)
