"""State and control of a run, and their JSON."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.errors import ArgumentTypeError, InvalidCheckpointError
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments
from pytorch_accelerated.huggingface.events.callbacks import EarlyStoppingCallback
from pytorch_accelerated.huggingface.events.state import ExportableState, TrainerControl, TrainerState


def a_state() -> TrainerState:
    stateful: Any = [EarlyStoppingCallback(2), TrainerControl(should_save=True), EarlyStoppingCallback(3, 0.1)]
    return TrainerState(
        epoch=1.5,
        global_step=3,
        max_steps=6,
        log_history=[{"loss": 0.5, "epoch": 0.5, "step": 1}, {"eval_loss": math.inf, "step": 3}],
        best_metric=0.25,
        best_global_step=2,
        best_model_checkpoint="results/checkpoint-2",
        stateful_callbacks=stateful,
    )


@pytest.mark.fact("Checkpoints: trainer_state.json has the fields of TrainerState")
def test_fields_and_json_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import TrainerState as GenuineState

    assert {one.name for one in dataclasses.fields(TrainerState)} == {
        one.name for one in dataclasses.fields(GenuineState)
    }
    a_state().save_to_json(tmp_path / "ours.json")
    genuine = GenuineState.load_from_json(str(tmp_path / "ours.json"))
    genuine.save_to_json(str(tmp_path / "theirs.json"))
    assert TrainerState.load_from_json(tmp_path / "theirs.json") == a_state()
    assert (tmp_path / "theirs.json").read_text() == (tmp_path / "ours.json").read_text()


def test_a_new_state_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import TrainerState as GenuineState

    GenuineState().save_to_json(str(tmp_path / "theirs.json"))
    assert json.loads(TrainerState().to_json()) == json.loads((tmp_path / "theirs.json").read_text())


@pytest.mark.fact("Checkpoints: stateful_callbacks has arguments and attributes by class, or a list of them")
def test_states_of_callbacks_stand_by_class() -> None:
    states = a_state().stateful_callbacks
    assert [each["args"]["early_stopping_patience"] for each in states["EarlyStoppingCallback"]] == [2, 3]
    assert TrainerControl.from_state(states["TrainerControl"]) == TrainerControl(should_save=True)
    restored = EarlyStoppingCallback.from_state(states["EarlyStoppingCallback"][1])
    assert restored.state() == EarlyStoppingCallback(3, 0.1).state()


def test_two_states_share_no_list() -> None:
    first, second = TrainerState(), TrainerState()
    first.log_history.append({"loss": 1.0})
    assert second.log_history == []


@pytest.mark.fact("Arguments: In the state, fractions of a run are numbers of steps, rounded up")
@pytest.mark.parametrize(
    ("arguments", "max_steps", "absolute"),
    [
        ({"logging_steps": 0.3, "save_steps": 0.26}, 11, (4, 500, 3)),
        ({"eval_strategy": "steps", "eval_steps": 0.5, "save_steps": 7}, 10, (500, 5, 7)),
        ({}, 10, (500, 500, 500)),
    ],
)
def test_shares_become_updates(arguments: dict[str, Any], max_steps: int, absolute: tuple[int, int, int]) -> None:
    state = TrainerState()
    state.compute_steps(TrainingArguments(**arguments), max_steps)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == absolute


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_step": "3"}, "'global_step' is '3', which is no int"),
        ({"global_step": True}, "'global_step' is True, which is no int"),
        ({"epoch": None}, "'epoch' is None, which is no float"),
        ({"best_metric": [1]}, r"'best_metric' is \[1\], which is no float | None"),
        ({"log_history": [1]}, "'log_history' is"),
        ({"stateful_callbacks": 3}, "'stateful_callbacks' is 3"),
        ({"colour": "blue"}, "there is no field 'colour'"),
    ],
)
def test_a_file_that_is_not_a_state_is_rejected_with_its_fields(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({**json.loads(a_state().to_json()), **change}))
    with pytest.raises(InvalidCheckpointError, match=rf"trainer_state\.json is not a trainer state: {message}"):
        TrainerState.load_from_json(file)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"epoch": 1}', "\x00", "[" * 100_000])
def test_a_damaged_file_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "trainer_state.json"
    file.write_text(content)
    with pytest.raises(InvalidCheckpointError, match=r"trainer_state\.json is no"):
        TrainerState.load_from_json(file)


def test_a_subclass_may_have_its_own_fields(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class MyState(TrainerState):
        samples: int = 0

    MyState(samples=7).save_to_json(tmp_path / "state.json")
    assert MyState.load_from_json(tmp_path / "state.json") == MyState(samples=7)


def test_values_that_json_cannot_hold_are_rejected_when_written() -> None:
    with pytest.raises(ArgumentTypeError, match="cannot be written as JSON.*complex"):
        TrainerState(log_history=[{"loss": 1j}]).to_json()


def test_a_callback_without_a_state_is_refused() -> None:
    stateless: Any = [object()]
    with pytest.raises(ArgumentTypeError, match="`stateful_callbacks` holds"):
        TrainerState(stateful_callbacks=stateless)


def test_a_state_that_does_not_fit_the_class_is_refused() -> None:
    states: list[Any] = [{"args": {"patience": 1}, "attributes": {}}, {"attributes": ["counter"]}, ["args"]]
    for state in states:
        with pytest.raises(InvalidCheckpointError, match="EarlyStoppingCallback cannot be made from the state"):
            EarlyStoppingCallback.from_state(state)


def test_an_exportable_without_a_state_says_what_to_write() -> None:
    class Forgetful(ExportableState):
        pass

    with pytest.raises(NotImplementedError, match="Forgetful is an ExportableState, but has no method `state`"):
        Forgetful().state()
