"""Nested containers are walked, rebuilt, merged and cut in one way, whatever their kinds."""

from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from pytorch_accelerated.facts.trees import (
    count_rows,
    leaves,
    map_leaves,
    map_paths,
    merged,
    parts_of,
    rebuilt,
    tensors_in,
)

Pair = namedtuple("Pair", ["left", "right"])

TREE = {"a": [1, (2, None)], "b": Pair(3, UserDict(c="text")), 4: []}


def test_leaves_come_in_order() -> None:
    assert list(leaves(TREE)) == [1, 2, None, 3, "text"]
    assert list(leaves("text")) == ["text"]
    assert parts_of("text") is None


def test_paths_are_written_as_python_would() -> None:
    paths = map_paths(lambda path, leaf: path, TREE, "batch")
    assert list(leaves(paths)) == [
        "batch['a'][0]",
        "batch['a'][1][0]",
        "batch['a'][1][1]",
        "batch['b'].left",
        "batch['b'].right['c']",
    ]
    assert map_paths(lambda path, leaf: (path, leaf), 5) == ("", 5)


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ([1, 2], [5, 6]),
        ((1, 2), (5, 6)),
        (Pair(1, 2), Pair(5, 6)),
        ({"x": 1, "y": 2}, {"x": 5, "y": 6}),
        (OrderedDict(x=1, y=2), {"x": 5, "y": 6}),
        (UserDict(x=1, y=2), {"x": 5, "y": 6}),
        (MappingProxyType({"x": 1, "y": 2}), {"x": 5, "y": 6}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_are_rebuilt(container: Any, expected: Any) -> None:
    parts = {1: 5, 2: 6}
    for found in (rebuilt(container, [5, 6]), map_leaves(parts.__getitem__, container)):
        assert found == expected
        assert type(found) is type(expected)


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_mappings_keep_their_kind_if_that_is_wanted(kind: Any) -> None:
    mapping: Any = kind(x=[1], y=2)
    found = map_leaves(str, mapping, keep_mappings=True)
    assert type(found) is kind
    assert dict(found) == {"x": ["1"], "y": "2"}
    assert dict(mapping) == {"x": [1], "y": 2}


def test_the_named_results_of_torch_keep_their_kind() -> None:
    result = torch.ones(2, 3).max(1)
    found = map_leaves(lambda tensor: tensor[None], result)
    assert type(found) is type(result)
    assert found.values.shape == (1, 2)


def test_trees_are_merged_where_they_are_alike() -> None:
    trees = [{"x": (1, 2), "y": [1]}, {"y": [2, 3], "x": (3, 4)}]
    assert merged(list, trees) == {"x": ([1, 3], [2, 4]), "y": [[1], [2, 3]]}
    assert merged(tuple, [(1, 2), [1, 2]]) == ((1, 2), [1, 2])
    assert merged(sum, [UserDict(x=1), UserDict(x=2)], keep_mappings=True) == UserDict(x=3)
    assert merged(sum, [Pair(1, 2), Pair(3, 4)]) == Pair(4, 6)


def test_rows_are_counted_and_cut() -> None:
    batch: Any = UserDict(x=torch.arange(6).view(3, 2), more=Pair("text", [torch.arange(3), None]))
    assert count_rows(batch) == 3
    assert len(tensors_in(batch)) == 2


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.zeros(4), torch.zeros(5)), 4),
        ({"ids": torch.zeros(2, 9), "x": 1}, 2),
        (["a", "b"], None),
        ([{"a": "text"}, (torch.tensor(1.0), np.zeros((7, 1)))], 7),
        ("text", None),
        (torch.tensor(1.0), None),
        ((), None),
        ((torch.tensor(1.0), torch.zeros(0, 3)), 0),
        (None, None),
    ],
    ids=str,
)
def test_the_size_of_a_batch_is_the_first_dimension_of_its_first_array(batch: Any, size: int | None) -> None:
    assert count_rows(batch) == size
