"""Every argument, tested from its field: default, kind, limit, choices, command line, or why it is unsupported."""

import ast
import dataclasses
import math
import re
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.huggingface import Seq2SeqTrainingArguments, TrainingArguments
from pytorch_accelerated.huggingface.arguments import fields, rules
from pytorch_accelerated.huggingface.arguments.argument import Argument, arguments_of

PACKAGE = Path(fields.__file__).parents[1]
ALL = arguments_of(TrainingArguments)
SUPPORTED = {name: one for name, one in ALL.items() if not one.why_unsupported}
UNSUPPORTED = {name: one for name, one in ALL.items() if one.why_unsupported}
DEFAULTS = {one.name: one.default for one in dataclasses.fields(TrainingArguments)}
NEEDS: dict[str, dict[str, Any]] = {
    **{
        name: {one.needs: 1 if one.needs == "dataloader_num_workers" else True}
        for name, one in ALL.items()
        if one.needs
    },
    "load_best_model_at_end": {"eval_strategy": "epoch", "save_strategy": "epoch"},
}


def make(**arguments: Any) -> TrainingArguments:
    return TrainingArguments(**arguments)


def another_value(name: str) -> Any:
    """A value that differs from the default."""
    given: dict[str, Any] = {"fsdp": "full_shard", "fsdp_config": {"min_num_params": 1}}
    if name in given:
        return given[name]
    argument = SUPPORTED[name]
    default = DEFAULTS[argument.same_as or name]
    for one in typing.get_args(typing.get_type_hints(fields.Arguments)[name]):
        if isinstance(one, type) and issubclass(one, Enum):
            return next(member.value for member in one if member != default)
    some = argument.choices[-1] if argument.choices else "some"
    of_kind = {
        rules.A_FLAG: not argument.default,
        rules.A_LIST: [some],
        rules.TRACKER_NAMES: [some],
        rules.A_DICT: {"a": 1},
        rules.STEPS: 0.5,
        rules.WARMUP_STEPS: 0.5,
    }
    if argument.kind in of_kind:
        return of_kind[argument.kind]
    assert argument.kind is not None
    return next(value for value in (2, 0.5, some) if holds(argument, value))


def holds(argument: Argument, value: Any) -> bool:
    assert argument.kind is not None
    return argument.kind.holds(value) and (argument.limit is None or argument.limit.holds(value))


# ----------------------------------------------------------------------------------------------------------- supported


@pytest.fixture(scope="module")
def parser() -> Any:
    from transformers import HfArgumentParser

    return HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]  # a dataclass


@pytest.mark.fact("Arguments: Every argument is read from a command line, and kept by to_dict")
@pytest.mark.fact("Arguments: Old names are accepted: evaluation_strategy, logging_dir, include_inputs_for_metrics")
@pytest.mark.parametrize("name", sorted(SUPPORTED.keys() - {"deepspeed"}))  # which needs the package to be copied
def test_an_argument_comes_from_a_command_line_and_is_kept(name: str, parser: Any) -> None:
    needed, value = NEEDS.get(name, {}), another_value(name)
    texts = [str(item) for item in value] if isinstance(value, list) else [str(value).replace("'", '"')]
    companions = [f"--{other}={text}" for other, text in needed.items()]
    (parsed,) = parser.parse_args_into_dataclasses([*companions, f"--{name}", *texts])
    assert parsed == make(**{name: value}, **needed)
    assert parsed != make(**needed)
    assert make(**parsed.to_dict()) == dataclasses.replace(parsed) == parsed
    target = SUPPORTED[name].same_as or name
    assert getattr(parsed, target) == (SUPPORTED[name].gives or value)


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_default_is_of_its_kind(name: str) -> None:
    argument, value = SUPPORTED[name], getattr(make(), name)
    assert (value is None and argument.may_be_none) or holds(argument, value)
    assert not argument.choices or set([value] if isinstance(value, str) else value or ()) <= set(argument.choices)


@pytest.mark.fact("Arguments: A value of the wrong type is a TypeError that names the argument and the type")
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_value_of_the_wrong_kind_is_rejected(name: str) -> None:
    argument = SUPPORTED[name]
    shown = name if argument.gives or not argument.same_as else argument.same_as
    with pytest.raises((ArgumentTypeError, ConfigurationError)) as caught:
        make(**{name: b"wrong"})
    assert argument.kind is not None
    if isinstance(caught.value, ConfigurationError):
        assert str(caught.value).startswith(f"`{shown}` cannot work: b'wrong' is no ")
    else:
        assert str(caught.value) == f"TrainingArguments cannot work: `{shown}` is b'wrong': give {argument.kind.words}."


@pytest.mark.parametrize("name", [name for name, one in SUPPORTED.items() if one.limit])
def test_a_value_beyond_the_limit_is_rejected(name: str) -> None:
    argument, rejected = SUPPORTED[name], 0
    assert argument.kind is not None
    assert argument.limit is not None
    for value in (-2, -1, 0, 1, 2**32, 1.0, 1.5, math.inf, math.nan):
        if argument.kind.holds(value) and not argument.limit.holds(value):
            with pytest.raises(
                ConfigurationError, match=re.escape(f"`{name}` is {value!r}: give {argument.limit.words}")
            ):
                make(**{name: value})
            rejected += 1
    assert rejected


@pytest.mark.parametrize("name", [name for name, one in SUPPORTED.items() if one.choices])
def test_a_choice_that_does_not_exist_brings_all(name: str) -> None:
    argument = SUPPORTED[name]
    value = ["other"] if argument.kind in (rules.A_LIST, rules.TRACKER_NAMES) else "other"
    choices = f"choose among {', '.join(map(repr, argument.choices))}{argument.otherwise}"
    with pytest.raises(ConfigurationError, match=re.escape(f"`{name}` is {value!r}: {choices}")):
        make(**{name: value})


