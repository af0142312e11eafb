"""Measures time and memory, and counts operations and tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments
from pytorch_accelerated.processes.ranks import Ranks


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: int | None = None,
    num_steps: int | None = None,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """Seconds since `start_time` and rates per second, with names that begin with `split`.

    Args:
        split: for example "train".
        start_time: of `time.time`.
        num_samples: gives ``<split>_samples_per_second``.
        num_steps: gives ``<split>_steps_per_second``.
        num_tokens: gives ``<split>_tokens_per_second``.
    """
    seconds = time.time() - start_time
    metrics = {f"{split}_runtime": round(seconds, 4)}
    if seconds > 0:  # unless the clock was set back, or has not moved
        for name, count in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
            if count is not None:
                metrics[f"{split}_{name}_per_second"] = round(count / seconds, 3)
    return metrics


class MemoryMeter:
    """Measures how much memory this process takes, from now on.

    Args:
        stage: the first word of the metrics' names.
        is_on: otherwise there are no metrics.
    """

    def __init__(self, stage: str, *, is_on: bool = True) -> None:
        self._stage, self._is_on = stage, is_on
        self._has_gpu = is_on and torch.cuda.is_available()
        if self._has_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._bytes_before = self._bytes_now()

    def stop(self) -> dict[str, int]:
        """The change in bytes since the start: negative if memory was freed.

        Host memory is ``<stage>_mem_cpu_alloc_delta``. With CUDA there are ``_mem_gpu_alloc_delta`` too, and
        ``_mem_gpu_peaked_delta``, by which the peak exceeded the final value.
        """
        before, now = self._bytes_before, self._bytes_now()
        deltas = {f"{self._stage}_mem_{device}_alloc_delta": now[device] - before[device] for device in now}
        if self._has_gpu:
            peaked = torch.cuda.max_memory_allocated() - now["gpu"]
            deltas[f"{self._stage}_mem_gpu_peaked_delta"] = peaked
        return deltas

    def _bytes_now(self) -> dict[str, int]:
        if not self._is_on:
            return {}
        import psutil  # comes with accelerate

        bytes_in_use = {"cpu": int(psutil.Process().memory_info().rss)}
        if self._has_gpu:
            bytes_in_use["gpu"] = torch.cuda.memory_allocated()
        return bytes_in_use


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


def has_operations(model: Any) -> bool:
    """Whether the model has the method ``num_parameters``, as those of `transformers` do."""
    return callable(getattr(model, "num_parameters", None))
