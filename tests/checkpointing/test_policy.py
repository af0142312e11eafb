import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytorch_accelerated.checkpointing.policy import SavePolicy
from pytorch_accelerated.errors import ConfigurationError


def is_due(policy: SavePolicy, **facts: float) -> bool:
    now = {"updates": 0, "epochs": 0, "saved_updates": 0, "saved_epochs": 0, "seconds_since_save": 0.0, **facts}
    return policy.is_due(**now)  # type: ignore[arg-type]


@given(st.integers(1, 9), st.integers(0, 40))
def test_saves_fall_on_the_multiples(n, start):
    """Also for a run that resumes from any update."""
    policy = SavePolicy(every_n_updates=n)
    saved, saves = start, []
    for updates in range(start, 60):
        if is_due(policy, updates=updates, saved_updates=saved):
            saved = updates
            saves.append(updates)
    assert saves == [updates for updates in range(start + 1, 60) if updates % n == 0]


@given(st.integers(1, 9), st.lists(st.integers(1, 20), max_size=9))
def test_a_multiple_that_was_stepped_over_is_made_up_for_once(n, steps):
    policy = SavePolicy(every_n_epochs=n)
    epochs = saved = 0
    for step in steps:
        before, epochs = epochs, epochs + step
        passed = any(epoch % n == 0 for epoch in range(before + 1, epochs + 1))
        assert is_due(policy, epochs=epochs, saved_epochs=saved) == passed
        if passed:
            saved = epochs
            assert not is_due(policy, epochs=epochs, saved_epochs=saved)


@pytest.mark.parametrize(("seconds", "due"), [(0.0, False), (89.9, False), (90.0, True), (10_000.0, True)])
def test_minutes_count_since_the_last_save(seconds, due):
    assert is_due(SavePolicy(every_n_minutes=1.5), updates=7, seconds_since_save=seconds) == due


def test_one_rule_that_asks_is_enough():
    policy = SavePolicy(every_n_updates=10, every_n_epochs=2, every_n_minutes=5)
    assert not is_due(policy, updates=9, epochs=1, seconds_since_save=299)
    assert is_due(policy, updates=10)
    assert is_due(policy, epochs=2)
    assert is_due(policy, seconds_since_save=300)


def test_without_a_rule_nothing_is_due():
    assert not is_due(SavePolicy(), updates=1000, epochs=1000, seconds_since_save=1e9)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_all_impossible_intervals_are_named(value):
    with pytest.raises(ConfigurationError, match=f"every_n_updates={value}, every_n_minutes={value}"):
        SavePolicy(every_n_updates=value, every_n_epochs=3, every_n_minutes=value)
