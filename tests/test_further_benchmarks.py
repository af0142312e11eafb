"""The other half of the cases of `test_benchmarks.py`."""

import pytest

from tests.test_benchmarks import PARTS, check_results


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("cases", PARTS[2:], ids=" ".join)
def test_every_way_is_in_the_json_and_in_the_tables(cases, tmp_path):
    check_results(cases, tmp_path)
