"""Batches of rows of similar lengths, by the number of tokens that they have with their padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.facts.settings import check_positive_count


class TokenBatches(Sampler[list[int]]):
    """A batch sampler: batches of rows of similar lengths, each of at most `max_tokens` tokens with padding.

    ::

        batches = TokenBatches(lengths, max_tokens=16_384)
        trainer.train(dataset, num_epochs=3, train_dataloader_kwargs={"batch_sampler": batches})

    The tokens of a batch are its longest row times its rows: short rows come in large batches, long ones in small ones.
    Rows of one length are shuffled over all of their batches, rows of similar lengths over `mixed_batches`, and the
    batches among each other. Every epoch has the same number of batches, so schedules know the length of a run. In a
    run, seed and epoch determine all that; elsewhere, torch's generator does.

    Args:
        lengths: the length of each row of the dataset, in tokens: whole numbers in a list, an array or a tensor.
        max_tokens: of a batch on one rank.
        mixed_batches: the batches over which rows are shuffled. With more of them, epochs differ more, and rows of a
            batch differ more in length.

    Raises:
        ArgumentTypeError: for lengths or a number that are not whole numbers.
        ConfigurationError: if a row alone has more tokens, or a number is below 1.
    """

    def __init__(self, lengths: Any, max_tokens: int, *, mixed_batches: int = 8) -> None:
        check_positive_count("max_tokens", max_tokens)
        check_positive_count("mixed_batches", mixed_batches)
        self.max_tokens, self.mixed_batches = max_tokens, mixed_batches
        self.lengths = torch.as_tensor(lengths)
        if self.lengths.ndim != 1 or self.lengths.is_floating_point() or self.lengths.is_complex():
            raise ArgumentTypeError(
                f"`lengths` has the shape {tuple(self.lengths.shape)} and the dtype {self.lengths.dtype}: pass a whole "
                "number for each row of the dataset, the length of the row in tokens."
            )
        too_long = torch.nonzero(self.lengths > max_tokens).flatten().tolist()
        if too_long:
            raise ConfigurationError(
                f"Row {too_long[0]} has {self.lengths[too_long[0]]} tokens, and {len(too_long)} in all have more than "
                f"the {max_tokens} of a batch. Cut them, leave them out, or raise `max_tokens`."
            )
        self._sizes = list(self._sizes_of_groups())

    def __len__(self) -> int:
        """The number of batches, in every epoch."""
        return sum(-(-rows // size) for rows, size in self._sizes)

    def __iter__(self) -> Iterator[list[int]]:
        shuffled = torch.randperm(len(self.lengths))
        longest_first = shuffled[torch.argsort(self.lengths[shuffled], descending=True, stable=True)]
        groups = zip(torch.split(longest_first, [rows for rows, _ in self._sizes]), self._sizes, strict=True)
        mixed = (torch.split(group[torch.randperm(len(group))], size) for group, (_, size) in groups)
        batches = list(itertools.chain.from_iterable(mixed))
        return (batches[index].tolist() for index in torch.randperm(len(batches)).tolist())

    def _sizes_of_groups(self) -> Iterator[tuple[int, int]]:
        """The rows of each group that is shuffled together, longest first, and the rows of its full batches."""
        longest_first, start = self.lengths.sort(descending=True).values.tolist(), 0
        while start < len(longest_first):
            size = self.max_tokens // max(1, longest_first[start])
            rows = min(size * self.mixed_batches, len(longest_first) - start)
            yield rows, size
            start += rows
