"""A prepared loader has the attributes that scripts expect, whatever it was made from."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accelerated.data.building import DataLoaderSlice
from tests.data.loaders import Numbers, SizedStream, adapted

SIZE = 11
UP: Any = list(range(SIZE))


class TaggedLoader(DataLoader[Any]):
    """A user's loader, with an additional attribute and method."""

    tag = "mine"

    def describe(self) -> str:
        return f"{self.tag}: {self.batch_size}"


class ReadyBatches:
    """A user's iterable of batches that is not a torch loader."""

    tag = "mine"

    def __init__(self) -> None:
        self.dataset = UP

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.arange(2), torch.arange(2, 4)])


LOADERS: dict[str, Callable[[], Any]] = {
    "planned": lambda: TaggedLoader(Numbers(SIZE), 2, shuffle=True, generator=torch.Generator(), timeout=0),
    "vectorised": lambda: TaggedLoader(TensorDataset(torch.arange(SIZE)), 2, drop_last=True),
    "stream": lambda: TaggedLoader(SizedStream(SIZE), 2),
}


@pytest.mark.parametrize("slice_size", [None, 1])
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_prepared_loader_answers_what_the_users_own_answers(make: Callable[[], Any], slice_size: int | None) -> None:
    source = make()
    loader: Any = adapted(source, rank=1, ranks=3)
    if slice_size is not None:
        loader = DataLoaderSlice(loader, slice_size)
    for name in vars(source):
        if not name.startswith("_"):
            assert getattr(loader, name) is getattr(source, name), name
    assert loader.tag == "mine"
    assert loader.describe() == "mine: 2"
    assert loader.multiprocessing_context is None
    assert loader.device == torch.device("cpu")
    assert loader.total_batch_size == 6
    assert loader.total_dataset_length == SIZE
    assert not hasattr(loader, "tags")


@pytest.mark.parametrize(
    "batches", [[torch.arange(2)], ReadyBatches(), map(torch.tensor, [[1], [2]])], ids=["list", "object", "iterator"]
)
def test_ready_batches_have_the_attributes_of_a_torch_loader(batches: Any) -> None:
    loader: Any = adapted(batches, ranks=2, is_sharded=True)
    for name in vars(DataLoader(UP)):
        if not name.startswith("_"):
            getattr(loader, name)
    assert loader.device == torch.device("cpu")
    assert loader.total_batch_size is None
    assert loader.total_dataset_length == (SIZE if isinstance(batches, ReadyBatches) else None)
    assert getattr(loader, "tag", None) == getattr(batches, "tag", None)
