"""Blocks with seeds of their own leave every generator as it was, whatever is drawn within and between them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.seeding import (
    KeyedCalls,
    generator_states,
    host_generators_seeded,
    restore_generator_states,
    seed_host_generators,
    seeds_of_batches,
    split_mix,
)

numpy_random: Any = np.random  # its type hints lack two functions

DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "random, many": lambda: [random.random() for _ in range(313)],
    "random.gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy.randn": np.random.randn,
    "torch": lambda: torch.rand(()).item(),
    "torch.randn": lambda: torch.randn(()).item(),
    "reseeded": lambda: (random.seed(3), random.random()),
}


@pytest.mark.parametrize("kind", [*DRAWS, "all", "none"])
def test_what_is_drawn_between_blocks_does_not_depend_on_them(kind: str) -> None:
    kinds = {"all": list(DRAWS.values()), "none": []}.get(kind) or [DRAWS[kind]] if kind != "none" else []
    everything = list(DRAWS.values())

    def drawn(*, has_blocks: bool) -> list[Any]:
        seed_host_generators(1)
        numbers: list[Any] = []
        for turn in range(60):
            if has_blocks:
                with host_generators_seeded(turn):
                    for draw in everything[: turn % (len(everything) + 1)]:
                        draw()
                    if turn % 3 == 0:
                        with host_generators_seeded(turn):
                            np.random.randn()
            numbers += [draw() for draw in kinds]
        return [*numbers, *(draw() for draw in everything)]

    assert drawn(has_blocks=True) == drawn(has_blocks=False)


def test_what_is_drawn_within_a_block_depends_on_its_seed_only() -> None:
    def within(seed: int) -> list[Any]:
        with host_generators_seeded(seed):
            return [draw() for draw in DRAWS.values()]

    first = within(5)
    for draw in DRAWS.values():
        draw()
        assert within(5) == first
    assert within(6) != first
    seed_host_generators(5)
    assert [draw() for draw in DRAWS.values()] == first


def test_a_bit_generator_of_the_user_stays_numpys_global_one() -> None:
    before = numpy_random.get_bit_generator()
    try:
        numpy_random.set_bit_generator(np.random.PCG64(3))
        expected = np.random.RandomState(np.random.PCG64(3)).standard_normal(3)
        found = []
        for _ in range(3):
            with host_generators_seeded(1):
                np.random.randn()
            found.append(np.random.randn())
        assert found == list(expected)
    finally:
        numpy_random.set_bit_generator(before)


def test_generators_draw_the_same_again_after_their_states_are_restored() -> None:
    DRAWS["random.gauss"](), DRAWS["numpy.randn"]()  # each leaves the second number of a pair
    states = generator_states()
    first = [draw() for draw in DRAWS.values()]
    restore_generator_states(states)
    assert [draw() for draw in DRAWS.values()] == first


def test_states_look_as_before_after_a_block() -> None:
    for seed in range(3):
        random.seed(seed)
        before = random.getstate()
        with host_generators_seeded(1):
            random.random()
        assert random.getstate() == before


def noted(names: list[str], calls: list[list[str]]) -> list[str]:
    calls.append(names)
    return names


def drawn_by_name(names: list[str]) -> list[Any]:
    return [DRAWS[name]() for name in names]


def state_of_numpy(names: list[str]) -> list[Any]:
    return [numpy_random.get_state()[1].tolist(), *drawn_by_name(names)]


@pytest.mark.parametrize("function", [drawn_by_name, state_of_numpy])
@pytest.mark.parametrize("turns", [[["numpy.randn"], [], ["numpy"]], [[], ["random", "torch"], ["numpy.randn"], []]])
def test_a_keyed_call_depends_on_its_key_and_changes_nothing(function: Any, turns: list[list[str]]) -> None:
    seed_host_generators(1)
    np.random.randn()  # leaves the second number of a pair
    expected_before, expected_after = np.random.randn(), drawn_by_name(list(DRAWS))
    seed_host_generators(1)
    np.random.randn()

    calls: list[list[str]] = []
    call = KeyedCalls(lambda names: function(noted(names, calls)))
    found = [call(key, names) for key, names in enumerate(turns)]
    assert np.random.randn() == expected_before
    assert drawn_by_name(list(DRAWS)) == expected_after
    assert len(calls) <= len(turns) + 1
    for key, names in enumerate(turns):
        seed_host_generators(key)
        assert found[key] == function(names)


def test_a_keyed_call_that_fails_after_it_used_numpy_fails_under_its_key() -> None:
    def rows(fails: bool) -> float:
        if fails:
            raise ValueError(f"drew {np.random.rand()}")
        return random.random()

    call = KeyedCalls(rows)
    before = generator_states()
    call(1, False)
    np.random.seed(2)
    message = f"drew {np.random.rand()}"
    restore_generator_states(before)
    with pytest.raises(ValueError, match=message):
        call(2, True)
    after = generator_states()
    assert after["random"] == before["random"]
    assert torch.equal(after["torch"], before["torch"])
    assert torch.equal(after["numpy"][1], before["numpy"][1])


def test_a_keyed_call_without_numpy_is_made_once_each_time() -> None:
    calls: list[int] = []
    call = KeyedCalls(calls.append)
    for value in range(5):
        call(value, value)
    assert calls == list(range(5))


def test_seeds_of_batches_are_those_of_split_mix() -> None:
    seed_of = seeds_of_batches("some", 1)
    assert len({seed_of(number) for number in range(10_000)}) > 9_990
    assert all(0 <= seed_of(number) < 2**32 for number in range(100))
    others = seeds_of_batches("some", 2)
    assert sum(seed_of(number) == others(number) for number in range(10_000)) < 3
    # The numbers that the authors' program gives for the seed 0, in their low 32 bits.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [split_mix(0, number) & 0xFFFFFFFF for number in (1, 2, 3)] == [each & 0xFFFFFFFF for each in published]
