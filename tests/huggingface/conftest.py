"""What several of these tests have around them."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def _process_without_a_trainer() -> Iterator[None]:
    """What an earlier test has used, a GPU say, would otherwise decide; and what this one uses, for the later ones."""
    from accelerate.state import AcceleratorState, PartialState

    shared = [AcceleratorState._shared_state, PartialState._shared_state]
    before = [dict(state) for state in shared]
    for state in shared:
        state.clear()
    yield
    for state, content in zip(shared, before, strict=True):
        state.clear()
        state.update(content)
