"""Set-up shared by all tests."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import quick_disk, torchvision_on_cpu
from tests.support.leftovers import fail_on_leftovers

collect_ignore = ["ranks"]  # scripts for several processes, which tests start

quick_disk.install()
torchvision_on_cpu.install()
# The models are tiny: several threads would mostly wait for each other and for other test processes.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Long files first: a process that starts one last would keep the others waiting.
    long_files = {item.path for item in items if any(map(item.get_closest_marker, ("processes", "slow")))}
    items.sort(key=lambda item: item.path not in long_files)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


def pytest_collection_finish() -> None:
    # Otherwise each full collection, one for a few tests, would visit all that torch and the tests consist of.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with fail_on_leftovers():
        yield


@pytest.fixture(scope="session")
def mnist_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ``torchvision.datasets.MNIST(root, download=False)``, filled with scikit-learn's digits."""
    from tests.support.mnist import write_mnist  # slow to import, and needed by few tests

    return write_mnist(tmp_path_factory.mktemp("mnist"))
