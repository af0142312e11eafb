"""Batches of data in memory equal what torch makes of the single samples, and never share its memory."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from pytorch_accelerated.data.building import check_dataset
from pytorch_accelerated.data.rows import ArrayDataset, as_array_dataset
from pytorch_accelerated.errors import DataError
from tests.checkpointing.same_state import assert_same_state

ROWS = 6

TORCH_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,
]  # fmt: skip
NUMPY_DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows that differ from each other as far as the dtype can tell."""
    return torch.arange(1, 1 + ROWS * torch.Size(shape).numel()).view(ROWS, *shape).to(dtype)


def array(*shape: int, dtype: Any = "f4") -> np.ndarray[Any, Any]:
    return np.arange(1, 1 + ROWS * int(np.prod(shape))).reshape(ROWS, *shape).astype(dtype)


def as_it_should_be(dataset: Any, indices: list[int]) -> Any:
    return default_collate([dataset[index] for index in indices])


def assert_batches_are_torchs(dataset: Any, samples: Any = None) -> None:
    """The batches of `dataset` are those that `default_collate` makes of `samples`, by default its own."""
    arrays = as_array_dataset(dataset)
    assert arrays is not None
    reference = arrays if samples is None else samples
    assert len(arrays) == len(reference)
    last = len(reference) - 1
    for picked in ([last, 0, 0, 1], [last], list(range(last + 1))):
        assert_same_state(arrays.fetch(torch.tensor(picked)), as_it_should_be(reference, picked))
    assert_same_state(arrays.fetch(slice(1, 3)), as_it_should_be(reference, [1, 2]))
    # A slice over the end has fewer rows, as in a list.
    assert_same_state(arrays.fetch(slice(2, 100)), as_it_should_be(reference, list(range(2, len(reference)))))


@pytest.mark.parametrize("shape", [(), (2, 3)])
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_batches_of_tensors_are_torchs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = rows(*shape, dtype=dtype)
    assert_batches_are_torchs(tensor, samples=tensor)
    assert_batches_are_torchs(TensorDataset(tensor), samples=TensorDataset(tensor))


@pytest.mark.parametrize("shape", [(), (2, 3)])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_batches_of_arrays_are_torchs(dtype: str, shape: tuple[int, ...]) -> None:
    data = array(*shape, dtype=dtype)
    if dtype == "u8" and not shape:  # torch cannot collate single numbers of this dtype
        fetched = ArrayDataset(data).fetch(torch.tensor([5, 0, 0]))
        assert_same_state(fetched, torch.from_numpy(data[[5, 0, 0]]))
    else:
        assert_batches_are_torchs(data, samples=data)


Point = namedtuple("Point", ["x", "y"])

STRUCTURES: dict[str, Callable[[], Any]] = {
    "pair": lambda: (rows(2), rows(dtype=torch.int64)),
    "tuple of one": lambda: (rows(2),),
    "mixed": lambda: (rows(2), array(3, dtype="i4"), array(dtype="f8")),
    "dict": lambda: {"inputs": rows(2), "labels": array(dtype="i8")},
    "nested dict": lambda: {"inputs": {"ids": rows(2), "mask": array(2, dtype="?")}, "labels": rows()},
    "dict in a tuple": lambda: ({"ids": rows(2), "mask": rows(2)}, rows()),
    "tuple in a dict": lambda: {"pair": (rows(2), rows(3)), "list": [rows(), array(2)]},
    "deep": lambda: {"a": {"b": ({"c": rows()}, [rows(1), (array(),)])}},
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batches_of_structures_are_torchs(structure: str) -> None:
    data = STRUCTURES[structure]()
    assert_batches_are_torchs(data)


UNUSUAL_ARRAYS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "strings": lambda: np.array(["a", "bc", "d", "", "e", "f"]),
    "bytes": lambda: np.array([b"a", b"bc", b"d", b"", b"e", b"f"]),
    "object strings": lambda: np.array(["a", "bc", "d", "", "e", "f"], dtype=object),
    "object numbers": lambda: np.array([3, 1, 4, 1, 5, 9], dtype=object),
    "reversed": lambda: array(2)[::-1],
    "other byte order": lambda: array(dtype=">f4"),
    "transposed": lambda: np.asfortranarray(array(3, 2)).swapaxes(1, 2),
    "broadcast": lambda: np.broadcast_to(np.arange(3.0), (ROWS, 3)),
    "every other row": lambda: np.arange(4.0 * ROWS).reshape(2 * ROWS, 2)[::2],
    "without columns": lambda: np.zeros((ROWS, 0)),
}


@pytest.mark.parametrize("kind", UNUSUAL_ARRAYS)
def test_batches_of_unusual_arrays_are_torchs(kind: str) -> None:
    data = UNUSUAL_ARRAYS[kind]()
    assert_batches_are_torchs(data, samples=data)
    assert_batches_are_torchs({"a": data, "b": rows(2)})


def test_a_transposed_tensor_and_one_with_a_graph_are_nothing_special() -> None:
    assert_batches_are_torchs(torch.arange(2.0 * ROWS).view(2, ROWS).T)
    weights = rows(2).requires_grad_()
    batch = as_array_dataset(weights).fetch(torch.tensor([5, 0, 0]))  # type: ignore[union-attr]
    batch.sum().backward()
    assert torch.equal(weights.grad[:, 0], torch.tensor([2.0, 0, 0, 0, 0, 1]))  # type: ignore[index]


