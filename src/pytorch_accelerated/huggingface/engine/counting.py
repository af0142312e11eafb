"""Counts operations and tokens of the batches of a training run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import DataError
from pytorch_accelerated.processes.ranks import Ranks


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
        if self._input_name not in batch:
            raise DataError(
                f"Tokens are to be counted (`include_num_input_tokens_seen` is {self._tokens_counted!r}), but the "
                f"batch has no {self._input_name!r}, only {', '.join(map(repr, batch))}. Set `main_input_name` of the "
                "model to one of them, or set `include_num_input_tokens_seen` to 'no'."
            )
        tokens = batch[self._input_name]
        if self._tokens_counted == "non_padding":
            if "attention_mask" in batch:
                return batch["attention_mask"].sum()
            if self._pad_token_id is not None:
                return (tokens != self._pad_token_id).sum()
        return tokens.numel()


def operations_of(model: Any, tokens: Any) -> float:
    """Estimate the operations of a forward and backward pass: 6 per token and parameter that is not an embedding.

    0.0 unless `has_operations`.
    """
    if not isinstance(tokens, torch.Tensor) or not has_operations(model):
        return 0.0
    return 6.0 * tokens.numel() * int(model.num_parameters(exclude_embeddings=True))


def has_operations(model: Any) -> bool:
    """Whether the model has the method ``num_parameters``, as those of `transformers` do."""
    return callable(getattr(model, "num_parameters", None))
