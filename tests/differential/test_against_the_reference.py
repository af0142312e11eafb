"""Scripts see the same with this library as with the reference package, but for the differences that are meant."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.differential import both
from tests.differential.comparing import Finding, differences
from tests.differential.differences import all_differences, explanation
from tests.differential.pages import findings, pages

needs_the_reference = pytest.mark.skipif(
    not both.is_installed(), reason="the reference package is not installed; `make .venv/.reference` does it"
)
pytestmark = [pytest.mark.slow, pytest.mark.processes]


@needs_the_reference
def test_the_reference_is_the_version_that_is_meant():
    (found,) = both.REFERENCE.glob("pytorch_accelerated-*.dist-info")
    assert found.name == f"pytorch_accelerated-{both.VERSION}.dist-info"


@needs_the_reference
def test_both_were_driven_on_one_process_and_on_two():
    for seen in both.observations():
        assert seen["gathering.world"]["ranks"] == 1
        for rank in range(both.WORLD_SIZE):
            world = seen[f"rank {rank} of {both.WORLD_SIZE}, gathering.world"]
            assert world == {"ranks": both.WORLD_SIZE, "gathered": [0, 1]}


@needs_the_reference
def test_every_difference_is_meant():
    unexplained = [finding for finding in findings() if explanation(finding) is None]
    assert unexplained == [], "explain them in tests/differential/differences.py, or mend them"


@needs_the_reference
def test_every_difference_that_is_meant_is_seen():
    explained = [(finding.name, explanation(finding)) for finding in findings()]
    for difference in all_differences():
        names = [name for name, reason in explained if reason is difference]
        for pattern in difference.where:
            assert any(fnmatchcase(name, pattern) for name in names), (difference.what, pattern)


@needs_the_reference
def test_the_pages_are_up_to_date():
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale; run: make differential"


def found(reference: object, ours: object) -> list[Finding]:
    return list(differences({"a": reference}, {"a": ours}))


@pytest.mark.parametrize(
    ("reference", "ours"),
    [
        (1.0, 1.0001),
        ([1.0, 2.0], [1.0]),
        ([1.0, 2.0], [2.0, 1.0]),
        (True, 1),
        ("1", 1),
        (0.0, None),
        ({"b": 1}, {}),
        ({}, {"b": 1}),
        ({"b": 1}, {"raises": "ValueError"}),
        ({"raises": "KeyError"}, {"raises": "ValueError"}),
    ],
)
def test_a_difference_is_found(reference: object, ours: object):
    assert len(found(reference, ours)) == 1


@pytest.mark.parametrize(
    ("reference", "ours"),
    [(1.0, 1), (1.0, 1.0 + 1e-9), (float("nan"), float("nan")), ({"b": [1, None]}, {"b": [1, None]})],
)
def test_equal_values_are_not_a_difference(reference: object, ours: object):
    assert found(reference, ours) == []


def test_further_names_are_not_a_difference():
    assert list(differences({"signatures.names": {"a": 1}}, {"signatures.names": {"a": 1, "b": 1}})) == []


def test_scenarios_use_nothing_but_the_public_package():
    for path in Path(both.SCENARIOS).glob("*.py"):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        of_tests = [line for line in lines if line.startswith(("from tests", "import tests"))]
        assert all(line.startswith("from tests.differential.scenarios.common import") for line in of_tests), path
