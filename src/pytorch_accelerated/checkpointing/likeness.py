"""Whether a saved value is of the kind that stands in its place now: numbers for numbers, lists for lists."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import InvalidCheckpointError

_PLAIN = (str, bytes, bool)


def misfit(live: Any, saved: Any, path: str) -> str | None:
    """What is of another kind in `saved` than in `live`; None if nothing is.

    Of containers the items are compared that both have. Where `live` is None, or something that is not plain, nobody
    knows what belongs there, and anything fits.

    Args:
        live: what is there now.
        saved: what would take its place.
        path: names the place in what is returned.

    >>> misfit({"last_epoch": 3, "factor": 0.5}, {"last_epoch": "x", "factor": 1}, "scheduler")
    'scheduler.last_epoch is a str, not an int'
    """
    if isinstance(live, Mapping):
        return _misfit_of_mapping(live, saved, path)
    if isinstance(live, (list, tuple)):
        if not isinstance(saved, (list, tuple)):
            return _told(live, saved, path)
        samples = [*live, *([live[-1]] * (len(saved) - len(live)) if live else [])]
        pairs = zip(samples, saved, strict=False)
        return _first(misfit(one, other, f"{path}[{index}]") for index, (one, other) in enumerate(pairs))
    is_fine = True
    if type(live) in _PLAIN:
        is_fine = type(saved) is type(live)
    elif _is_number(live):
        is_fine = _is_number(saved)
    elif isinstance(live, torch.Tensor):
        is_fine = isinstance(saved, torch.Tensor) or _is_number(saved)
    return None if is_fine else _told(live, saved, path)


def require_kinds(state: Any, kinds: Mapping[str, tuple[type, ...]], *, of: str) -> None:
    """Refuse a state that lacks an entry, or has one of another kind. A bool is no number.

    Args:
        state: anything.
        kinds: of the entries, by name.
        of: names whose state it is.

    Raises:
        InvalidCheckpointError: names the entry.
    """
    has = state if isinstance(state, Mapping) else {}
    wrong = [name for name, allowed in kinds.items() if name not in has or type(has[name]) not in allowed]
    if wrong:
        raise InvalidCheckpointError(
            f"The state of {of} is none that one of its class has written: {', '.join(wrong)} is missing or of another "
            "kind. Use another training state."
        )


def _misfit_of_mapping(live: Mapping[Any, Any], saved: Any, path: str) -> str | None:
    if not isinstance(saved, Mapping):
        return _told(live, saved, path)
    if all(isinstance(key, str) for key in live):
        # The state of an object may be that of another version, which had fewer attributes; a part of it may not.
        missing = [] if "last_epoch" in live or "." not in path else [key for key in live if key not in saved]
        if missing:
            return f"{path} has no {', '.join(missing)}"
        return _first(misfit(live[key], saved[key], f"{path}.{key}") for key in live if key in saved)
    # Of counters and the like the keys are values, too.
    return misfit(list(live), list(saved), f"the keys of {path}") or misfit(
        list(live.values()), list(saved.values()), path
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _told(live: Any, saved: Any, path: str) -> str:
    name = type(live).__name__
    return f"{path} is a {type(saved).__name__}, not a{'n' * (name[0] in 'aeio')} {name}"


def _first(complaints: Any) -> str | None:
    return next((complaint for complaint in complaints if complaint is not None), None)
