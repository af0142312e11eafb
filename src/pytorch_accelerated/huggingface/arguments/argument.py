"""How an argument is declared: everything that is known about it is in its field."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from types import NoneType, UnionType
from typing import Any, get_args

from pytorch_accelerated.huggingface.arguments.rules import Rule, kind_by_annotation


@dataclasses.dataclass(frozen=True)
class Argument:
    """What is known about an argument besides its name, its annotation and its help text.

    Attributes:
        default: of an unsupported argument, the value that asks for nothing.
        kind: what every value must be. Default: as the annotation says; nothing for an unsupported argument.
        may_be_none: whether None is a value, too.
        limit: what a value of this kind must be besides.
        choices: the only values, or the only items of a list.
        otherwise: what to do instead of giving a value that is none of the choices.
        needs: the argument without which this one would have no effect.
        native: the equivalent for the native `Trainer`.
        same_as: the argument of which this is another name.
        gives: the value of that argument that this flag stands for.
        why_unsupported: the reason, and what to do instead; empty for a supported argument.
        also: further values of an unsupported argument that ask for nothing.
    """

    default: Any
    kind: Rule | None = None
    may_be_none: bool = False
    limit: Rule | None = None
    choices: tuple[str, ...] = ()
    otherwise: str = ""
    needs: str = ""
    native: str = ""
    same_as: str = ""
    gives: Any = None
    why_unsupported: str = ""
    also: tuple[Any, ...] = ()


class Help(str):
    """A help text that has its `Argument` with it, because parsers hand all other metadata of a field to argparse."""

    argument: Argument


def argument(default: Any, help: str, native: str = "", **known: Any) -> Any:
    """A field for an argument; `native` and `known` are attributes of `Argument`."""
    return _field(default, help, {}, native=native, **known)


def other_name(same_as: str, default: Any = None, *, gives: Any = None, **known: Any) -> Any:
    """A field for another name of the argument `same_as`, or, if it `gives` a value, for a flag that stands for it."""
    value = "" if gives is None else f"={', '.join(gives) if isinstance(gives, list) else gives}"
    return _field(default, f"The same as {same_as}{value}.", {}, same_as=same_as, gives=gives, **known)


def unsupported(default: Any, why: str, also: tuple[Any, ...] = ()) -> Any:
    """A field for an unsupported argument, so that scripts, command lines and JSON may have one that asks for nothing.

    It is left out where arguments are compared or shown.
    """
    options = {"kw_only": True, "repr": False, "compare": False}
    return _field(default, f"Unsupported; {default!r} asks for nothing.", options, why_unsupported=why, also=also)


def _field(default: Any, text: str, options: dict[str, Any], **known: Any) -> Any:
    help = Help(text)
    help.argument = Argument(default, **known)
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata={"help": help}, **options)
    return dataclasses.field(default=default, metadata={"help": help}, **options)


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
            help = fields[name].metadata.get("help") if name in fields else None
            if isinstance(help, Help) and name not in found:
                types = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
                own = help.argument
                kind = None if own.why_unsupported else own.kind or kind_by_annotation(types)
                found[name] = dataclasses.replace(own, kind=kind, may_be_none=NoneType in types)
            elif name in fields and name in found and found[name].why_unsupported:
                del found[name]
    return found


def unsupported_names(kind: type) -> list[str]:
    """The unsupported arguments of a class."""
    return [name for name, argument in arguments_of(kind).items() if argument.why_unsupported]


def asks_for_nothing(name: str, argument: Argument, value: Any) -> bool:
    """Whether `value` of an unsupported argument changes nothing."""
    value = None if value == "None" else value  # on a command line
    accepted = [argument.default, *argument.also]
    if name == "local_rank":  # older launchers put it on the command line
        places = (os.environ.get(name, "") for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"))
        accepted += [int(place) for place in places if place.isdigit()]
    return any(isinstance(value, type(one)) and value == one for one in accepted)