# ---------------------------------------------------------------------------------------------------------- read-only


def test_a_memory_map_and_a_read_only_array_need_no_copy_and_cause_no_warning(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", array(3))
    mapped = np.load(tmp_path / "data.npy", mmap_mode="r")
    assert_batches_are_torchs(mapped, samples=array(3))

    read_only = array(3)
    read_only.flags.writeable = False
    assert_batches_are_torchs(read_only, samples=array(3))
    arrays = as_array_dataset((mapped, read_only))
    assert arrays is not None
    for part in arrays.fetch(slice(0, ROWS)):
        part.zero_()
    assert np.array_equal(mapped, array(3))
    assert np.array_equal(read_only, array(3))


# --------------------------------------------------------------------------------------------------------- subsets


SUBSET_INDICES: dict[str, Any] = {
    "list": [5, 1, 1, 3],
    "negative": [-1, 1, -6, 3],
    "range": range(4, 0, -1),
    "array": np.array([5, 1, 2]),
    "tensor": torch.tensor([5, 1, 2]),
    "numbers of torch": list(torch.tensor([5, 1, 2])),
    "numbers of numpy": list(np.array([5, 1, 2], dtype="i4")),
}


@pytest.mark.parametrize("indices", SUBSET_INDICES)
def test_batches_of_a_subset_are_torchs(indices: str) -> None:
    subset = Subset(TensorDataset(rows(2), rows()), SUBSET_INDICES[indices])
    assert_batches_are_torchs(subset, samples=subset)
    whole: Any = array(2)  # torch asks for no more than an index
    assert_batches_are_torchs(Subset(whole, SUBSET_INDICES[indices]), samples=array(2)[SUBSET_INDICES[indices]])


def test_subsets_of_subsets_are_composed() -> None:
    inner = Subset(TensorDataset(rows(2), rows()), [5, 4, -4, 1])
    outer = Subset(inner, [-1, 0, 2])
    assert_batches_are_torchs(outer, samples=outer)
    assert_batches_are_torchs(Subset(outer, [2, 1, 0]), samples=Subset(outer, [2, 1, 0]))
    arrays = ArrayDataset((rows(2), rows()), torch.tensor([3, 3, 0, 1]))
    assert_batches_are_torchs(Subset(arrays, [1, 2, -1]), samples=Subset(arrays, [1, 2, -1]))


# ----------------------------------------------------------------------------------------- what is no array dataset


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Shifted(Subset[Any]):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self.dataset[index + 1] for index in indices]


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index**2)


NO_ARRAYS: dict[str, Callable[[], Any]] = {
    "subclass of TensorDataset": lambda: Doubled(rows()),
    "subclass of Subset": lambda: Shifted(TensorDataset(rows()), [0, 1, 2]),
    "Subset of something else": lambda: Subset(Squares(), [0, 1]),
    "sparse tensors": lambda: TensorDataset(rows(3).to_sparse(), rows()),
    "parameter": lambda: TensorDataset(torch.nn.Parameter(rows(2)), rows()),
    "list of samples": lambda: list(zip(rows(2), rows(), strict=True)),
    "tuple of samples": lambda: tuple(zip(rows(2), rows(), strict=True)),
    "dataset": Squares,
}


@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_loaders_that_may_have_other_samples_are_left_to_torch(kind: str) -> None:
    dataset = NO_ARRAYS[kind]()
    assert as_array_dataset(dataset) is None
    check_dataset(dataset)


BAD_DATA: dict[str, tuple[Any, str]] = {
    "lengths": ((rows(2), rows()[:5]), r"data\[0\] has 6, data\[1\] has 5"),
    "nested lengths": ({"a": {"b": rows()[:4]}, "c": array()}, r"data\['a'\]\['b'\] has 4, data\['c'\] has 6"),
    "numbers": ({"a": rows(), "b": 3}, r"data\['b'\] of the dataset is of type int"),
    "list of numbers": ((rows(2), [0, 1, 0, 1, 1, 0]), r"data\[1\]\[0\] of the dataset is of type int"),
    "0-dim": ((rows(), torch.tensor(3.0)), r"data\[1\] of the dataset is a single number"),
    "0-dim array": (np.array(3.0), r"data of the dataset is a single number"),
    "nothing": ({}, "there are no arrays"),
    "nothing within": ({"a": {}, "b": ()}, "there are no arrays"),
    "named tuple": ({"a": Point(rows(), rows())}, r"data\['a'\] of the dataset is of type Point"),
    "ordered dict": ({"a": OrderedDict(b=rows())}, r"data\['a'\] of the dataset is of type OrderedDict"),
    "sparse": ((rows(3).to_sparse(), rows()), r"data\[0\] of the dataset is not a dense tensor"),
    "matrix": ((np.ma.masked_array(array()), rows()), r"data\[0\] of the dataset is of type MaskedArray"),
    "string": ({"text": "abc"}, r"data\['text'\] of the dataset is of type str"),
}


@pytest.mark.parametrize("kind", BAD_DATA)
def test_bad_data_is_refused_by_name(kind: str) -> None:
    data, message = BAD_DATA[kind]
    with pytest.raises(DataError, match=message) as raised:
        check_dataset(data)
    assert "Pass" in str(raised.value)
