"""Placeholders: expressions that a run turns into numbers."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.placeholders import TrainerPlaceholderValues as P
from pytorch_accelerated.facts.placeholders import replace_trainer_placeholder_values
from pytorch_accelerated.run_config import TrainerRunConfig

VALUES = {
    P.NUM_EPOCHS: 3,
    P.NUM_UPDATE_STEPS_PER_EPOCH: 7,
    P.TRAIN_DATALOADER_LEN: 14,
    P.EVAL_DATALOADER_LEN: 5,
    P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH: 7,
}
ALL = list(VALUES)


def a_trainer(**facts: Any) -> Any:
    """What placeholders need of a trainer: its run config, here of a run as in `VALUES`, or as `facts` say."""
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(TrainerRunConfig))
    known = {placeholder.value: value for placeholder, value in VALUES.items()}
    return SimpleNamespace(run_config=TrainerRunConfig(**{**fields, **known, **facts}))


def a_stream_trainer(**facts: Any) -> Any:
    unknown = ("num_update_steps_per_epoch", "num_local_update_steps_per_epoch", "train_dataloader_len")
    return a_trainer(**dict.fromkeys(unknown), **facts)


def resolved(value: Any, trainer: Any = None) -> Any:
    """What a scheduler function gets for `value`."""
    function = replace_trainer_placeholder_values(trainer or a_trainer(), functools.partial(lambda got: got, value))
    return function()


@pytest.mark.parametrize("placeholder", ALL, ids=lambda placeholder: placeholder.name)
def test_a_plain_placeholder_becomes_the_number_of_the_run(placeholder: P) -> None:
    assert resolved(placeholder) == VALUES[placeholder]
    assert type(resolved(placeholder)) is int


@pytest.mark.parametrize(
    ("expression", "number"),
    [
        (-P.NUM_EPOCHS + 10, 7),
        (1 / P.NUM_EPOCHS, 1 / 3),
        (np.float64(0.5) * P.NUM_EPOCHS, 1.5),
        (np.float32(0.5) - P.NUM_EPOCHS * np.int64(2), -5.5),
    ],
    ids=str,
)
def test_signs_and_the_numbers_of_numpy_may_be_in_an_expression(expression: Any, number: float) -> None:
    assert resolved(expression) == number
    assert isinstance(resolved(expression), type(number))


expressions = st.recursive(
    st.one_of(
        st.sampled_from(ALL).map(lambda placeholder: (placeholder, VALUES[placeholder])),
        st.integers(-9, 9).map(lambda number: (number, number)),
        st.integers(-72, 72).map(lambda eighths: (eighths / 8, eighths / 8)),  # neither overflows nor rounds to 0
    ),
    lambda pairs: st.tuples(
        st.sampled_from([operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv]), pairs, pairs
    ).map(lambda drawn: _apply(*drawn)),
    max_leaves=8,
)


def _apply(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if function in (operator.truediv, operator.floordiv) and right[1] == 0:
        function = operator.add
    return function(left[0], right[0]), function(left[1], right[1])


@settings(deadline=None)
@given(expressions)
def test_any_expression_gives_what_python_gives_for_the_numbers(pair: tuple[Any, Any]) -> None:
    expression, number = pair
    assert resolved(expression) == number
    assert type(resolved(expression)) is type(number)


@settings(deadline=None)
@given(expressions)
def test_the_text_of_an_expression_is_the_expression(pair: tuple[Any, Any]) -> None:
    expression, number = pair
    text = str(expression.name if isinstance(expression, P) else expression)
    again = eval(text, {placeholder.name: value for placeholder, value in VALUES.items()})
    assert again == number


@pytest.mark.parametrize("value", [P.NUM_EPOCHS, P.NUM_EPOCHS * 2], ids=["plain", "expression"])
@pytest.mark.parametrize(
    "use",
    [
        bool,
        int,
        float,
        range,
        round,
        math.sqrt,
        math.floor,
        math.ceil,
        math.trunc,
        lambda value: value < 3,
        lambda value: value <= 3,
        lambda value: value > 3,
        lambda value: value >= 3,
        lambda value: [0, 1][value],
    ],
)
def test_use_as_a_number_before_the_run_is_a_clear_type_error(use: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(TypeError, match=r"NUM_EPOCHS.* has no value before a run starts.*create_scheduler_fn"):
        use(value)


def test_placeholders_are_found_among_all_values_and_inside_containers() -> None:
    def record(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    kept = object()
    original = functools.partial(
        record,
        P.NUM_EPOCHS,
        [1, (P.NUM_EPOCHS + 1, kept)],
        steps=P.NUM_UPDATE_STEPS_PER_EPOCH,
        nested={"key": [P.NUM_EPOCHS * 2]},
        inner=functools.partial(pow, P.NUM_EPOCHS),
        text="NUM_EPOCHS",
    )
    function = replace_trainer_placeholder_values(a_trainer(), original)
    args, kwargs = function("optimizer")
    assert args == (3, [1, (4, kept)], "optimizer")
    assert kwargs.pop("inner")(2) == 9
    assert kwargs == {"steps": 7, "nested": {"key": [6]}, "text": "NUM_EPOCHS"}
    assert original.args[0] is P.NUM_EPOCHS, "the given partial was changed"


def test_a_partial_of_a_partial_is_resolved_whether_functools_flattens_it_or_not() -> None:
    inner = functools.partial(pow, P.NUM_EPOCHS)
    assert replace_trainer_placeholder_values(a_trainer(), functools.partial(inner, P.NUM_EPOCHS))() == 27
    inner.note = "functools keeps a partial with attributes as it is"  # type: ignore[attr-defined]
    outer = functools.partial(inner, P.NUM_EPOCHS)
    assert outer.func is inner
    assert replace_trainer_placeholder_values(a_trainer(), outer)() == 27
    assert replace_trainer_placeholder_values(a_trainer(), pow) is pow


def test_a_stream_of_known_duration_counts_as_one_epoch() -> None:
    trainer = a_stream_trainer(num_epochs=4, max_num_train_steps=50, gradient_accumulation_steps=3)
    assert resolved(P.NUM_EPOCHS, trainer) == 1
    assert resolved(P.NUM_UPDATE_STEPS_PER_EPOCH, trainer) == 50
    assert resolved(P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH, trainer) == 50
    assert resolved(P.NUM_EPOCHS * P.NUM_UPDATE_STEPS_PER_EPOCH, trainer) == 50
    assert resolved(P.TRAIN_DATALOADER_LEN, trainer) == 150
    assert resolved(P.EVAL_DATALOADER_LEN, trainer) == 5


@pytest.mark.parametrize(
    "placeholder",
    [P.NUM_UPDATE_STEPS_PER_EPOCH, P.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH, P.TRAIN_DATALOADER_LEN],
    ids=lambda placeholder: placeholder.name,
)
def test_a_stream_of_unknown_duration_is_an_error_that_says_what_to_do(placeholder: P) -> None:
    with pytest.raises(ConfigurationError, match=rf"{placeholder.name} .*length.*max_num_train_steps.*number instead"):
        resolved(2 * placeholder, a_stream_trainer())


def test_without_a_run_there_is_nothing_to_replace_placeholders_with() -> None:
    with pytest.raises(ConfigurationError, match="before a run"):
        resolved(P.NUM_EPOCHS, SimpleNamespace(run_config=None))
