"""Batches that are read by columns are those that the collate functions make of rows."""

import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from pytorch_accelerated.data.arrow import column_reader
from pytorch_accelerated.huggingface.models.collating import RemoveColumnsCollator, default_data_collator
from tests.data.loaders import adapted

ROWS = 4


class Doubled(RemoveColumnsCollator):
    def __call__(self, features: list[Any]) -> Any:
        return {name: 2 * values for name, values in super().__call__(features).items()}


def of_mappings(features: list[Any]) -> Any:
    return default_data_collator(features)


COLLATE: dict[str, Callable[[list[Any]], Any]] = {
    "torch": default_collate,
    "Hugging Face": default_data_collator,
    "only some columns": RemoveColumnsCollator(default_data_collator, ["x", "label"]),
    "other columns": RemoveColumnsCollator(default_data_collator, ["unknown"]),
    "only some, by torch": RemoveColumnsCollator(default_collate, ["x"]),
    "override": Doubled(default_data_collator, ["x", "label"]),
    "the user's": of_mappings,
}
TYPES = [
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bool",
]


def stored(values: list[Any], feature: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": values}, features=datasets.Features({"x": feature}))


def numbers_of(kind: str) -> list[Any]:
    values = np.array([0, 1, 3, 100], dtype=kind) if kind != "bool" else np.array([True, False, True, True])
    return (values / 3 if kind == "float64" else values).tolist()


def scalars(kind: str) -> datasets.Dataset:
    return stored(numbers_of(kind), datasets.Value(kind))


def lists(kind: str) -> datasets.Dataset:
    return stored([numbers_of(kind)[i:] + numbers_of(kind)[:i] for i in range(4)], datasets.List(datasets.Value(kind)))


def of(**columns: Any) -> Callable[[], datasets.Dataset]:
    return lambda: datasets.Dataset.from_dict(columns)


NUMBERS = [1, 2, 3, 4]
WITH_COLUMNS: dict[str, Callable[[], datasets.Dataset]] = {
    **{f"{kind}": functools.partial(scalars, kind) for kind in TYPES},
    **{f"lists of {kind}": functools.partial(lists, kind) for kind in TYPES},
    "large list": lambda: stored([[1, 2]] * 4, datasets.LargeList(datasets.Value("int32"))),
    "lists of one size by type": lambda: stored([[1, 2]] * 4, datasets.List(datasets.Value("int32"), length=2)),
    "one number each": of(x=[[1], [2], [3], [4]]),
    "extreme": of(x=[1e300, -1e300, 1e-320, float("nan")], y=[float("inf"), -0.0, 0.1, 16777217.0]),
    "large integers": of(x=[2**62, -(2**63), 2**63 - 1, 0]),
    "labels": of(x=[[1.0], [2.0], [3.0], [4.0]], label=NUMBERS),
    "labels of decimals": of(label=[0.1, 0.2, 0.3, 0.4], x=NUMBERS),
    "labels of truth values": of(label=[True, False, True, True], x=NUMBERS),
    "lists of labels": of(x=NUMBERS, label_ids=[[1, 2]] * 4),
    "all names of labels": of(labels=[5, 6, 7, 8], x=NUMBERS, label=[0.5] * 4, label_ids=NUMBERS),
    "classes": lambda: stored(["a", "b", "a", "b"], datasets.ClassLabel(names=["a", "b"])),
    "text": of(x=NUMBERS, text=["a", "b", "c", "d"]),
    "only text": of(text=["a", "b", "c", "d"]),
    "None and text": of(x=NUMBERS, text=["a", None, "c", "d"]),
    "nothing": of(x=NUMBERS, nothing=[None] * 4),
    "None and numbers": of(x=[1, None, 3, 4]),
    "None in a list": of(x=[[1, 2], [3, None], [5, 6], [7, 8]]),
    "None for a list": of(x=[[1, 2], None, [5, 6], [7, 8]]),
    "several sizes": of(x=[[1], [2, 3], [4], [5]]),
    "several sizes of one sum": of(x=[[1], [2, 3, 4], [5, 6], [7, 8]]),
    "empty lists": of(x=[[], [], [], []]),
    "matrices": of(x=[[[1, 2], [3, 4]]] * 4),
    "lists of text": of(x=[["a", "b"]] * 4),
    "dicts": of(x=[{"a": 1}] * 4),
    "array feature": lambda: stored([[[1, 2], [3, 4]]] * 4, datasets.Array2D((2, 2), "int32")),
    "dates": lambda: stored(NUMBERS, datasets.Value("timestamp[s]")),
    "bytes": lambda: stored([b"a"] * 4, datasets.Value("binary")),
    "selection": lambda: of(x=[[n, -n] for n in range(10)], label=list(range(10)))().select([7, 1, 3, 5]),
    "shards": lambda: datasets.concatenate_datasets([of(x=[[1, 2], [3, 4]])(), of(x=[[5, 6], [7, 8]])()]),
    "part of the columns": lambda: of(x=NUMBERS, y=NUMBERS)().with_format(None, columns=["y"]),
    "transform": lambda: of(x=NUMBERS)().with_transform(lambda rows: {"x": [-x for x in rows["x"]]}),
    "torch format": lambda: of(x=NUMBERS)().with_format("torch"),
    "numpy format": lambda: of(x=NUMBERS)().with_format("numpy"),
}


@pytest.mark.parametrize("collate", COLLATE)
@pytest.mark.parametrize("columns", WITH_COLUMNS)
def test_batches_and_errors_are_those_of_rows(columns: str, collate: str) -> None:
    dataset, collate_fn = WITH_COLUMNS[columns](), COLLATE[collate]
    indices = [2, 0, 3, 1]
    batches = adapted(DataLoader(dataset, ROWS, sampler=indices, collate_fn=collate_fn))
    assert outcome(lambda: next(iter(batches))) == outcome(lambda: collate_fn(dataset.__getitems__(indices)))


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("columns", ["float64", "lists of float32", "labels of decimals", "extreme", "int8"])
@pytest.mark.parametrize("collate", ["torch", "Hugging Face"])
def test_torchs_default_type_counts(columns: str, collate: str) -> None:
    test_batches_and_errors_are_those_of_rows(columns, collate)


@pytest.mark.parametrize(
    ("collate", "columns"),
    [("torch", "int64"), ("torch", "float32"), ("torch", "bool")]
    + [("Hugging Face", columns) for columns in ("int32", "lists of float64", "labels", "None and text", "shards")]
    + [("only some columns", "all names of labels"), ("only some, by torch", "text"), ("Hugging Face", "selection")],
)
def test_columns_are_read_without_rows(collate: str, columns: str) -> None:
    reader = column_reader(WITH_COLUMNS[columns](), COLLATE[collate])
    assert reader is not None
    assert reader.read([1, 0]) is not None
    assert described(pickle.loads(pickle.dumps(reader)).read([1, 0])) == described(reader.read([1, 0]))


def test_tensors_are_the_users_own() -> None:
    dataset = of(x=[[1.0, 2.0]] * 4, label=NUMBERS)()
    reader = column_reader(dataset, default_data_collator)
    assert reader is not None
    for index in range(2):
        batch = reader.read([0, 1, 2, 3])
        assert batch is not None
        assert batch["x"][0, 0] == 1.0, f"read {index}: an earlier batch is in the dataset's memory"
        batch["x"].add_(1.0)
        batch["labels"].add_(1)


def test_a_row_that_does_not_exist_is_an_error_of_the_dataset() -> None:
    loader = adapted(DataLoader(of(x=NUMBERS)(), 2, sampler=[0, 9], collate_fn=default_data_collator))
    with pytest.raises(IndexError, match="9"):
        list(loader)


def test_a_format_set_later_counts() -> None:
    dataset = of(x=NUMBERS)()
    loader = adapted(DataLoader(dataset, ROWS, collate_fn=default_data_collator))
    assert next(iter(loader))["x"].tolist() == NUMBERS
    dataset.set_transform(lambda rows: {"x": [-x for x in rows["x"]]})
    assert next(iter(loader))["x"].tolist() == [-number for number in NUMBERS]


class OwnDataset(datasets.Dataset):  # type: ignore[misc]
    def __getitems__(self, keys: list[int]) -> Any:
        return [{"x": -key} for key in keys]


def test_a_subclass_of_the_dataset_is_read_by_rows() -> None:
    dataset = OwnDataset(of(x=NUMBERS)().data)
    assert column_reader(dataset, default_data_collator) is None
    (batch,) = adapted(DataLoader(dataset, ROWS, collate_fn=default_data_collator))
    assert batch["x"].tolist() == [0, -1, -2, -3]


def outcome(batch: Callable[[], Any]) -> Any:
    """The batch, or the error."""
    try:
        return described(batch())
    except Exception as error:
        return type(error), str(error)


def described(batch: Any) -> Any:
    """A batch as plain values, with the types of all its parts."""
    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.stride(), batch.shape, str(batch.tolist())  # NaN equals NaN
    if isinstance(batch, dict):
        return type(batch), [(name, described(part)) for name, part in batch.items()]
    if isinstance(batch, (list, tuple)):
        return type(batch), [described(part) for part in batch]
    return type(batch), str(batch)
