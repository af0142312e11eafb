"""How an argument is declared: everything that is known about it is in its field, and what values must be."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin

from pytorch_accelerated.errors import ConfigurationError

TRACKERS = ("tensorboard", "mlflow", "wandb")  # for which we have callbacks


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
        return json.loads(Path(value).read_text(encoding="utf-8") if is_path else value)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"`{name}` is {value!r}, from which no JSON can be read: {error}") from error


def _read_trackers(name: str, value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if names == ["none"]:
        return []
    return [tracker for tracker in TRACKERS if find_spec(tracker)] if names == ["all"] else names


def _read_steps(name: str, value: Any) -> Any:
    """Make whole numbers of the floats that a command line gives."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclasses.dataclass
class AcceleratorConfig:
    """How accelerate would deal out batches. Here, most of it changes nothing; see `refuse_processes` for the rest.

    Every row is used once, in an order that follows from the seed, and batches are copied to the device ahead of their
    use, whatever `even_batches`, `use_seedable_sampler` and `non_blocking` say.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The values by name."""
        return dataclasses.asdict(self)


def _read_accelerator_config(name: str, value: Any) -> Any:
    """Also for one of transformers, whose class is another."""
    value = value.to_dict() if hasattr(value, "to_dict") else _read_dict(name, value, may_be_file=True)
    return AcceleratorConfig(**value) if isinstance(value, Mapping) else value


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
AN_ACCELERATOR_CONFIG = Rule(
    "an AcceleratorConfig or a dict of its values",
    lambda value: isinstance(value, AcceleratorConfig),
    _read_accelerator_config,
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


# ------------------------------------------------------------------------------------------------------ declarations


@dataclasses.dataclass(frozen=True)
class Argument:
    """What is known about an argument besides its name, its annotation and its help text.

    Attributes:
        default: of an unsupported argument, the value that turns the feature off.
        kind: what every value must be. Default: as the annotation says; nothing for an unsupported argument.
        may_be_none: whether None is a value, too.
        limit: what else a value of this kind must be.
        choices: the only values, or the only items of a list.
        needs: the argument without which this one would have no effect.
        same_as: the argument that this is another name for.
        gives: the value of that argument that this flag stands for.
        why_unsupported: the reason, and what to do instead; empty for a supported argument.
        also: further values of an unsupported argument that ask for nothing.
    """

    default: Any
    kind: Rule | None = None
    may_be_none: bool = False
    limit: Rule | None = None
    choices: tuple[str, ...] = ()
    needs: str = ""
    same_as: str = ""
    gives: Any = None
    why_unsupported: str = ""
    also: tuple[Any, ...] = ()


# By field, and not in its metadata, because parsers hand all of that to argparse.
_KNOWN: dict[dataclasses.Field[Any], Argument] = {}


def argument(default: Any, help: str, **known: Any) -> Any:
    """A field for an argument; `known` are attributes of `Argument`."""
    return _field(default, help, {}, **known)


def other_name(same_as: str, default: Any = None, *, gives: Any = None, **known: Any) -> Any:
    """A field for another name of the argument `same_as`, or, if it `gives` a value, for a flag that stands for it."""
    value = "" if gives is None else f"={', '.join(gives) if isinstance(gives, list) else gives}"
    return _field(default, f"The same as {same_as}{value}.", {}, same_as=same_as, gives=gives, **known)


def unsupported(default: Any, why: str, also: tuple[Any, ...] = ()) -> Any:
    """A field for an unsupported argument, so that scripts, command lines and JSON may turn its feature off.

    It is left out where arguments are compared or shown.
    """
    options = {"kw_only": True, "repr": False, "compare": False}
    return _field(default, f"Unsupported; {default!r} turns the feature off.", options, why_unsupported=why, also=also)


def _field(default: Any, help: str, options: dict[str, Any], **known: Any) -> Any:
    made = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    field: dataclasses.Field[Any] = dataclasses.field(metadata={"help": help}, **made, **options)
    _KNOWN[field] = Argument(default, **known)
    return field


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field, made if it has a function for that."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def arguments_of(kind: type) -> dict[str, Argument]:
    """The arguments of a class by name, without fields of a subclass's own.

    A subclass may have a field with the name of an argument. If that is a supported one, it keeps its kind and its
    limits; an unsupported one becomes the subclass's own.
    """
    return _arguments_of(kind.__mro__)


@functools.cache
def _arguments_of(bases: tuple[type, ...]) -> dict[str, Argument]:
    found: dict[str, Argument] = {}
    for base in reversed(bases):
        fields = vars(base).get("__dataclass_fields__", {})
        for name, annotation in inspect.get_annotations(base).items():  # HfArgumentParser changes the fields' own types
            own = _KNOWN.get(fields.get(name))
            if own is not None and name not in found:
                types = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
                rule = None if own.why_unsupported else own.kind or kind_by_annotation(types)
                found[name] = dataclasses.replace(own, kind=rule, may_be_none=NoneType in types)
            elif name in fields and name in found and found[name].why_unsupported:
                del found[name]
    return found


def unsupported_names(kind: type) -> list[str]:
    """The unsupported arguments of a class."""
    return [name for name, argument in arguments_of(kind).items() if argument.why_unsupported]


def is_rejected(name: str, argument: Argument | None, value: Any) -> bool:
    """Whether `value` of an unsupported argument asks for something."""
    if argument is None or not argument.why_unsupported:
        return False
    # On a command line, and as `to_dict` shows a secret.
    value = None if value in ("None", f"<{name.upper()}>") else value
    if name == "local_rank" and isinstance(value, int):  # older launchers put it on the command line
        return False
    return not any(isinstance(value, type(one)) and value == one for one in (argument.default, *argument.also))
