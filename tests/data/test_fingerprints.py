"""A fingerprint tells rows apart, is the same in every process, and costs the user nothing that can be seen."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from pytorch_accelerated.data.fingerprints import Fingerprint, hash_of_contents
from tests.data.loaders import Numbers, SizedStream, Stream, adapted

DATA = TensorDataset(torch.arange(20.0), torch.arange(20) % 3)


def of(dataset: Any, **kwargs: Any) -> Fingerprint:
    return adapted(DataLoader(dataset, 2), **kwargs).fingerprint


class Rows(Dataset[Any]):
    """Rows made by a function of their index."""

    def __init__(self, make: Any, size: int = 9) -> None:
        self.make = make
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def contents_of(make: Any, **kwargs: Any) -> str | None:
    return hash_of_contents(DataLoader(Rows(make), **kwargs))


def a_split(seed: int) -> Subset[Any]:
    return random_split(DATA, [12, 8], generator=torch.Generator().manual_seed(seed))[0]


def tensors_of(split: Subset[Any]) -> TensorDataset:
    rows = [split[index] for index in range(len(split))]
    return TensorDataset(*(torch.stack(column) for column in zip(*rows, strict=True)))


COPIES = {
    "the split itself": lambda split: split,
    "a list": list,
    "tensors": tensors_of,
    "bare tensors": lambda split: tensors_of(split).tensors,
    "a dataset of the user's": lambda split: Rows(list(split).__getitem__, len(split)),
    "strings": lambda split: [f"row {float(x)}" for x, _ in split],
    "dicts of arrays": lambda split: [{"x": np.asarray(x), "y": int(y)} for x, y in split],
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copied_split_is_distinguished_from_another_one(copied: Any) -> None:
    assert of(copied(a_split(1))) == of(copied(a_split(1)))
    assert of(copied(a_split(1))).difference(of(copied(a_split(2)))) is not None


def test_indices_count_at_every_level_and_in_any_container() -> None:
    def indices_of(*indices: Any) -> str | None:
        dataset: Any = DATA
        for some in indices:
            dataset = Subset(dataset, some)
        return of(dataset).indices

    assert indices_of([1, 2, 3]) == indices_of(np.array([1, 2, 3])) == indices_of(range(1, 4))
    assert indices_of([1, 2, 3]) == indices_of(torch.tensor([1, 2, 3]))
    assert indices_of([1, 2, 3]) != indices_of([1, 3, 2])
    assert indices_of([1, 2, 3], [0]) != indices_of([2, 1, 3], [0])
    assert indices_of([1, 2, 3]) != indices_of([1, 2], [3 - 3])
    assert indices_of() is None
    names: Any = ["a", "b"]
    assert of(Subset(Rows(str.upper), names)).indices != of(Subset(Rows(str.upper), names[::-1])).indices


def test_only_the_length_of_a_stream_is_known_and_nothing_of_shares() -> None:
    assert of(SizedStream(3)) == Fingerprint(rows=3)
    assert of(Stream(3)) == Fingerprint()
    assert of(SizedStream(3), is_sharded=True) == Fingerprint()
    assert adapted([1, 2]).fingerprint == Fingerprint()


def test_three_rows_are_fetched_and_no_others() -> None:
    dataset = Numbers(9)
    of(dataset)
    assert dataset.asked == [0, 4, 8] * 2
    for size in (1, 2):
        of(small := Numbers(size))
        assert small.asked == list(range(size)) * 2
    of(none := Numbers(0))
    assert none.asked == []


def test_rows_of_workers_are_fetched_in_a_worker() -> None:
    dataset = Numbers(9)
    with_workers = adapted(DataLoader(dataset, 2, num_workers=2, persistent_workers=True)).fingerprint
    # A file that a dataset opens at its first fetch would be shared by all workers otherwise.
    assert dataset.asked == []
    assert with_workers == of(dataset)


def test_rows_made_at_random_are_the_same_each_time_and_generators_are_left_alone() -> None:
    def make(index: int) -> Any:
        return torch.rand(2), np.random.rand(2), random.random(), index

    torch.manual_seed(1)
    first = contents_of(make)
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # type: ignore[index]
    torch.rand(1)
    assert contents_of(make) == first is not None
    torch.manual_seed(1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # type: ignore[index]
    assert before[2] == random.getstate()


class Opaque:
    """An opaque object."""


class Image:
    """Like the images of a library: can be converted to an array."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.full((2, 2), self.value, dtype=np.uint8)


ROWS = {
    "float": lambda value: value / 7,
    "text": lambda value: f"text {value}",
    "image": Image,
    "dict": lambda value: {"a": [(torch.tensor([value]),)]},
    "keys": lambda value: {value: 0},
    "complex": lambda value: torch.tensor([1j * value]),
    "sparse": lambda value: torch.tensor([0.0, value]).to_sparse(),
    "one hot": lambda value: torch.nn.functional.one_hot(torch.tensor(value), 99).float(),
    "beside an opaque one": lambda value: (Opaque(), value),
    "not finite": lambda value: torch.tensor([float("nan"), float("inf"), value]),
}


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_rows_of_all_kinds_are_distinguished(make: Any) -> None:
    first = contents_of(lambda index: make(4))
    assert first is not None
    assert contents_of(lambda index: make(4)) == first
    assert contents_of(lambda index: make(5)) != first
    assert contents_of(lambda index: make(5 if index == 4 else 4)) != first


@pytest.mark.parametrize("kind", [str, Path])
def test_the_folder_of_a_file_does_not_count_but_its_name_does(kind: Any) -> None:
    first, elsewhere, other = (
        contents_of(lambda index, path=path: kind(path))
        for path in ("/node_1/cache/a.wav", "/node_2/cache/a.wav", "/node_1/cache/b.wav")
    )
    assert first == elsewhere != other
    texts = [contents_of(lambda index, text=text: text) for text in ("this and/or that", "these and/or that")]
    assert texts[0] != texts[1]


def test_the_last_digits_of_a_row_do_not_count() -> None:
    # Another make of processor may compute them differently.
    torch.manual_seed(0)
    row = torch.randn(1000)
    other = row * (1 + 1e-7 * torch.randn(1000))
    assert not torch.equal(row, other)
    assert contents_of(lambda index: row) == contents_of(lambda index: other)


def _fails(index: int) -> Any:
    raise ValueError(f"there is no row {index}")


def _itself(index: int) -> Any:
    row: list[Any] = []
    row.append(row)
    return row


def test_rows_that_cannot_be_fetched_or_looked_into_are_left_out() -> None:
    assert contents_of(_fails) is None
    assert contents_of(_fails, num_workers=1) is None
    assert contents_of(lambda index: Opaque()) == contents_of(lambda index: Opaque())
    assert contents_of(lambda index: {Opaque()}) == contents_of(lambda index: {Opaque()})
    assert contents_of(_itself) == contents_of(_itself)
    assert Fingerprint(9, None, None).difference(Fingerprint(9, None, "some")) is None
    of_another_version = Fingerprint(9, "0-some", "0-some")
    assert Fingerprint(9, "1-other", "1-other").difference(of_another_version) is None
