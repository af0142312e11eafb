"""Facts about models: their inputs, outputs and losses."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.errors import ConfigurationError, DataError
from pytorch_accelerated.huggingface.models.collating import columns_of, inner_model, signature_columns
from pytorch_accelerated.training.settings import returns_a_sum


def accepts_loss_kwargs(model: Any) -> bool:
    """Whether the model takes ``num_items_in_batch`` to divide its loss by."""
    own_word = getattr(model, "accepts_loss_kwargs", None)
    if own_word is not None:
        return bool(own_word)
    parameters = inspect.signature(model.forward).parameters
    return "num_items_in_batch" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def returns_loss_by_itself(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether the model returns a loss without labels, like models that compare pairs."""
    asked = inputs.get("return_loss")
    if asked is None:
        parameter = inspect.signature(model.forward).parameters.get("return_loss")
        asked = parameter is not None and parameter.default is True
    return bool(asked)


def own_loss(outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss in the outputs of a model: "loss" of a mapping, or the first item of a tuple."""
    if isinstance(outputs, Mapping):
        if outputs.get("loss") is None:
            raise DataError(
                f"The model returned no loss, only {', '.join(map(repr, outputs)) or 'nothing'}. The inputs were "
                f"{', '.join(map(repr, inputs))}. Put labels into the rows, under a name that its forward takes, or "
                "pass `compute_loss_func`."
            )
        loss = outputs["loss"]
    else:
        loss = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        if not isinstance(loss, torch.Tensor):
            raise DataError(
                f"The model returned a {type(outputs).__name__}, in which there is no loss. Return a dict with 'loss', "
                "or a tuple that begins with it, or pass `compute_loss_func`."
            )
    refuse_no_loss(loss, is_learnt_from=False)
    return loss  # type: ignore[no-any-return]


def refuse_no_loss(loss: Any, *, is_learnt_from: bool) -> None:
    """Reject a loss that is not a single number or, in training, has no gradient."""
    if not isinstance(loss, torch.Tensor):
        complaint = f"is a {type(loss).__name__}, {loss!r}, but must be a tensor with one number"
    elif loss.numel() != 1:
        complaint = f"has the shape {tuple(loss.shape)}, but must be one number"
    elif is_learnt_from and not loss.requires_grad:
        complaint = "has no gradient, so nothing can be learnt from it"
    else:
        return
    raise DataError(
        f"The loss {complaint}. Unless `compute_loss` is overridden or there is a `compute_loss_func`, it is 'loss' of "
        "what the model returned, or the first of its outputs. If that is none, pass `compute_loss_func`; if the model "
        "makes it of labels, see whether they are there: columns that its forward does not name are taken out, unless "
        "`label_names` has them or `remove_unused_columns` is False. A loss of your own must be the mean, not one "
        "number for each row, and must not be detached."
    )


def outputs_of(model: Any, inputs: Mapping[str, Any], *, bare_model: Any) -> Any:
    """The outputs of a model, which may be wrapped, for a batch. The forward of the bare model names its inputs."""
    try:
        return model(**inputs)
    except TypeError as error:
        missing = _missing_inputs(inner_model(bare_model).forward, inputs, error)
        if not missing:
            raise
        raise DataError(
            f"The forward of {type(bare_model).__name__} needs {', '.join(map(repr, missing))}, but the batch has "
            f"{', '.join(map(repr, inputs)) or 'nothing'}. Either the rows have no column of that name: add it. Or the "
            "`data_collator` does not keep it, or would make it of columns that `remove_unused_columns` takes out: set "
            "that to False. Or it is a label, which may be missing, in a prediction or where `compute_loss_func` or "
            "`label_smoothing_factor` takes it: give it the default None in forward, and name it in `label_names` "
            "unless 'label' is in its name."
        ) from error


def refuse_missing_column(
    error: KeyError, owner: str, model: nn.Module, label_names: Iterable[str], dataset: Any
) -> None:
    """Explain a KeyError of `compute_loss`, if the column it looks for was removed from the batch; else do nothing."""
    name = error.args[0] if error.args else None
    if not isinstance(name, str) or name in signature_columns(model, label_names) or name not in columns_of(dataset):
        return
    raise DataError(
        f"{owner}.compute_loss looks for {name!r}, which the dataset has but not the batch: columns that the forward "
        f"of {type(model).__name__} does not name are taken out. Set label_names=[{name!r}], which keeps it and makes "
        "it the label of evaluations, or remove_unused_columns=False, which keeps all columns."
    ) from error


def refuse_missing_parameters(error: TypeError, owner: str, compute_loss: Callable[..., Any]) -> None:
    """Explain a TypeError of an overridden `compute_loss` of older scripts, if it lacks parameters; else do nothing."""
    parameters = inspect.signature(compute_loss).parameters
    defaults = {"return_outputs": "False", "num_items_in_batch": "None"}
    missing = [name for name in defaults if name not in parameters]
    if missing and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise ConfigurationError(
            f"{owner}.compute_loss({', '.join(parameters)}) has no parameter "
            f"{' and no '.join(f'`{name}`' for name in missing)}, which it is called with. Add "
            f"{', '.join(f'{name}={defaults[name]}' for name in missing)}; the mean over a batch is right all the same."
        ) from error


def refuse_sum(loss_func: Any) -> None:
    """Reject a `compute_loss_func` with reduction='sum', once it is known not to divide by the number of items."""
    if returns_a_sum(loss_func):
        raise ConfigurationError(
            "`compute_loss_func` has reduction='sum' and does not divide by `num_items_in_batch`, so its result would "
            "grow with the batch size and be taken for a mean. Divide by `num_items_in_batch`, the number of labels in "
            "the whole update, or use reduction='mean'."
        )


def _missing_inputs(forward: Any, inputs: Mapping[str, Any], error: TypeError) -> list[str]:
    """The missing arguments of `forward`; none if `error` was raised inside of it."""
    code = getattr(inspect.unwrap(getattr(forward, "__func__", forward)), "__code__", None)
    if any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__)):
        return []
    return [
        parameter.name
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in inputs
    ]
