"""What is known about models, and the batches that are made for them: collators, samplers, columns, losses, counts."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytorch_accelerated.data.building import refuse_several
from pytorch_accelerated.errors import ConfigurationError, DataError
from pytorch_accelerated.ranks.wrappers import bare_model

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


default_data_collator.keeps_rows = True  # type: ignore[attr-defined]  # so that nobody counts the rows of a batch


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
    """The model inside of wrappers of torch and PEFT, whose own forward accepts anything."""
    model = bare_model(model)
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
        self.keeps_rows = getattr(data_collator, "keeps_rows", False)

    def __call__(self, features: list[Any]) -> Any:
        """The batch. The columns are chosen once, as long as the rows have the same."""
        rows, present, used = [], None, []
        for row in features:
            if isinstance(row, Mapping):
                if present is None or row.keys() != present:
                    present, used = row.keys(), [name for name in row if name in self.columns]
                    if not used:
                        raise _nothing_left(list(row), self.columns)
                # A new dict in any case: collators remove labels from the rows that they are given.
                row = dict(row) if len(used) == len(present) else {name: row[name] for name in used}
            rows.append(row)
        return self.data_collator(rows)


def _nothing_left(present: Sequence[str], columns: Sequence[str]) -> DataError:
    return DataError(
        f"The dataset has the columns {', '.join(map(repr, present)) or '(none)'}, none of which the model's forward "
        f"takes: {', '.join(map(repr, columns))}. Rename them, or set remove_unused_columns=False."
    )


class PaddingCollator:
    """Pads rows with the method `pad` of a tokenizer."""

    keeps_rows = True

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
    refuse_several(dataset)
    if isinstance(dataset, Mapping):
        raise DataError(f"`{argument}` is a dict, which has no rows to {purpose}. Pass one of its datasets.")
    if hasattr(dataset, "__len__") and not len(dataset):
        raise DataError(f"`{argument}` is empty, so there is nothing to {purpose}.")


def items_of_update(own: int, in_total: int, args: TrainingArguments) -> int:
    """The number of items that the loss of an update is divided by, from the numbers of this rank and of all."""
    return in_total if args.average_tokens_across_devices else max(1, own)  # without any label 0 is added, not 0 / 0


logger = logging.getLogger(__name__.rpartition(".")[0])
_ABOUT_NEXT_LABEL = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")


def accepts_loss_kwargs(model: Any) -> bool:
    """Whether the model takes ``num_items_in_batch`` to divide its loss by."""
    model = inner_model(model)
    own_word = getattr(model, "accepts_loss_kwargs", None)
    if own_word is not None:
        return bool(own_word)
    return takes(model.forward, "num_items_in_batch")


def takes(function: Any, keyword: str) -> bool:
    """Whether a function may be given an argument of this name."""
    parameters = inspect.signature(function).parameters
    return keyword in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def leaves_out_first_label(model: Any) -> bool:
    """Whether the loss of a model of `transformers` is about the next label, so that the first one has no prediction.

    As `transformers` tells it, by the type that the model inside of adapters has for its loss.
    """
    model = inner_model(model)
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return getattr(model, "loss_type", None) in _ABOUT_NEXT_LABEL and not encodes


def main_input_name(model: Any) -> str:
    """The column that a model takes first."""
    return str(getattr(model, "main_input_name", "input_ids"))


def predicts_next_token(model: Any) -> bool:
    """Whether it is a causal language model, as its class or a base of it says by its name."""
    names = {kind.__name__ for kind in type(inner_model(model)).__mro__}
    module = sys.modules.get("transformers.models.auto.modeling_auto")
    known = getattr(module, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {}).values()
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names) or not names.isdisjoint(known)


def has_own_place(model: Any) -> bool:
    """Whether the model was placed when it was loaded, over multiple devices or in few bits."""
    return bool(getattr(model, "hf_device_map", None) or getattr(model, "quantization_method", None))


def names_left_out(model: Any) -> Sequence[str]:
    """The outputs that predictions leave out: those that the config names, or the caches of `transformers`."""
    config = getattr(model, "config", None)
    usual = () if config is None else ("cache", "past_key_values")  # from 5.24 on, and before
    return getattr(config, "keys_to_ignore_at_inference", usual)


def returns_loss_by_itself(model: Any) -> bool:
    """Whether the model returns a loss without labels, like models that compare pairs."""
    parameter = inspect.signature(bare_model(model).forward).parameters.get("return_loss")
    return parameter is not None and parameter.default is True


def own_loss(outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss in the outputs of a model: "loss" of a mapping, or the first item of a tuple."""
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    if not isinstance(loss, torch.Tensor):
        given = ", ".join(map(repr, outputs)) if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
        raise DataError(
            f"The model returned no loss, only {given}. The inputs were {', '.join(map(repr, inputs))}. Put labels "
            "into the rows, under a name that its forward takes, or pass `compute_loss_func`."
        )
    refuse_no_loss(loss, is_learnt_from=False)
    return loss


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
        f"The loss {complaint}. It is 'loss' of what the model returned, or the first of its outputs, unless you "
        "override `compute_loss` or pass `compute_loss_func`."
    )


_NAMES = ("pad_token_id", "bos_token_id", "eos_token_id")


def take_over_special_tokens(model: Any, processing_class: Any, *, logs: bool) -> None:
    """Set the special tokens in the model's configurations to the tokenizer's.

    Models need them to find the end of a padded row, and to stop generating. A list that contains the tokenizer's token
    stays as it is. The tokenizer's token is added to those that end a generated text. Models without
    a ``config`` or a ``generation_config`` stay as they are.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    wanted = {name: getattr(tokenizer, name, None) for name in _NAMES}
    changes = []
    for place in ("config", "generation_config"):
        config: Any = getattr(model, place, None)
        for name, token in wanted.items():
            if token is None or not hasattr(config, name):
                continue
            old = getattr(config, name)
            several = old if isinstance(old, (list, tuple)) else [old]
            if token in several:
                continue
            is_end_of_text = place == "generation_config" and name == "eos_token_id" and old is not None
            new = [token, *several] if is_end_of_text else token
            setattr(config, name, new)
            changes.append(f"{place}.{name} from {old} to {new}")
    if changes and logs:
        logger.warning("The model takes over special tokens of the `processing_class`: %s", "; ".join(changes))
