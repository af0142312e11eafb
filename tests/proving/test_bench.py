"""`prove` names what is planted, and blames no honest script: a few of the bench here, all in `make chaos`."""

import pytest

from tests.chaos.size import IS_RELEASE, some
from tests.proving.bench import FAULTS, HONEST, judged

A_FEW_FAULTS = (
    "sampler: torch generator",
    "callback: counts epochs",
    "callback: counts updates",
    "callback: acts at the tenth evaluation",
    "callback: metric over all evaluations",
    "model: non-persistent buffer",
    "model: counter of an autograd function",
    "model: gradient hook of a parameter",
    "evaluation: counter",
)
A_FEW_HONEST = (
    "spectral norm",
    "times as metrics",
    "evaluations by steps",
    "a plot",
    "constants, and clamped gradients",
)


def test_the_bench_has_its_size() -> None:
    assert (len(FAULTS), len(HONEST)) == (54, 30)


@pytest.mark.parametrize("name", some(A_FEW_FAULTS, list(FAULTS)))
def test_a_fault_of_the_bench_is_named(name: str) -> None:
    verdict, lines = judged(name, in_new_processes=IS_RELEASE)
    assert verdict == "right", lines


@pytest.mark.parametrize("name", some(A_FEW_HONEST, list(HONEST)))
def test_an_honest_script_of_the_bench_raises_no_alarm(name: str) -> None:
    verdict, lines = judged(name, in_new_processes=IS_RELEASE)
    assert verdict in ("quiet", "note"), lines
