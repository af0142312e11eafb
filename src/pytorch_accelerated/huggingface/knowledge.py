"""Facts about models: their inputs, outputs and losses, smoothed labels, special tokens."""

from __future__ import annotations

import dataclasses
import dis
import inspect
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from pytorch_accelerated.callbacks.warning import stacklevel_of_user
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.huggingface.collating import inner_model
from pytorch_accelerated.huggingface.training_args import logger

_ABOUT_NEXT_LABEL = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")


def accepts_loss_kwargs(model: Any) -> bool:
    """Whether the model takes ``num_items_in_batch`` to divide its loss by."""
    model = inner_model(model)
    own_word = getattr(model, "accepts_loss_kwargs", None)
    if own_word is not None:
        return bool(own_word)
    parameters = inspect.signature(model.forward).parameters
    return "num_items_in_batch" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


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
    """Whether the model was placed when it was loaded, over several devices or in few bits."""
    return bool(getattr(model, "hf_device_map", None) or getattr(model, "quantization_method", None))


def returns_loss_by_itself(model: Any) -> bool:
    """Whether the model returns a loss without labels, like models that compare pairs."""
    parameter = inspect.signature(model.forward).parameters.get("return_loss")
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


def reads_scale(compute_loss: Any) -> bool:
    """Whether the code of an overridden `compute_loss` reads anything that the scale of a loss depends on."""
    code = getattr(inspect.unwrap(getattr(compute_loss, "__func__", compute_loss)), "__code__", None)
    if code is None:
        return True
    parameters = inspect.signature(compute_loss).parameters.values()
    names = [each.name for each in parameters if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    names += ["num_items_in_batch", "gradient_accumulation_steps"]
    read = " ".join(str(each.argval) for each in dis.get_instructions(code) if "LOAD" in each.opname)
    return any(name in read for name in names)


@dataclasses.dataclass(frozen=True)
class LabelSmoother:
    """Computes a cross-entropy with smoothed labels, as the mean over labels other than `ignore_index`.

    The share `epsilon` of each label is distributed equally over all classes.
    """

    epsilon: float = 0.1
    ignore_index: int = -100

    def __call__(
        self, model_output: Any, labels: torch.Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The loss. With `shift_labels`, the logits of a position predict the label of the next one.

        Args:
            model_output: a mapping with "logits", or a tuple that begins with them; the last dimension are classes.
            labels: of the same shape without the last dimension.
            shift_labels: see above.
            num_items_in_batch: to divide the sum by, instead of the number of labels that count.
        """
        logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            ignore_index=self.ignore_index,
            label_smoothing=self.epsilon,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def make_label_smoother(epsilon: float, model: Any) -> LabelSmoother | None:
    """The smoother for `model`, if there is anything to smooth; with a warning, none for labels of several classes."""
    if epsilon and getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
        warnings.warn(
            f"`label_smoothing_factor` is {epsilon}, but labels of multi-label classification cannot be smoothed: they "
            "stay as they are. Set it to 0, or smooth them in a `compute_loss_func`.",
            stacklevel=stacklevel_of_user(),
        )
        return None
    return LabelSmoother(epsilon) if epsilon else None


_NAMES = ("pad_token_id", "bos_token_id", "eos_token_id")


def take_over_special_tokens(model: Any, processing_class: Any, *, logs: bool) -> None:
    """Set the special tokens in the model's configurations to those of the tokenizer.

    Models need them to find the end of a padded row, and to stop generating. A list that contains the tokenizer's token
    stays as it is. The tokenizer's token is added to those that end a generated text. Models without
    a ``config`` or a ``generation_config`` stay as they are, as they do if there is no tokenizer.
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


def has_operations(model: Any) -> bool:
    """Whether the model has the method ``num_parameters``, as those of `transformers` do."""
    return callable(getattr(model, "num_parameters", None))
