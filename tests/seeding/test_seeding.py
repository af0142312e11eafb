"""Blocks with seeds of their own leave every generator as it was, whatever is drawn within and between them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.facts.seeding import (
    generator_states,
    restore_generator_states,
    seed_host_generators,
    seeds_of_batches,
    split_mix,
    with_seed,
    without_second_numbers,
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

    def within(turn: int) -> None:
        for draw in everything[: turn % (len(everything) + 1)]:
            draw()
        if turn % 3 == 0:
            with_seed(turn, np.random.randn)

    def drawn(*, has_blocks: bool) -> list[Any]:
        seed_host_generators(1)
        numbers: list[Any] = []
        for turn in without_second_numbers(iter(range(60))):
            if has_blocks:
                with_seed(turn, within, turn)
            numbers += [draw() for draw in kinds]
        return [*numbers, *(draw() for draw in everything)]

    assert drawn(has_blocks=True) == drawn(has_blocks=False)


def test_what_is_drawn_within_a_block_depends_on_its_seed_only() -> None:
    def draws() -> list[Any]:
        return [draw() for draw in DRAWS.values()]

    first = with_seed(5, draws)
    for draw in DRAWS.values():
        draw()
        assert with_seed(5, draws) == first
    assert with_seed(6, draws) != first
    seed_host_generators(5)
    assert draws() == first


def test_a_bit_generator_of_the_user_stays_numpys_global_one() -> None:
    before = numpy_random.get_bit_generator()
    try:
        numpy_random.set_bit_generator(np.random.PCG64(3))
        expected = np.random.RandomState(np.random.PCG64(3)).random_sample(3)
        found = []
        for _ in range(3):
            with_seed(1, np.random.randn)
            found.append(np.random.rand())
        assert found == list(expected)
    finally:
        numpy_random.set_bit_generator(before)


def test_generators_draw_the_same_again_after_their_states_are_restored() -> None:
    DRAWS["random.gauss"](), DRAWS["numpy.randn"]()  # each leaves the second number of a pair
    states = generator_states()
    first = [draw() for draw in DRAWS.values()]
    restore_generator_states(states)
    assert [draw() for draw in DRAWS.values()] == first


def test_seeds_of_batches_are_those_of_split_mix() -> None:
    seed_of = seeds_of_batches("some", 1)
    assert len({seed_of(number) for number in range(10_000)}) > 9_990
    assert all(0 <= seed_of(number) < 2**32 for number in range(100))
    others = seeds_of_batches("some", 2)
    assert sum(seed_of(number) == others(number) for number in range(10_000)) < 3
    # The numbers that the authors' program gives for the seed 0, in their low 32 bits.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [split_mix(0, number) for number in (1, 2, 3)] == [each & 0xFFFFFFFF for each in published]
