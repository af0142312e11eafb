"""How the default hooks use a batch: which part the model receives, and where the loss comes from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DataParallel

from pytorch_accelerated.errors import DataError
from pytorch_accelerated.facts.error_notes import described
from pytorch_accelerated.facts.trees import count_rows, would_broadcast
from pytorch_accelerated.ranks.wrappers import innermost


def batch_loss(
    model: Callable[..., Any], loss_func: Callable[..., Any] | None, batch: Any, samples: int | None, *, hook: str
) -> dict[str, Any]:
    """The loss of a batch ``(inputs, targets, ...)``, or of a dict batch.

    Further items of a tuple or list (ids, weights) belong to the user and are ignored. The model receives the entries
    of a dict as keyword arguments, as far as its `forward` takes them. With a loss function the loss is
    ``loss_func(outputs, batch)``; without one it is the model's own: ``outputs["loss"]``, or the first item of a tuple.

    Args:
        model: called once.
        loss_func: a function of outputs and targets; None if the model computes its loss.
        batch: the batch, on the model's device.
        samples: in the batch; None if nobody has counted them: then they are the first dimension of its first tensor.
        hook: the method to override for other batches, for error messages.

    Returns:
        `loss`, `model_outputs` and `batch_size`.

    Raises:
        DataError: for any other batch, if there is no loss, or if the loss function does not take a dict.
    """
    size = count_rows(batch) if samples is None else samples
    is_sequence = isinstance(batch, (tuple, list))  # asked first: an abstract class takes far longer
    if not is_sequence and isinstance(batch, Mapping):
        outputs = model(**accepted_inputs(model, batch, hook=hook))
        loss = (
            _mean(own_loss(outputs), model, size)
            if loss_func is None
            else _loss_of_dict(loss_func, outputs, batch, hook=hook)
        )
        return {"loss": loss, "model_outputs": outputs, "batch_size": size}
    if not is_sequence or len(batch) < 2:
        raise _cannot_use(batch, hook, "a tuple or list that begins with inputs and targets, or a dict of named inputs")
    if loss_func is None:
        raise DataError(
            "The trainer has no loss function (`loss_func` is None), and a batch of inputs and targets has no loss "
            "of its own. Pass a loss function, or use dict batches with a model that returns its loss."
        )
    inputs, targets = batch[:2]
    outputs = model(inputs)
    # Whole numbers may be classes.
    is_number = isinstance(targets, torch.Tensor) and targets.is_floating_point()
    if is_number and getattr(outputs, "ndim", None) != targets.ndim and would_broadcast(outputs, targets):
        _refuse_pairs(loss_func, outputs, targets)
    return {"loss": loss_func(outputs, targets), "model_outputs": outputs, "batch_size": size}


def _refuse_pairs(loss_func: Any, outputs: Any, targets: Any) -> None:
    """Reject shapes that make a loss of torch compare each output with each target. Own functions may want that.

    Raises:
        DataError: says what to do.
    """
    while isinstance(loss_func, functools.partial):
        loss_func = loss_func.func
    if getattr(loss_func, "__module__", None) in ("torch.nn.functional", "torch.nn.modules.loss"):
        name = getattr(loss_func, "__name__", type(loss_func).__name__)
        raise DataError(
            f"The model's outputs {list(outputs.shape)} and the targets {list(targets.shape)} have different shapes: "
            f"{name} would compare {outputs.shape[0]} x {targets.shape[0]} pairs. Make the shapes equal, with "
            "`outputs.squeeze(-1)` at the end of the model or `targets.unsqueeze(1)` in the dataset."
        )


def batch_predictions(model: Callable[..., Any], batch: Any, *, hook: str) -> Any:
    """The model's outputs for a batch without its targets.

    A tensor is passed as it is, of a tuple or list the first item, of a dict everything that `forward` takes except
    labels. If the outputs are a mapping, entries that are None are removed.
    """
    if isinstance(batch, Mapping):
        inputs = accepted_inputs(model, batch, hook=hook)
        outputs = model(**{name: value for name, value in inputs.items() if "label" not in name})
    elif isinstance(batch, torch.Tensor):
        outputs = model(batch)
    elif isinstance(batch, (tuple, list)) and batch:
        outputs = model(batch[0])
    else:
        raise _cannot_use(batch, hook, "a tensor, a tuple or list that begins with the inputs, or a dict of named ones")
    if isinstance(outputs, Mapping):
        return {name: value for name, value in outputs.items() if value is not None}
    return outputs


def accepted_inputs(model: Any, batch: Mapping[str, Any], *, hook: str) -> dict[str, Any]:
    """The entries of `batch` that the model's `forward` takes by name."""
    model = innermost(model)  # the `forward` of a wrapper takes anything
    # The `forward` of the class: accelerate sets another one on the instance that takes anything.
    names = _parameter_names(type(model).forward if isinstance(model, torch.nn.Module) else model)
    if names is None:
        return dict(batch)
    inputs = {name: value for name, value in batch.items() if name in names}
    if not inputs:
        raise DataError(
            f"The batch has the entries {', '.join(map(repr, batch))}, but the model takes "
            f"{', '.join(sorted(names))}: none of the names match. Rename the entries, or override `{hook}`."
        )
    return inputs


def _loss_of_dict(loss_func: Callable[..., Any], outputs: Any, batch: Mapping[str, Any], *, hook: str) -> Any:
    try:
        return loss_func(outputs, batch)
    except (TypeError, AttributeError) as error:  # torch's losses read a dtype or a size, which a dict lacks
        raise DataError(
            f"The loss function failed: {error}. For a dict batch it is called as loss_func(outputs, batch), here with "
            f"{described(outputs)} and {described(batch)}. If it takes targets instead, pass for example "
            f"`lambda outputs, batch: loss_func(outputs, batch['labels'])`, or override `{hook}`."
        ) from error


def own_loss(outputs: Any) -> Any:
    """The loss among a model's outputs."""
    if isinstance(outputs, Mapping) and outputs.get("loss") is not None:
        return outputs["loss"]
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], torch.Tensor):
        return outputs[0]
    raise DataError(
        f"The trainer has no loss function (`loss_func` is None), so the model must return its loss, but it returned "
        f"{described(outputs)}. Pass a loss function, or put the labels into the batch so that the model can."
    )


def _mean(loss: Any, model: Any, rows: int | None) -> Any:
    """The loss of a batch whose rows `DataParallel` has cut, from one for each part, which is a mean of its rows."""
    if not isinstance(model, DataParallel) or loss.ndim != 1 or not rows:
        return loss
    parts = loss.new_empty(rows).chunk(len(model.device_ids))
    return sum(part * (len(cut) / rows) for part, cut in zip(loss, parts, strict=True))


@functools.lru_cache(maxsize=16)
def _parameter_names(forward: Callable[..., Any]) -> frozenset[str] | None:
    """The parameter names of `forward`, or None if it takes any."""
    parameters = inspect.signature(forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters) - {"self"}


def _cannot_use(batch: Any, hook: str, takes: str) -> DataError:
    return DataError(
        f"The batch is {described(batch)}, but `{hook}` by default takes {takes}. Override `{hook}` for such batches."
    )
