"""Whether a saved value is of the same kind as the live value that it would replace: a number, a list, a tensor."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import InvalidCheckpointError


def mismatch(live: Any, saved: Any, path: str) -> str | None:
    """The first place where `saved` is of another kind than `live`, in words; None if there is none.

    Only items that both containers have are compared. Anything fits where `live` is None, or is not a plain value.

    >>> mismatch({"last_epoch": 3, "factor": 0.5}, {"last_epoch": "x", "factor": 1}, "scheduler")
    'scheduler.last_epoch is a str, not an int'
    """
    items: list[tuple[Any, Any, str]] = []
    if isinstance(live, Mapping) and isinstance(saved, Mapping):
        items = [(value, saved[key], f"{path}.{key}") for key, value in live.items() if key in saved]
    elif isinstance(live, (list, tuple)) and isinstance(saved, (list, tuple)):
        items = [(*pair, f"{path}[{index}]") for index, pair in enumerate(zip(live, saved, strict=False))]
    complaint = next(filter(None, (mismatch(*item) for item in items)), None)
    if complaint is not None:
        return complaint
    if _is_number(live):
        fits = _is_number(saved)
    elif isinstance(live, torch.Tensor):
        fits = isinstance(saved, torch.Tensor) or _is_number(saved)
    else:
        kinds: tuple[Any, ...] = (Mapping, (list, tuple), str, bytes, bool)
        fits = isinstance(saved, next((kind for kind in kinds if isinstance(live, kind)), object))
    if fits:
        return None
    name = type(live).__name__
    return f"{path} is a {type(saved).__name__}, not a{'n' * (name[0] in 'aeio')} {name}"


def require_kinds(state: Any, kinds: Mapping[str, tuple[type, ...]], *, of: str) -> None:
    """Refuse a state (`of` an object) that lacks an entry of `kinds`, or has one of another type than allowed there."""
    has = state if isinstance(state, Mapping) else {}
    wrong = [name for name, allowed in kinds.items() if name not in has or type(has[name]) not in allowed]
    if wrong:
        raise InvalidCheckpointError(
            f"The state of {of} was written by another class: {', '.join(wrong)} is missing or of another kind."
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
