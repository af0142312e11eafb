"""Strict JSON, for files that may be damaged or hostile."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError

MAX_DEPTH = 32
MAX_SIZE_BYTES = 16 * 2**20


def dump_json(value: Any, *, what: str, indent: int | None = None) -> bytes:
    """`value` as ASCII JSON that `load_json` accepts.

    Args:
        value: None, bools, ints, finite floats, strings, and lists and string-keyed dicts of them.
        what: the name of the document in errors.
        indent: spaces per level, for files that people read.

    Raises:
        CheckpointError: if the document is larger or nested deeper than `load_json` accepts.
    """
    if not _is_shallow(value):
        raise CheckpointError(f"{what} is nested deeper than {MAX_DEPTH} levels of JSON. Store it with fewer levels.")
    separators = (",", ":") if indent is None else (",", ": ")
    data = json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode("ascii")
    if len(data) > MAX_SIZE_BYTES:
        raise CheckpointError(
            f"{what} needs {len(data)} bytes of JSON; a training state holds at most {MAX_SIZE_BYTES} in one file. "
            "Keep large numbers of values in tensors, which are stored separately."
        )
    return data


def load_json(data: bytes, *, what: str) -> Any:
    """The value of a JSON document.

    Raises:
        InvalidCheckpointError: unless `data` is one document in UTF-8 within the limits of size and depth, without
            repeated keys and non-finite numbers.
    """
    if len(data) > MAX_SIZE_BYTES:
        raise InvalidCheckpointError(f"{what} has {len(data)} bytes, more than the {MAX_SIZE_BYTES} that are allowed.")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpointError(f"{what} is not strict JSON: {error}") from error
    if not _is_shallow(value):
        raise InvalidCheckpointError(f"{what} is nested deeper than {MAX_DEPTH} levels.")
    return value


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return True
    return False


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("an object repeats a key")
    return unique


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _finite_float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text} is too large")
    return number
