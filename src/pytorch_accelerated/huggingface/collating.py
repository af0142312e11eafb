"""Batches: collators, samplers, the removal of columns that a model does not take, and what is counted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Sampler

from pytorch_accelerated.errors import ConfigurationError, DataError
from pytorch_accelerated.processes.ranks import Ranks

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.training_args import TrainingArguments

# The labels of this task are two positions, whose names do not contain "label".
_SPAN_TASK, _SPAN_LABELS = "QuestionAnswering", ("start_positions", "end_positions")
# Columns that become "labels".
_LABELS = ("label", "label_ids")


def default_data_collator(features: Sequence[Any]) -> dict[str, torch.Tensor]:
    """A batch as a dict of tensors, with one row per feature.

    "label" becomes ``labels``, as int64 for integers and float32 otherwise. So do lists in "label_ids", while tensors
    there keep their dtype. Other columns keep their names. None and strings are left out.

    Args:
        features: dicts, or objects with attributes, all with the same names.

    Raises:
        DataError: if their names differ, or values cannot be stacked.
    """
    rows: list[Mapping[str, Any]] = [row if isinstance(row, Mapping) else vars(row) for row in features]
    other = next((row for row in rows if row.keys() != rows[0].keys()), None)
    if other is not None:
        raise DataError(
            f"Rows of a batch have different columns: {', '.join(map(repr, rows[0]))} and "
            f"{', '.join(map(repr, other)) or 'none at all'}. Give all rows the same, or pass a `data_collator`."
        )
    batch: dict[str, torch.Tensor] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if any(value is not None and not isinstance(value, str) for value in values):
            batch["labels" if name in _LABELS else name] = _stacked(name, values)
    return batch


def _stacked(name: str, values: list[Any]) -> torch.Tensor:
    first = values[0]
    try:
        if isinstance(first, torch.Tensor):
            stacked = torch.stack(values)
        elif isinstance(first, (np.ndarray, np.generic)):
            stacked = torch.from_numpy(np.stack(values))
        else:
            stacked = torch.tensor(values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"The values of {name!r} cannot be stacked to a batch ({error}). Give them one length and type first, or "
            "pass a `data_collator` that pads, such as `transformers.DataCollatorWithPadding(tokenizer)`."
        ) from error
    if name == "label" or (name == "label_ids" and not isinstance(first, torch.Tensor)):
        return stacked.to(torch.float32 if stacked.is_floating_point() else torch.int64)
    return stacked


def find_label_names(model: Any) -> list[str]:
    """The parameters of the model's forward whose names say that they are labels."""
    labels = _SPAN_LABELS if _SPAN_TASK in type(inner_model(model)).__name__ else ()
    return [name for name in _parameters_of_forward(model) if "label" in name or name in labels]


def signature_columns(model: Any, label_names: Iterable[str]) -> list[str]:
    """The columns for the model: the parameters of its forward, and the names of labels."""
    return list(dict.fromkeys([*_parameters_of_forward(model), "label", "label_ids", *label_names]))


def _parameters_of_forward(model: Any) -> list[str]:
    parameters = inspect.signature(inner_model(model).forward).parameters.values()
    any_names = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind not in any_names]


def inner_model(model: Any) -> Any:
    """The model inside a PEFT wrapper, whose own forward accepts anything."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def without_unused_columns(dataset: Any, columns: Sequence[str]) -> Any:
    """`dataset` with only these columns, if it is one of `datasets`; others are returned unchanged."""
    if getattr(dataset, "column_names", None) is None or not hasattr(dataset, "remove_columns"):
        return dataset
    unused = [name for name in dataset.column_names if name not in columns]
    if len(unused) == len(dataset.column_names):
        raise _nothing_left(unused, columns)
    return dataset.remove_columns(unused) if unused else dataset


class RemoveColumnsCollator:
    """Removes all but these columns from rows that are dicts, before another collator."""

    def __init__(self, data_collator: Callable[[list[Any]], Any], columns: Sequence[str]) -> None:
        self.data_collator = data_collator
        self.columns = columns

    def __call__(self, features: list[Any]) -> Any:
        """The batch."""
        columns = frozenset(self.columns)
        return self.data_collator(
            [
                # Most rows have nothing to remove, and a copy takes a third of the time. It is one in any case, because
                # collators remove labels from the rows that they are given.
                feature.copy()
                if type(feature) is dict and feature and feature.keys() <= columns
                else self._without_unused(feature, columns)
                for feature in features
            ]
        )

    def _without_unused(self, feature: Any, columns: Collection[str]) -> Any:
        if not isinstance(feature, (dict, Mapping)):
            return feature
        used = {name: value for name, value in feature.items() if name in columns}
        if not used:
            raise _nothing_left(list(feature), self.columns)
        return used


def _nothing_left(present: Sequence[str], columns: Sequence[str]) -> DataError:
    return DataError(
        f"The dataset has the columns {', '.join(map(repr, present)) or '(none)'}, none of which the model's forward "
        f"takes: {', '.join(map(repr, columns))}. Rename them, or set remove_unused_columns=False if your "
        "`data_collator` makes other names of them."
    )


# Rows are sorted by length within so many batches: few enough that epochs differ, enough for rows of similar length.
_BATCHES_PER_POOL = 50


class LengthGroupedSampler(Sampler[int]):
    """Yields rows in random order, but with rows of similar length in each batch.

    The first batch has the longest row, so that running out of memory happens at once.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self._lengths = torch.as_tensor(lengths)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self))
        pools = [
            pool[self._lengths[pool].argsort(descending=True, stable=True)]
            for pool in torch.split(order, _BATCHES_PER_POOL * self._batch_size)
        ]
        longest = max(range(len(pools)), key=lambda index: int(self._lengths[pools[index][0]]), default=0)
        pools[:1], pools[longest : longest + 1] = pools[longest : longest + 1], pools[:1]
        return iter(torch.cat(pools).tolist() if pools else [])


