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
    if isinstance(live, Mapping):
        return _mismatch_of_mapping(live, saved, path)
    fits = True
    if isinstance(live, (list, tuple)):
        fits = isinstance(saved, (list, tuple))
        if fits:
            samples = [*live, *([live[-1]] * (len(saved) - len(live)) if live else [])]
            pairs = zip(samples, saved, strict=False)
            return _first(mismatch(one, other, f"{path}[{index}]") for index, (one, other) in enumerate(pairs))
    elif type(live) in (str, bytes, bool):
        fits = type(saved) is type(live)
    elif _is_number(live):
        fits = _is_number(saved)
    elif isinstance(live, torch.Tensor):
        fits = isinstance(saved, torch.Tensor) or _is_number(saved)
    return None if fits else _other_kind(live, saved, path)


def require_kinds(state: Any, kinds: Mapping[str, tuple[type, ...]], *, of: str) -> None:
    """Refuse a state (`of` an object) that lacks an entry of `kinds`, or has one of another type than allowed there."""
    has = state if isinstance(state, Mapping) else {}
    wrong = [name for name, allowed in kinds.items() if name not in has or type(has[name]) not in allowed]
    if wrong:
        raise InvalidCheckpointError(
            f"The state of {of} was not written by an object of that class: {', '.join(wrong)} is missing or of "
            "another kind. Use another training state."
        )


def _mismatch_of_mapping(live: Mapping[Any, Any], saved: Any, path: str) -> str | None:
    if not isinstance(saved, Mapping):
        return _other_kind(live, saved, path)
    if all(isinstance(key, str) for key in live):
        # An older version of the object may have had fewer attributes; a dict inside its state must be complete.
        missing = [] if "last_epoch" in live or "." not in path else [key for key in live if key not in saved]
        if missing:
            return f"{path} has no {', '.join(missing)}"
        return _first(mismatch(live[key], saved[key], f"{path}.{key}") for key in live if key in saved)
    # The keys of a counter, for example, are values too.
    return mismatch(list(live), list(saved), f"the keys of {path}") or mismatch(
        list(live.values()), list(saved.values()), path
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _other_kind(live: Any, saved: Any, path: str) -> str:
    name = type(live).__name__
    return f"{path} is a {type(saved).__name__}, not a{'n' * (name[0] in 'aeio')} {name}"


def _first(complaints: Any) -> str | None:
    return next((complaint for complaint in complaints if complaint is not None), None)
