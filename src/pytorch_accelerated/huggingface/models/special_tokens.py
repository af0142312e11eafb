"""Special tokens: those of the tokenizer replace those in the model's configuration."""

from __future__ import annotations

from typing import Any

from pytorch_accelerated.huggingface.arguments.training_arguments import logger

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
