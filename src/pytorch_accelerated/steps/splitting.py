"""A batch that does not fit into memory, in parts that do.

`BatchSplitter` stands in the loop's place for the forward and backward pass of a batch. `docs/design/out-of-memory.md`
says why it is built like this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.data.sampling import deal
from pytorch_accelerated.data.updates import items_of
from pytorch_accelerated.errors import ConfigurationError, DataError, HookOutputError
from pytorch_accelerated.models.preparation import is_replicated
from pytorch_accelerated.steps.step_facts import Snapshot, StepParts, detached, with_tensors
from pytorch_accelerated.training.hook_output import loss_and_size
from pytorch_accelerated.training.loop import TrainingLoop

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer

_NO_ROOM = object()


def refuse_what_cannot_be_split(trainer: Trainer) -> None:
    """Refuse a run whose batches cannot be split when memory does not suffice. All complaints come in one error.

    Raises:
        ConfigurationError: names what is in the way.
    """
    complaints: list[str] = []
    passes = "_perform_forward_and_backward_passes"
    if trainer._ranks.count > 1:
        complaints.append("while one rank begins again, the others wait for its gradients: use smaller batches")
    elif not is_replicated(trainer._accelerator):
        kind = trainer._accelerator.distributed_type.value
        complaints.append(f"{kind} moves pieces of the model about within a pass: use smaller batches")
    if trainer.compile_step is not None:
        complaints.append("a captured step is always the same: leave `compile_step` out")
    if getattr(type(trainer), passes) is not getattr(TrainingLoop, passes):
        complaints.append(f"`{passes}` is overridden, which cannot be done by half: override other hooks")
    if complaints:
        raise ConfigurationError(
            f"`split_on_oom` is True, but a batch cannot be begun again in this run: {'; '.join(complaints)}; or leave "
            "`split_on_oom` out."
        )


class BatchSplitter:
    """Computes a batch whole, or in parts if that does not fit into memory; update, loss and events are the same.

    Args:
        trainer: whose batches they are.

    Attributes:
        rows: samples that a part has at the most; None as long as whole batches fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.rows: int | None = None
        self._trainer = trainer
        self._error: RuntimeError | None = None
        self._is_reported = False
        self._is_loss_changed = False

    def compute(self, batch: Any, step: int) -> None:
        """Add the gradients of one batch; see `TrainingLoop._perform_forward_and_backward_passes`.

        Raises:
            DataError: if the batch could not be split.
            torch.OutOfMemoryError: if a single sample does not fit.
        """
        trainer, size = self._trainer, rows_of(batch)
        parts, late_counts = StepParts(trainer), len(trainer._late_counts.counts)
        # Gradients of earlier batches of the update are added to in place.
        before = Snapshot(parts, [*parts.buffers().values(), *parts.named_gradients().values()])
        self._is_reported = self._is_loss_changed = False
        rows = size if self.rows is None else min(size, self.rows)
        while not self._fits(batch, step, rows, size):
            if rows == 1:
                error, self._error = self._error, None
                raise torch.OutOfMemoryError(
                    f"{error} A single sample of the batch does not fit into memory, so splitting does not help. "
                    "Use a smaller model or shorter samples, `mixed_precision='bf16'`, or activation checkpointing."
                ) from error
            self._error = None  # its traceback holds what the failed pass has made
            before.restore()
            trainer._late_counts.forget_after(late_counts)
            if trainer.device.type != "cpu":
                torch.accelerator.empty_cache()
            rows = (rows + 1) // 2
        if self._is_loss_changed and rows < size:
            raise HookOutputError(
                "A callback changed batch_output['loss'] in `on_train_step_end`, but of a batch that is split because "
                "of `split_on_oom` the gradients have been computed by then. Change the loss in "
                "`calculate_train_batch_loss`, or use smaller batches."
            )
        if rows < size and (self.rows is None or rows < self.rows):
            self.rows = rows
            warn_user(
                trainer,
                f"A batch of {size} samples does not fit into memory (epoch {trainer.run_history.current_epoch}, batch "
                f"{step}, counted from 0), so it and those that follow go through the model in parts of {rows} at the "
                "most. Updates are the same, except for what looks across a batch, such as BatchNorm. To save the "
                "attempt, use a smaller `per_device_batch_size` and more `gradient_accumulation_steps`.",
            )

    def record(self) -> None:
        """Record the size of the parts, if there are any."""
        if self.rows is not None:
            self._trainer.run_history.update_metric("split_batch_size", self.rows)

    def _fits(self, batch: Any, step: int, rows: int, size: int) -> bool:
        return self._passes_whole(batch, step) if rows == size else self._passes_in_parts(batch, step, rows, size)

    def _passes_whole(self, batch: Any, step: int) -> bool:
        """As the loop does it. Returns whether there was memory enough."""
        trainer = self._trainer
        output = self._tried(trainer._output_of, trainer.calculate_train_batch_loss, batch)
        if output is _NO_ROOM:
            return False
        self._report(output, batch, step)
        return self._tried(self._backward, output) is not _NO_ROOM

    def _passes_in_parts(self, batch: Any, step: int, rows: int, size: int) -> bool:
        """The same gradients from parts of at most `rows` samples. Returns whether there was memory enough."""
        trainer, whole = self._trainer, self._trainer._micro_batch
        parts = list(_cut(batch, size, rows))
        counts = self._counts_of(parts)
        outputs: list[dict[str, Any]] = []
        items: list[Any] = []
        try:
            for part, count in zip(parts, counts, strict=True):
                weight = None if whole.weight is None else whole.weight * count / (sum(counts) or 1)
                trainer._micro_batch = whole._replace(batch=part, weight=weight)
                output = self._tried(trainer._output_of, trainer.calculate_train_batch_loss, part)
                if output is _NO_ROOM:
                    return False
                _, number = loss_and_size(output, hook="calculate_train_batch_loss")
                items.append(number if trainer._is_counted_late(output) else count)
                # A mean over no items is NaN, also when it is multiplied by 0.
                if items[-1] != 0 and self._tried(self._backward, output) is _NO_ROOM:
                    return False
                outputs.append(detached(output))
                del output
        finally:
            trainer._micro_batch = whole
        self._report(_output_of_whole(outputs, items), batch, step)
        return True

    def _counts_of(self, parts: list[Any]) -> list[int]:
        """What the parts weigh, where that is known before they are computed."""
        count_items = self._trainer._count_items
        counts = [rows_of(part) if count_items is None else items_of(part, count_items) for part in parts]
        return [rows_of(part) for part in parts] if None in counts else counts  # type: ignore[return-value]

    def _backward(self, output: Mapping[str, Any]) -> None:
        self._trainer._guarded(self._trainer.backward_step, self._trainer._weighted(output))

    def _report(self, output: Any, batch: Any, step: int) -> None:
        """Tell the loss tracker and the callbacks of the batch; once, however often it is computed."""
        if self._is_reported:
            loss, _ = loss_and_size(output, hook="calculate_train_batch_loss")
            self._trainer._loss_tracker.replace_last(loss)
        else:
            self._is_reported = True
            self._is_loss_changed = not self._trainer._report_leaves_loss(output, batch, step)

    def _tried(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function` returns, or `_NO_ROOM`."""
        try:
            return function(*args)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._error = error
            return _NO_ROOM


_WORDS_OF_OUT_OF_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory does not suffice, on whatever device.

    Libraries raise it as a plain RuntimeError, too, and kernels with a class of CUDA's own.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS_OF_OUT_OF_MEMORY)


def rows_of(batch: Any) -> int:
    """The first dimension that all tensors of a batch have.

    Raises:
        DataError: if the batch is not made of such tensors.
    """
    leaves = list(_leaves(batch))
    sizes = {len(leaf) if isinstance(leaf, torch.Tensor) and leaf.ndim else None for leaf in leaves}
    size = sizes.pop() if len(sizes) == 1 else None
    if not size:
        kinds = [
            f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
            for leaf in leaves
        ]
        raise DataError(
            f"The batch has {', '.join(dict.fromkeys(kinds)) or 'nothing'} in it, so it cannot be split if it does not "
            "fit into memory. With `split_on_oom`, batches must be tensors with one and the same first dimension, or "
            "tuples, lists and dicts of them."
        )
    return size


def _leaves(data: Any) -> Iterator[Any]:
    """What is in nested containers, in the order of `with_tensors`; None is nothing."""
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, (tuple, list)):
        for item in data:
            yield from _leaves(item)
    elif data is not None:
        yield data


def _cut(batch: Any, size: int, rows: int) -> Iterator[Any]:
    """Views of a batch of `size` samples, as few and as even as can be with at most `rows` samples each."""
    sizes = deal(size, -(-size // rows))
    for tensors in zip(*(tensor.split(sizes) for tensor in _leaves(batch)), strict=True):
        yield with_tensors(batch, iter(tensors))


def _output_of_whole(outputs: Sequence[dict[str, Any]], items: Sequence[Any]) -> dict[str, Any]:
    """What the hook would have returned for the whole batch, as far as that can be told from its parts."""
    numbers = [number.item() if isinstance(number, torch.Tensor) else number for number in items]
    total = sum(numbers)
    shares = [number / total if number else 0.0 for number in numbers]
    whole = {name: _joined([output[name] for output in outputs], shares) for name in outputs[0]}
    for name in ("batch_size", "num_items_in_batch"):
        if whole.get(name) is not None:
            whole[name] = sum(output[name] for output in outputs)
    return whole


def _joined(values: list[Any], shares: Sequence[Any]) -> Any:
    """Rows below each other, means weighted; what cannot be joined is a list with what each part has."""
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        if first.ndim == 0:
            return sum(value * share for value, share in zip(values, shares, strict=True) if share != 0)
        if all(value.shape[1:] == first.shape[1:] and value.ndim for value in values):
            return torch.cat(values)
    if all(type(value) is type(first) for value in values):
        if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in values):
            joined = {name: _joined([value[name] for value in values], shares) for name in first}
            return _with_values(first, joined)
        if isinstance(first, (tuple, list)) and all(len(value) == len(first) for value in values):
            items = [_joined(list(each), shares) for each in zip(*values, strict=True)]
            return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first if first is None else values


def _with_values(mapping: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """The same kind of mapping with other values."""
    changed: Any = copy.copy(mapping)
    for name, value in values.items():
        changed[name] = value
    return changed
