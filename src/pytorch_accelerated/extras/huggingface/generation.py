"""What `Seq2SeqTrainer` generates: the tokens, their padding, and the configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from pytorch_accelerated.errors import DataError
from pytorch_accelerated.facts import require

_NO_TOKEN = -100  # which the losses of torch ignore
_OF_DECODER = ("decoder_input_ids", "decoder_attention_mask")


def load_generation_config(source: Any) -> Any:
    """A new `GenerationConfig`, made of whatever the argument of that name may be."""
    kind = require("transformers", needed_by="`generation_config`").GenerationConfig
    if isinstance(source, Mapping):
        config = kind.from_dict(dict(source))
    elif isinstance(source, (str, PathLike)):
        path = Path(source)
        config = kind.from_pretrained(path.parent, path.name) if path.is_file() else kind.from_pretrained(source)
    else:
        config = copy.deepcopy(source)
    config.validate(strict=True)
    return config


def _inputs_of_generate(inputs: Mapping[str, Any], label_names: list[str]) -> dict[str, Any]:
    """The columns of a batch for `generate`: not the labels, nor decoder inputs that were made from them."""
    labels = inputs.get("labels")
    begun = inputs.get("decoder_input_ids")
    is_answer = labels is not None and begun is not None and begun.shape == labels.shape
    left_out = {"labels", *label_names, *(_OF_DECODER if is_answer else ())}
    return {name: value for name, value in inputs.items() if name not in left_out}


def generated_tokens(
    model: Any, batch: Mapping[str, Any], label_names: list[str], arguments: Mapping[str, Any], padding: int
) -> torch.Tensor:
    """One row of tokens for each row of a batch, with `padding` after the token that ends it.

    Beam search may put other tokens there if the batch has longer rows.
    """
    inputs = _inputs_of_generate(batch, label_names)
    output = model.generate(**inputs, **arguments)
    tokens: torch.Tensor = getattr(output, "sequences", output)
    rows = next(len(value) for value in inputs.values() if isinstance(value, torch.Tensor))
    if len(tokens) != rows:
        raise DataError(
            f"`generate` returned {len(tokens)} rows of tokens for a batch of {rows}, but each row has one prediction. "
            "Set `num_return_sequences` to 1, or override `prediction_step`."
        )
    ends = _setting_of_generate("eos_token_id", model, arguments)
    if ends is None:
        return tokens
    first = _first_generated(model, inputs)
    is_end = torch.isin(tokens[:, first:], torch.as_tensor(ends, device=tokens.device))
    is_over = is_end.cumsum(1) > is_end.int()
    return torch.cat([tokens[:, :first], tokens[:, first:].masked_fill(is_over, padding)], dim=1)


def padding_token(model: Any, processing_class: Any, arguments: Mapping[str, Any]) -> int:
    """The token that fills up generated rows; -100 if neither the model nor the tokenizer has one."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    for token in (
        _setting_of_generate("pad_token_id", model, arguments),
        getattr(tokenizer, "pad_token_id", None),
        getattr(getattr(model, "config", None), "pad_token_id", None),
        _setting_of_generate("eos_token_id", model, arguments),
    ):
        if token is not None:
            return int(torch.as_tensor(token).flatten()[0])
    return _NO_TOKEN


def _setting_of_generate(name: str, model: Any, arguments: Mapping[str, Any]) -> Any:
    """A setting of a call of `generate`: from its arguments, else their config, else the model's config."""
    if name in arguments:
        return arguments[name]
    for config in (arguments.get("generation_config"), getattr(model, "generation_config", None)):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return None


def _first_generated(model: Any, inputs: Mapping[str, Any]) -> int:
    """The position of the first generated token of each row."""
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    begun = inputs.get("decoder_input_ids" if is_encoder_decoder else "input_ids")
    return int(begun.shape[1]) if begun is not None else int(is_encoder_decoder)
