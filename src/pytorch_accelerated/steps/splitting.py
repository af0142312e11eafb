"""Computes a batch that does not fit into memory in parts that do.

`docs/design/failing-updates.md` has the reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.data.sampling import deal
from pytorch_accelerated.data.updates import MicroBatch, Update, items_of
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.facts.context import Context
from pytorch_accelerated.facts.error_notes import described
from pytorch_accelerated.steps.hook_output import adding_nothing, loss_and_size
from pytorch_accelerated.steps.safe_points import UndoneStep
from pytorch_accelerated.trees import leaves, map_leaves, merged, split_rows


@dataclasses.dataclass(eq=False)
class _Computed:
    """A batch of the current update.

    Attributes:
        micro_batch: the batch.
        step: batches of the epoch before it.
        is_reported: whether the loss tracker and the callbacks have been told about it.
    """

    micro_batch: MicroBatch
    step: int
    is_reported: bool = False


@dataclasses.dataclass(eq=False)
class _Part:
    """A part of the current batch.

    Attributes:
        items: in its mean loss.
        output: of the hook, without gradients.
    """

    items: Any
    output: dict[str, Any] = dataclasses.field(default_factory=dict)


class SplittingStep(UndoneStep):
    """A step that computes batches whole, or in parts if they do not fit; update, loss and events are the same.

    When memory runs out, the update is undone and computed again from its first batch, in parts of half the size.
    """

    def __init__(self, context: Context, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        self._part: _Part | None = None
        self._is_reporting = False
        self._computed: list[_Computed] = []
        self._error: RuntimeError | None = None

    @property
    def rows(self) -> int | None:
        """The largest number of samples in a part; None as long as whole batches fit."""
        return self.context.state.rows_that_fit or None

    def update(self, update: Update) -> None:
        """One update, whose batches are kept until all of them fit."""
        try:
            super().update(update)
        finally:
            self._computed.clear()

    def compute(self, batch: Any, step: int) -> None:
        """Add the gradients of one batch; see `Step.compute`.

        Raises:
            DataError: if the batch could not be split.
            torch.OutOfMemoryError: if a single sample does not fit.
        """
        latest = _Computed(self.micro_batch, step)
        size, rows_before = rows_of(batch, self.micro_batch.samples), self.rows
        self._computed.append(latest)
        pending = [latest]
        while pending:
            if self._fits(pending[0]):
                pending = pending[1:]
            else:
                self._make_parts_smaller(pending[0])
                pending = list(self._computed)
        self.micro_batch = latest.micro_batch
        if self.rows != rows_before:
            warn_user(
                self.context.ranks,
                f"A batch of {size} samples does not fit into memory (epoch {self.context.history.current_epoch}, "
                f"batch {step}, counted from 0), so it and those that follow go through the model in parts of "
                f"{self.rows} at the most. Updates are the same, except for what looks across a batch, such as "
                "BatchNorm. A smaller `per_device_batch_size` with more accumulation saves the attempt.",
            )

    def record(self, history: Any) -> None:
        """Also record the size of the parts, if there are any."""
        super().record(history)
        if self.rows is not None:
            history.update_metric("split_batch_size", self.rows)

    def _make_parts_smaller(self, failed: _Computed) -> None:
        """Undo the update and halve the parts."""
        size = rows_of(failed.micro_batch.batch)
        rows = size if self.rows is None else min(size, self.rows)
        error, self._error = self._error, None  # its traceback holds the tensors of the failed pass
        if rows == 1:
            raise torch.OutOfMemoryError(
                f"{error} A single sample of the batch does not fit into memory, so splitting does not help. "
                "Use a smaller model or shorter samples, `mixed_precision='bf16'`, or activation checkpointing."
            ) from error
        del error
        self.before_update.restore()
        self.late_counts.forget()
        if self.context.ranks.device.type != "cpu":
            torch.accelerator.empty_cache()
        self.context.state.rows_that_fit = (rows + 1) // 2

    def _fits(self, batch: _Computed) -> bool:
        """Compute a batch. Returns whether there was enough memory."""
        self.micro_batch = batch.micro_batch
        size = rows_of(batch.micro_batch.batch)
        if self.rows is None or size <= self.rows:
            return self._has_room(batch.micro_batch.batch, batch.step)
        return self._fits_in_parts(batch, size, self.rows)

    def _fits_in_parts(self, batch: _Computed, size: int, rows: int) -> bool:
        whole = batch.micro_batch
        parts = list(split_rows(whole.batch, deal(size, -(-size // rows))))  # as few and as equal as possible
        counts = self._counts_of(parts)
        computed: list[_Part] = []
        try:
            for part, count in zip(parts, counts, strict=True):
                weight = None if whole.weight is None else whole.weight * count / (sum(counts) or 1)
                self.micro_batch = whole._replace(batch=part, samples=rows_of(part), weight=weight)
                self._part = _Part(count)
                computed.append(self._part)
                if not self._has_room(part, batch.step):
                    return False
        finally:
            self._part = None
        self.micro_batch = whole
        self.report(_output_of_whole(computed), whole.batch, batch.step)
        return True

    def _counts_of(self, parts: list[Any]) -> list[int]:
        """The weights of the parts, if they are known before the parts are computed."""
        count_items = self.context.count_items
        counts = [rows_of(part) if count_items is None else items_of(part, count_items) for part in parts]
        return [rows_of(part) for part in parts] if None in counts else counts  # type: ignore[return-value]

    def report(self, output: Any, batch: Any, step: int) -> None:
        """Tell the loss tracker and the callbacks about a whole batch, only once even if it is computed several times.

        Of a part, keep the output.
        """
        loss, size = loss_and_size(output, hook="calculate_train_batch_loss")
        if self._part is not None:
            self._part.items = size if self.is_counted_late(output) else self._part.items
            self._part.output = map_leaves(_detached, output, keep_mappings=True)
            return
        computed = next(each for each in self._computed if each.micro_batch is self.micro_batch)
        if computed.is_reported:
            later = self._computed[self._computed.index(computed) + 1 :]
            self.context.losses.replace(sum(each.is_reported for each in later), loss)
            return
        computed.is_reported = True
        self._is_reporting = True
        super().report(output, batch, step)
        self._is_reporting = False

    def weigh(self, output: Mapping[str, Any]) -> Any:
        """The loss times its share of the update. A mean over no items is NaN, even when multiplied by 0."""
        loss = super().weigh(output)
        return adding_nothing(output["loss"]) if self._part is not None and self._part.items == 0 else loss

    def _has_room(self, batch: Any, step: int) -> bool:
        """Add the gradients of a batch or part. Returns whether there was enough memory."""
        try:
            super().compute(batch, step)
        except RuntimeError as error:
            if self._is_reporting or not is_out_of_memory(error):  # callbacks are not called again
                raise
            self._error = error
            return False
        return True


_WORDS_OF_OUT_OF_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, on any device.

    Libraries also raise it as a plain RuntimeError, and kernels with a class of CUDA.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS_OF_OUT_OF_MEMORY)


def rows_of(batch: Any, samples: int | None = None) -> int:
    """The first dimension that all tensors of a batch have.

    Raises:
        DataError: if the batch is not made of such tensors, or has another number of `samples`.
    """
    found = [leaf for leaf in leaves(batch) if leaf is not None]
    sizes = {len(leaf) if isinstance(leaf, torch.Tensor) and leaf.ndim else None for leaf in found}
    size = sizes.pop() if len(sizes) == 1 else None
    if not size or size != (samples or size):
        raise DataError(
            f"The batch is {described(batch)}, so it cannot be split if it does not fit into memory. With "
            "`split_on_oom`, batches must be tensors with one row for each sample, or tuples, lists and dicts of them."
        )
    return size


def _output_of_whole(parts: Sequence[_Part]) -> dict[str, Any]:
    """The hook's output for the whole batch, as far as it follows from the outputs of the parts."""
    outputs = [part.output for part in parts]
    numbers = [part.items.item() if isinstance(part.items, torch.Tensor) else part.items for part in parts]
    total = sum(numbers)
    shares = [number / total if number else 0.0 for number in numbers]
    whole = {
        name: merged(lambda values: _joined(values, shares), [output[name] for output in outputs], keep_mappings=True)
        for name in outputs[0]
    }
    for name in ("batch_size", "num_items_in_batch"):
        if whole.get(name) is not None:
            whole[name] = sum(output[name] for output in outputs)
    return whole


def _joined(values: list[Any], shares: Sequence[Any]) -> Any:
    """Rows concatenated, means weighted; where that is impossible, a list of all values."""
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        if first.ndim == 0:
            return sum(value * share for value, share in zip(values, shares, strict=True) if share != 0)
        if all(value.shape[1:] == first.shape[1:] and value.ndim for value in values):
            return torch.cat(values)
    return first if first is None else values


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
