"""Checks the rows of this rank, brings them to host memory, and hands them on in blocks."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pytorch_accelerated.errors import ArgumentTypeError, DataError
from pytorch_accelerated.prediction.arriving import ArrivingRows
from pytorch_accelerated.prediction.blocks import Blocks, Kinds, number_of_rows
from pytorch_accelerated.prediction.nested import ROOT, Leaves, without_classes
from pytorch_accelerated.trees import map_paths

HOOK = "`calculate_predict_batch_outputs`"


class CollectedRows:
    """Takes batches of predictions to host memory and hands them on in blocks.

    Args:
        keep: called with each block as soon as it is full, and with the last one by `finish`.
        block_bytes: size of a block; it has at least one row.
        storable: dtypes that `keep` supports; None: all.
        source: what the rows come from, for error messages.
    """

    def __init__(
        self,
        keep: Callable[[Leaves], None],
        *,
        block_bytes: int,
        storable: Container[torch.dtype] | None = None,
        source: str = HOOK,
    ) -> None:
        self.structure: Any = None  # of the first batch, with paths in place of tensors
        self._keep = keep
        self._block_bytes = block_bytes
        self._storable = storable
        self._source = source
        self._kinds: Kinds = {}
        self._batches: list[tuple[int, int]] = []
        self._blocks: Blocks | None = None
        self._arriving = ArrivingRows(self._put)

    def facts(self) -> RowFacts:
        return RowFacts(self._kinds, without_classes(self.structure), self._batches)

    def add(self, start: int, predictions: Any) -> None:
        leaves = self._checked(start, predictions)
        self._batches.append((start, number_of_rows(leaves)))
        self._arriving.add(leaves)

    def finish(self) -> None:
        self._arriving.finish()
        if self._blocks is not None:
            for block in self._blocks.rest():
                self._keep(block)

    def _put(self, leaves: Leaves) -> None:
        assert self._blocks is not None
        for block in self._blocks.put(leaves):
            self._keep(block)

    def _checked(self, start: int, predictions: Any) -> Leaves:
        where = f"The predictions of the batch that begins at row {start}"
        leaves: Leaves = {}
        complaints: list[str] = []

        def store(path: str, leaf: Any) -> str:
            try:
                leaves[path] = _as_tensor(leaf)
            except TypeError as error:
                complaints.append(f"{path} is {error}")
            return path

        structure = map_paths(store, predictions, ROOT)
        if complaints:
            raise ArgumentTypeError(
                f"{where} contain values other than tensors: {'; '.join(complaints)}. Return only tensors or "
                f"arrays with one row per sample from {self._source}, alone or in tuples, lists and dicts."
            )
        lengths = {leaf.shape[0] if leaf.ndim else None for leaf in leaves.values()}
        if len(lengths) != 1 or None in lengths:
            found = ", ".join(
                f"{path} has {len(leaf)}" if leaf.ndim else f"{path} is a single number"
                for path, leaf in leaves.items()
            )
            raise DataError(
                f"{where} must have one row per sample in each tensor, but {found or 'there is no tensor'}. Return "
                f"such rows from {self._source}, without values that belong to the whole batch."
            )
        kinds = {path: (leaf.dtype, tuple(leaf.shape[1:])) for path, leaf in leaves.items()}
        if self._blocks is None:
            self._begin(kinds, structure)
        elif kinds != self._kinds:
            raise DataError(
                f"{where} cannot be joined with those before them: {_difference(kinds, self._kinds)}. Return rows of "
                f"one shape and dtype from {self._source}; pad them there if their lengths vary."
            )
        return leaves

    def _begin(self, kinds: Kinds, structure: Any) -> None:
        if self._storable is not None:
            refused = [f"{path} is {dtype}" for path, (dtype, _) in kinds.items() if dtype not in self._storable]
            if refused:
                raise ArgumentTypeError(
                    f"Some predictions have a dtype that safetensors files cannot hold: {', '.join(refused)}. Convert "
                    f"them in {self._source}, or predict without `output_path`."
                )
        self.structure = structure
        self._kinds = kinds
        self._blocks = Blocks(kinds, self._block_bytes)


class RowFacts(NamedTuple):
    """The facts about a rank's rows that the other ranks need.

    Attributes:
        kinds: of the tensors; empty if the rank had no batch.
        structure: with paths in place of tensors and an ordered dict in place of each named tuple, because classes can
            be neither stored nor sent.
        batches: start and number of rows of each batch, in the order in which they were added.
    """

    kinds: Kinds
    structure: Any
    batches: list[tuple[int, int]]


def agreed(everyones: Sequence[RowFacts], *, source: str = HOOK) -> tuple[Kinds, Any]:
    """Kinds and structure of the predictions of all ranks; of an empty vector if there is no batch at all.

    `source` is what the rows come from, for error messages.

    Raises:
        DataError: if the kinds differ.
    """
    known = [(rank, facts) for rank, facts in enumerate(everyones) if facts.kinds]
    if not known:
        return {ROOT: (torch.float32, ())}, ROOT
    (first, expected), *others = known
    for rank, facts in others:
        if facts.kinds != expected.kinds:
            raise DataError(
                f"The predictions of rank {rank} cannot be joined with those of rank {first}: "
                f"{_difference(facts.kinds, expected.kinds)}. Return rows of one shape and dtype from "
                f"{source}; pad them there to the same length on all ranks if it varies."
            )
    return expected.kinds, expected.structure


def _as_tensor(leaf: Any) -> torch.Tensor:
    """The dense tensor that `leaf` is, or that its values make.

    Raises:
        TypeError: if there is none; the message says what `leaf` is instead.
    """
    if isinstance(leaf, np.ndarray):
        try:
            return torch.from_numpy(np.array(leaf))  # a copy: not every array can be shared with torch
        except (TypeError, ValueError):
            raise TypeError(f"an array of {leaf.dtype}, which torch has no dtype for") from None
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"a {type(leaf).__name__} ({leaf!r:.50})" if leaf is not None else "None")
    if leaf.layout is not torch.strided or leaf.is_nested:
        raise TypeError("a sparse or nested tensor, which has no rows of one size")
    return leaf


def _difference(found: Kinds, expected: Kinds) -> str:
    def described(kind: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
        return "missing" if kind is None else f"{kind[0]} with rows of shape {kind[1]}"

    return ", ".join(
        f"{path} is {described(found.get(path))} instead of {described(expected.get(path))}"
        for path in {**expected, **found}
        if found.get(path) != expected.get(path)
    )
