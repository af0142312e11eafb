"""The special tokens of a tokenizer, as the configuration of the model that is trained with it has them."""

from __future__ import annotations

from typing import Any

_NAMES = ("pad_token_id", "bos_token_id", "eos_token_id")


def take_over_special_tokens(model: Any, processing_class: Any) -> list[str]:
    """Set the special tokens in the model's configurations to those that the tokenizer has.

    Models look them up there, to find where a padded row ends or to know when to stop. A configuration that lists
    several tokens, the tokenizer's among them, stays; to those that end a generated text the tokenizer's is added.

    Args:
        model: with a ``config`` and a ``generation_config``, as models of `transformers` have them; or without.
        processing_class: a tokenizer, what has one, or anything else.

    Returns:
        What was changed, in words.
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
    return changes