@pytest.mark.parametrize("name", ["output_dir", "logging_dir", "resume_from_checkpoint"])
def test_a_path_may_be_an_object(name: str) -> None:
    assert getattr(make(**{name: Path("there")}), name) == "there"


@pytest.mark.fact("Arguments: An argument is rejected without one that it needs: a prefetch factor without workers")
@pytest.mark.parametrize("name", [name for name, one in SUPPORTED.items() if one.needs])
def test_an_argument_without_the_one_that_it_needs_is_rejected(name: str) -> None:
    value, needed = another_value(name), SUPPORTED[name].needs
    message = f"`{name}` is {value!r}, but `{needed}` is {SUPPORTED[needed].default!r}, so it would have no effect"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make(**{name: value})


@pytest.mark.parametrize("name", ALL)
def test_an_argument_is_described(name: str) -> None:
    argument, text = ALL[name], TrainingArguments.__dataclass_fields__[name].metadata["help"]
    assert text.endswith(".")
    assert not {"\n", "|"} & {*text, *argument.native, *argument.why_unsupported}, "they stand in a table"
    assert bool(argument.native) == (not argument.same_as and not argument.why_unsupported)
    assert not argument.same_as or SUPPORTED[argument.same_as].native


def test_every_argument_is_read_somewhere() -> None:
    """By its name, as an attribute of anything; an effect is what the other tests show."""
    files = [file for file in PACKAGE.rglob("*.py") if file.name != "fields.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}  # getattr
    for_scripts = {"do_train", "do_eval", "do_predict", "resume_from_checkpoint"}
    assert {name for name, one in SUPPORTED.items() if not one.same_as} - read - for_scripts == set()


@pytest.mark.parametrize("name", sorted(arguments_of(Seq2SeqTrainingArguments).keys() - ALL.keys()))
def test_an_argument_of_a_subclass_is_checked_there(name: str) -> None:
    argument = arguments_of(Seq2SeqTrainingArguments)[name]
    assert argument.kind is not None
    arguments: dict[str, Any] = {name: b"wrong"}
    with pytest.raises(ArgumentTypeError, match=f"`{name}` is b'wrong': give {argument.kind.words}"):
        Seq2SeqTrainingArguments(**arguments)
    with pytest.raises(ArgumentTypeError, match=f"`{name}` is b'wrong', but it is one of the Seq2SeqTrainingArg"):
        make(**arguments)


def test_a_subclass_changes_a_default_but_no_rule() -> None:
    @dataclasses.dataclass
    class MyArguments(TrainingArguments):
        learning_rate: float = 0.1
        seed: int | None = None  # type: ignore[assignment]  # users do that
        flag: bool = False
        weight_decay: "float" = dataclasses.field(
            default=0.5, metadata=dict(TrainingArguments.__dataclass_fields__["weight_decay"].metadata)
        )

    assert (MyArguments().learning_rate, MyArguments().seed) == (0.1, None)
    for arguments, message in (
        ({"learning_rate": -1}, "`learning_rate` is -1: give a finite number"),
        ({"learning_rate": "1"}, "`learning_rate` is '1': give a number"),
        ({"seed": -1}, "`seed` is -1: give"),
        ({"flag": "false"}, "`flag` is 'false': give True or False"),
        ({"weight_decay": -1}, "`weight_decay` is -1: give"),
    ):
        with pytest.raises((ArgumentTypeError, ConfigurationError), match=message):
            MyArguments(**arguments)  # type: ignore[arg-type]  # on purpose


# --------------------------------------------------------------------------------------------------------- unsupported


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_argument_is_rejected_with_reason_and_remedy(name: str) -> None:
    why = UNSUPPORTED[name].why_unsupported
    with pytest.raises(ArgumentTypeError) as caught:
        make(**{name: "some value"})
    assert str(caught.value) == f"`{name}` is 'some value', but this argument is unsupported. {why}"
    assert ". " in why


@pytest.mark.fact("Arguments: An unsupported argument may have the value that asks for nothing, and may be read")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_argument_may_ask_for_nothing(name: str) -> None:
    argument = UNSUPPORTED[name]
    args, without = make(**{name: argument.default}), make()
    assert getattr(args, name) == getattr(without, name) == (0 if name == "local_rank" else argument.default)
    for other in argument.also:
        assert make(**{name: other}) == without
    assert args == without
    assert args.to_dict() == without.to_dict()
    assert name not in args.to_dict()


# ---------------------------------------------------------------------------------------------- those of transformers


@pytest.mark.fact("Arguments: The defaults are those of transformers")
def test_defaults_are_those_of_transformers() -> None:
    from transformers import TrainingArguments as GenuineArguments

    theirs = {one.name: one.default for one in dataclasses.fields(GenuineArguments)}
    # Theirs is filled in later, or tells nothing apart that ours does: "none" from left out.
    differing = {"report_to", "gradient_checkpointing", "activation_checkpointing", "include_for_metrics"}
    common = DEFAULTS.keys() & theirs.keys() - differing
    assert len(common) > 100
    assert {name: DEFAULTS[name] for name in common} == {name: theirs[name] for name in common}


@pytest.mark.fact("Arguments: Every argument of transformers is supported, or rejected with the reason and the remedy")
def test_every_argument_of_transformers_is_supported_or_has_a_reason() -> None:
    from transformers import TrainingArguments as GenuineArguments

    theirs = {one.name for one in dataclasses.fields(GenuineArguments)}
    assert theirs - DEFAULTS.keys() == set()
    # What only we have is there for older scripts.
    assert {name for name in SUPPORTED.keys() - theirs if not SUPPORTED[name].same_as} == {"logging_dir"}