def row_lengths(dataset: Any, length_column: str, input_name: str) -> list[int]:
    """The length of each row: its column `length_column`, or else the length of its inputs."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and length_column in columns:
        return list(dataset[length_column])
    first = dataset[0] if len(dataset) else {}
    if length_column not in first and input_name not in first:
        raise ConfigurationError(
            f"Rows should be grouped by length, but a row has neither {length_column!r} nor {input_name!r}: name the "
            "column with `length_column_name`, or choose another `train_sampling_strategy`."
        )
    if length_column in first:
        return [int(row[length_column]) for row in dataset]
    return [len(row[input_name]) for row in dataset]


class PaddingCollator:
    """Pads rows with the method `pad` of a tokenizer."""

    def __init__(self, processing_class: Any) -> None:
        self._pad = processing_class.pad

    def __call__(self, features: list[Any]) -> Any:
        batch = self._pad(features, return_tensors="pt")
        for name in ("label", "label_ids"):
            if name in batch:
                batch["labels"] = batch.pop(name)
        return batch


def refuse_missing(dataset: Any, purpose: str, argument: str) -> None:
    """Reject a missing dataset, or one without rows."""
    if dataset is None:
        raise ConfigurationError(f"There is no dataset to {purpose}. Pass `{argument}`.")
    if isinstance(dataset, Mapping):
        raise DataError(f"`{argument}` is a dict, which has no rows to {purpose}. Pass one of its datasets.")
    if hasattr(dataset, "__len__") and not len(dataset):
        raise DataError(f"`{argument}` is empty, so there is nothing to {purpose}.")


class BatchCounter:
    """Counts operations and tokens of the batches of this process, as far as the batches allow it.

    Args:
        estimate: the number of operations of a batch; None if they are not counted.
        tokens_counted: "no", "all", or "non_padding".
        input_name: the column that holds the tokens.
        pad_token_id: of the tokenizer, if there is one.

    Attributes:
        counts_tokens: whether tokens are counted.
        flos: operations on this process since `take_flos` was last called.
    """

    def __init__(
        self,
        estimate: Callable[[Mapping[str, Any]], float] | None,
        *,
        tokens_counted: str,
        input_name: str,
        pad_token_id: int | None,
    ) -> None:
        self._estimate = estimate
        self._tokens_counted = tokens_counted
        self._input_name = input_name
        self._pad_token_id = pad_token_id
        self.counts_tokens = tokens_counted != "no"
        self._flos_by_shapes: dict[Hashable, float] = {}
        self.flos = 0.0
        self._tokens: list[Any] = []

    def count(self, batch: Any) -> None:
        """Count a batch that has been used."""
        if self._estimate is not None and isinstance(batch, (dict, Mapping)):
            shapes = tuple([(name, getattr(value, "shape", None)) for name, value in batch.items()])
            if shapes not in self._flos_by_shapes:  # counting the parameters takes longer than a small step
                self._flos_by_shapes[shapes] = float(self._estimate(batch))
            self.flos += self._flos_by_shapes[shapes]
        if self.counts_tokens:
            self._tokens.append(self._tokens_of(batch))

    def take_flos(self, ranks: Ranks) -> float:
        """The operations on all ranks since this was last called. Must be called by all ranks."""
        flos, self.flos = self.flos, 0.0
        return ranks.sum([flos])[0]

    def take_tokens(self, ranks: Ranks) -> int:
        """The tokens on all ranks since this was last called. Must be called by all ranks."""
        tokens, self._tokens = sum(int(tokens) for tokens in self._tokens), []
        return int(ranks.sum([tokens])[0])

    def _tokens_of(self, batch: Mapping[str, Any]) -> Any:
        tokens = batch[self._input_name]
        if self._tokens_counted == "non_padding":
            if "attention_mask" in batch:
                return batch["attention_mask"].sum()
            if self._pad_token_id is not None:
                return (tokens != self._pad_token_id).sum()
        return tokens.numel()


def items_of_update(own: int, everyones: int, args: TrainingArguments) -> int:
    """The number of items that the loss of an update is divided by, from those of this rank and of all."""
    return everyones if args.average_tokens_across_devices else max(1, own)  # without any label 0 is added, not 0 / 0
