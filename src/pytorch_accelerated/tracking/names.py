"""Names of metrics of one of several evaluation sets."""

from __future__ import annotations

import re

_KIND = re.compile(r"(?:intermediate_)?eval(?:uation)?_")


def name_in_set(name: str, set_name: str) -> str:
    """The name under which a metric is recorded when it is measured on the evaluation set `set_name`.

    >>> name_in_set("eval_loss_epoch", "noisy")
    'eval_noisy_loss_epoch'
    >>> name_in_set("intermediate_eval_accuracy", "noisy"), name_in_set("evaluation_loss", "noisy")
    ('intermediate_eval_noisy_accuracy', 'evaluation_noisy_loss')
    >>> name_in_set("errors", "noisy"), name_in_set("eval_loss_epoch", "")
    ('noisy_errors', 'eval_loss_epoch')
    """
    if not set_name:
        return name
    kind = _KIND.match(name)
    end = 0 if kind is None else kind.end()
    return f"{name[:end]}{set_name}_{name[end:]}"
