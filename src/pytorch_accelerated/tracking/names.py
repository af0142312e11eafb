"""Names of metrics, and what they say: the evaluation set, the role, the quantity, and whether more of it is better."""

from __future__ import annotations

import re

_KIND = re.compile(r"(?:intermediate_)?eval(?:uation)?_")
# The prefix of a name says what was measured on: train_loss_epoch and ema_model_eval_loss_epoch are both losses.
_ROLES = re.compile("(?:(?:ema_model|intermediate|training|train|evaluation|eval|validation|valid|val|test)[_/])*")
_LESS_IS_BETTER = ("loss", "error", "perplexity", "wer", "mae", "mse", "rmse")
_MORE_IS_BETTER = (
    "accuracy",
    "acc",
    "f1",
    "precision",
    "recall",
    "auc",
    "auroc",
    "iou",
    "map",
    "dice",
    "bleu",
    "r2",
    "rouge",
)


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


def role_and_quantity(name: str) -> tuple[str, str]:
    """The role and the quantity of a metric: ("eval_", "loss") for "eval_loss_epoch".

    What the Hugging Face trainer logs as "loss" is that of training.

    >>> role_and_quantity("eval_accuracy"), role_and_quantity("loss")
    (('eval_', 'accuracy'), ('train_', 'loss'))
    """
    if name == "loss":
        return "train_", name
    end = _ROLES.match(name).end()  # type: ignore[union-attr]  # it matches the empty string too
    return name[:end], name[end:].removesuffix("_epoch") or name


def greater_is_better(quantity: str) -> bool | None:
    """Whether more of a quantity is better, by the words in its name; None if they do not tell.

    >>> greater_is_better("f1"), greater_is_better("noisy_loss"), greater_is_better("learning_rate")
    (True, False, None)
    """
    words = re.split("[_/ -]", quantity.lower())
    if any(word in _LESS_IS_BETTER for word in words):
        return False
    return True if any(word in _MORE_IS_BETTER for word in words) else None
