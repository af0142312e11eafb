"""The default collator, label names, and the removal of unused columns."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accelerated.errors import DataError
from pytorch_accelerated.huggingface.knowledge import (
    RemoveColumnsCollator,
    default_data_collator,
    find_label_names,
    signature_columns,
    without_unused_columns,
)


class Classifier(nn.Module):
    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        return input_ids, attention_mask, labels


class TinyForQuestionAnswering(nn.Module):
    def forward(self, input_ids: Any, start_positions: Any = None, end_positions: Any = None) -> Any:
        return input_ids, start_positions, end_positions


def assert_same_batch(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(
    "rows",
    [
        [{"label": 1, "x": [1, 2]}, {"label": 0, "x": [3, 4]}],
        [{"label": 0.5, "x": [1.0]}, {"label": 1.5, "x": [2.0]}],
        [{"label": torch.tensor(1), "x": torch.ones(2)}, {"label": torch.tensor(2), "x": torch.zeros(2)}],
        [{"label": torch.tensor(0.5, dtype=torch.float64)}, {"label": torch.tensor(1.0, dtype=torch.float64)}],
        [{"label_ids": [1, 2]}, {"label_ids": [3, 4]}],
        [{"label_ids": [1.0, 2.0]}, {"label_ids": [3.0, 4.0]}],
        [{"label_ids": torch.tensor([1, 2])}, {"label_ids": torch.tensor([3, 4])}],
        [{"label_ids": torch.tensor([0.5]).double()}, {"label_ids": torch.tensor([1.5]).double()}],
        [{"labels": 1, "x": np.array([0.5])}, {"labels": 2, "x": np.array([1.5])}],
        [{"x": np.float64(0.5), "flag": True}, {"x": np.float64(1.5), "flag": False}],
        [SimpleNamespace(label=1, x=[1, 2]), SimpleNamespace(label=0, x=[3, 4])],
        [{"label": None, "text": "a", "x": 1}, {"label": None, "text": "b", "x": 2}],
    ],
)
def test_batches_are_those_of_transformers(rows: list[Any]) -> None:
    from transformers import default_data_collator as genuine_collator

    assert_same_batch(default_data_collator(rows), genuine_collator(rows))


def test_label_names_are_found_in_the_signature() -> None:
    assert find_label_names(Classifier()) == ["labels"]
    assert find_label_names(TinyForQuestionAnswering()) == ["start_positions", "end_positions"]
    assert find_label_names(nn.Linear(1, 1)) == []


def test_unknown_columns_of_a_dataset_are_removed() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"input_ids": [[1], [2]], "text": ["a", "b"], "label": [0, 1]})
    columns = signature_columns(Classifier(), ["labels"])
    assert without_unused_columns(dataset, columns).column_names == ["input_ids", "label"]
    assert dataset.column_names == ["input_ids", "text", "label"]
    with pytest.raises(DataError, match="has the columns 'text', none of which.*remove_unused_columns=False"):
        without_unused_columns(dataset.select_columns(["text"]), columns)


def test_unknown_columns_of_dict_rows_are_removed_in_the_collator() -> None:
    collator = RemoveColumnsCollator(list, signature_columns(Classifier(), ["my_target"]))
    row = {"input_ids": 1, "text": "a", "label": 0, "label_ids": 0, "my_target": 2}
    assert collator([row, row]) == [{"input_ids": 1, "label": 0, "label_ids": 0, "my_target": 2}] * 2
    assert collator([(1, 2)]) == [(1, 2)]
    with pytest.raises(DataError, match="has the columns 'text'"):
        collator([{"text": "a"}])
    with pytest.raises(DataError, match="has the columns .none"):
        collator([{}])


@pytest.mark.parametrize("row", [{"input_ids": 1, "label": 0}, {"input_ids": 1, "label": 0, "text": "a"}])
def test_a_collator_may_change_the_rows_that_it_is_given(row: dict[str, Any]) -> None:
    def taking_labels(rows: list[dict[str, int]]) -> list[int]:
        return [each.pop("label") for each in rows]

    collator = RemoveColumnsCollator(taking_labels, signature_columns(Classifier(), []))
    assert collator([row]) == collator([row]) == [0]
