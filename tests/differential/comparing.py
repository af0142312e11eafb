"""Where two trees of observations differ."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# The reference adds losses up in float32.
RELATIVE_TOLERANCE = 1e-6
# Learning rates and losses that are zero but for rounding; everything else in the scenarios is far larger.
SMALLEST = 1e-12
ABSENT = "(absent)"
# Here more names, members and arguments than the reference has are no difference.
MAY_HAVE_MORE = ("signatures.",)


@dataclass(frozen=True)
class Finding:
    """An observation that differs: its name, and what each package showed."""

    name: str
    reference: Any
    ours: Any


def differences(reference: Any, ours: Any, name: str = "") -> Iterator[Finding]:
    """Every observation that isn't the same in both trees."""
    if _raises(reference) != _raises(ours):
        yield Finding(name, _outcome(reference), _outcome(ours))
    elif isinstance(reference, dict) and isinstance(ours, dict):
        for key in dict.fromkeys([*reference, *ours]):
            path = f"{name}/{key}" if name else key
            if key not in reference and path.startswith(MAY_HAVE_MORE):
                continue
            yield from differences(reference.get(key, ABSENT), ours.get(key, ABSENT), path)
    elif not _same(reference, ours):
        yield Finding(name, reference, ours)


def _raises(seen: Any) -> bool:
    return isinstance(seen, dict) and "raises" in seen


def _outcome(seen: Any) -> str:
    return f"raises {seen['raises']}" if _raises(seen) else "no error"


def _same(reference: Any, ours: Any) -> bool:
    if isinstance(reference, list) and isinstance(ours, list):
        return len(reference) == len(ours) and all(map(_same, reference, ours))
    if _is_number(reference) and _is_number(ours):
        both_nan = math.isnan(reference) and math.isnan(ours)
        return both_nan or math.isclose(reference, ours, rel_tol=RELATIVE_TOLERANCE, abs_tol=SMALLEST)
    return type(reference) is type(ours) and bool(reference == ours)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
