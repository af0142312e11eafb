"""What is counted of the batches of a training run: operations and tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.errors import DataError
from pytorch_accelerated.processes.ranks import Ranks

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.trainer import Trainer


class BatchCounter:
    """Counts operations and tokens of the batches of this process, as far as there is anything to count.

    Args:
        trainer: estimates operations; its arguments say which tokens count.

    Attributes:
        counts_tokens: whether tokens are counted.
        flos: operations on this process since `take_flos` was last called.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._tokens_counted = str(trainer.args.include_num_input_tokens_seen)
        self.counts_tokens = self._tokens_counted != "no"
        self._flos_by_shapes: dict[Hashable, float] = {}
        self.flos = 0.0
        self._tokens: list[Any] = []

    def count(self, batch: Any) -> None:
        """Count a batch that has been used."""
        self.flos += self._estimate(batch)
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

    def _estimate(self, batch: Any) -> float:
        """It takes the number of parameters, which takes longer than a small step to count: so once for each shape."""
        if not isinstance(batch, Mapping):
            return 0.0
        shapes = tuple(
            (name, value.shape if isinstance(value, torch.Tensor) else None) for name, value in batch.items()
        )
        if shapes not in self._flos_by_shapes:
            self._flos_by_shapes[shapes] = float(self._trainer.floating_point_ops(batch))
        return self._flos_by_shapes[shapes]

    def _tokens_of(self, batch: Mapping[str, Any]) -> Any:
        name = self._trainer._main_input_name
        if name not in batch:
            raise DataError(
                f"Tokens are to be counted (`include_num_input_tokens_seen` is {self._tokens_counted!r}), but the "
                f"batch has no {name!r}, only {', '.join(map(repr, batch))}. Set `main_input_name` of the model to "
                "one of them, or leave the counting out."
            )
        if self._tokens_counted != "non_padding":
            return batch[name].numel()
        if "attention_mask" in batch:
            return batch["attention_mask"].sum()
        padding = getattr(self._trainer.processing_class, "pad_token_id", None)
        return batch[name].numel() if padding is None else (batch[name] != padding).sum()
