"""What values of arguments must be: kinds, most of which follow from a field's annotation, and limits."""

from __future__ import annotations

import functools
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from pytorch_accelerated.errors import ConfigurationError

# Ours, and those for which only `transformers` has callbacks.
TRACKERS = ("tensorboard", "mlflow", "wandb")
TRACKERS_OF_TRANSFORMERS = (
    *("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "neptune"),
    *("swanlab", "trackio"),
)


class Rule(NamedTuple):
    """What a value must be.

    Attributes:
        words: complete the sentence "give ...".
        holds: whether a value is so.
        read: brings a value from a script or a command line, of the argument of some name, into the form to check.
    """

    words: str
    holds: Callable[[Any], bool]
    read: Callable[[str, Any], Any] = lambda name, value: value


def _is_number(value: Any, kind: type = numbers.Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _are_strings(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


def _read_dict(name: str, value: Any, *, may_be_file: bool = False) -> Any:
    if not isinstance(value, str):
        return value
    is_path = may_be_file and not value.lstrip().startswith("{")
    try:
        read = json.loads(Path(value).read_text(encoding="utf-8") if is_path else value)
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigurationError(
            f"`{name}` is {value!r}, from which no JSON can be read ({error}). Give a dict, a dict as JSON"
            f"{', or the path of a file with one' if may_be_file else ''}."
        ) from error
    if not isinstance(read, dict):
        raise ConfigurationError(f"`{name}` is {value!r}, which is JSON, but not of a dict. Give one, as {{...}}.")
    return read


def _read_trackers(name: str, value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if names == ["none"]:
        return []
    return [tracker for tracker in TRACKERS if find_spec(tracker)] if names == ["all"] else names


def _read_steps(name: str, value: Any) -> Any:
    """Make whole numbers of the floats that a command line gives."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# ---------------------------------------------------------------------------------------------------------------- kinds

A_FLAG = Rule("True or False", lambda value: isinstance(value, bool))
A_STRING = Rule(
    "a string",
    lambda value: isinstance(value, str),
    lambda name, value: os.fspath(value) if isinstance(value, os.PathLike) else value,
)
A_LIST = Rule("a list of strings, even for a single one", _are_strings)
A_DICT = Rule("a dict", lambda value: isinstance(value, Mapping), _read_dict)
_BY_TYPE: dict[type, Rule] = {
    list: A_LIST,
    dict: A_DICT,
    bool: A_FLAG,
    int: Rule("a whole number", lambda value: _is_number(value, numbers.Integral)),
    float: Rule("a number", _is_number),
    str: A_STRING,
}

A_DICT_OR_FILE = A_DICT._replace(read=functools.partial(_read_dict, may_be_file=True))
STEPS = Rule("a number", _is_number, _read_steps)
WARMUP_STEPS = STEPS._replace(read=lambda name, value: 0 if value is None else _read_steps(name, value))
TRACKER_NAMES = A_LIST._replace(read=_read_trackers)
# A command line has words only, and older scripts have True and False.
TOKENS_TO_COUNT = A_STRING._replace(
    read=lambda name, value: ("all" if value else "no") if isinstance(value, bool) else value
)
SHARDING = Rule(
    "True or a string",
    lambda value: value is True or isinstance(value, str),
    lambda name, value: {"": None, "false": None, "true": True}.get(str(value or "").lower(), value),
)
A_GENERATION_CONFIG = Rule(
    "a GenerationConfig, a dict of its values, or a path or name",
    lambda value: isinstance(value, (str, os.PathLike, Mapping)) or callable(getattr(value, "to_dict", None)),
)


def a_word_of(enum: type[Enum], hint: str = "") -> Rule:
    """The kind of values that are members of `enum`; `hint` says what to do if none of them fits."""

    def read(name: str, value: Any) -> Enum:
        try:
            return enum(value)
        except ValueError as error:
            raise ConfigurationError(f"`{name}` cannot work: {error}{hint}") from None

    return Rule(f"a member of {enum.__name__}", lambda value: isinstance(value, enum), read)


def kind_by_annotation(types: tuple[Any, ...]) -> Rule | None:
    """The kind of values of a union of `types`."""
    plain = [get_origin(one) or one for one in types]
    for one in plain:
        if issubclass(one, Enum):
            return a_word_of(one)
    return next((rule for kind, rule in _BY_TYPE.items() if kind in plain), None)


# --------------------------------------------------------------------------------------------------------------- limits

AT_LEAST_1 = Rule("1 or more", lambda value: value >= 1)
AT_LEAST_0 = Rule("0 or more", lambda value: value >= 0)
FINITE = Rule("a finite number from 0 on", lambda value: 0 <= value < math.inf)
BELOW_1 = Rule("a number in [0, 1)", lambda value: 0 <= value < 1)
A_SEED = Rule("a whole number from 0 to 4294967295", lambda value: 0 <= value < 2**32)
KEPT_CHECKPOINTS = AT_LEAST_1._replace(words="1 or more, or None to keep all")
MAX_STEPS = Rule("the number of updates, or -1 for none", lambda value: value == -1 or value >= 1)
WARMUP = Rule(
    "a whole number of updates, 0 for no warmup, or a share of the run in (0, 1)",
    lambda value: 0 <= value < 1 or (1 <= value < math.inf and value == int(value)),
)
