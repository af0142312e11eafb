"""Callbacks: the handler, the default flow, the printer and early stopping, and those of transformers among them."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated import huggingface
from pytorch_accelerated.huggingface.events import (
    EVENTS,
    CallbackHandler,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from pytorch_accelerated.huggingface.trainer_callback import DefaultFlowCallback, EarlyStoppingCallback, PrinterCallback
from pytorch_accelerated.huggingface.training_args import TrainingArguments


def test_the_events_are_those_of_transformers() -> None:
    from transformers import TrainerCallback as GenuineCallback

    theirs = {name for name in dir(GenuineCallback) if name.startswith("on_")}
    assert set(EVENTS) == theirs


@pytest.mark.parametrize(
    "name",
    ["DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "EarlyStoppingCallback", "TensorBoardCallback"],
)
def test_a_class_of_transformers_finds_ours_of_the_same_job_and_the_other_way_round(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tensorboard")
    genuine = getattr(transformers, name, None) or getattr(transformers.integrations, name)
    ours = getattr(huggingface, name)
    handler = CallbackHandler([DefaultFlowCallback, *([] if ours is DefaultFlowCallback else [ours])], *[None] * 4)
    present = handler.callbacks[-1]
    with pytest.warns(UserWarning, match=f"A second {name}"):
        handler.add_callback(genuine)
    assert type(handler.pop_callback(genuine)) is genuine  # the very class comes first
    assert handler.pop_callback(genuine) is present
    assert handler.pop_callback(genuine) is None
    handler.add_callback(genuine)
    handler.remove_callback(ours)
    assert name not in handler.callback_list


def test_ranks_agree_after_each_update_unless_every_callback_declares_otherwise() -> None:
    class Same(TrainerCallback):
        ranks_agree_after_each_update = False

    class Changed(Same):
        """May do more than its base."""

    kinds = [DefaultFlowCallback, PrinterCallback, EarlyStoppingCallback, huggingface.ProgressCallback, Same]
    handler = CallbackHandler(kinds, *[None] * 4)
    assert not handler.ranks_agree_after_each_update()
    handler.callbacks.append(Changed())
    assert handler.ranks_agree_after_each_update()
    handler.callbacks = handler.callbacks[:-1]
    assert not handler.ranks_agree_after_each_update()


@pytest.mark.parametrize("greater_is_better", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.25])
@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("values", [[4, 3, 3, 2, 3, 3, 3], [1, 1.25, 1.5, 1.75, 1], [float("nan"), 1, float("nan"), 2]])
def test_early_stopping_judges_as_that_of_transformers(
    values: list[float], patience: int, threshold: float, greater_is_better: bool
) -> None:
    from transformers import EarlyStoppingCallback as GenuineEarlyStopping

    usual: dict[str, Any] = {"eval_strategy": "epoch", "metric_for_best_model": "score"}
    args = TrainingArguments(greater_is_better=greater_is_better, **usual)
    ours, theirs = EarlyStoppingCallback(patience, threshold), GenuineEarlyStopping(patience, threshold)
    state = TrainerState()
    for value in values:
        controls = TrainerControl(), TrainerControl()
        ours.on_evaluate(args, state, controls[0], metrics={"eval_score": value})
        theirs.on_evaluate(args, state, controls[1], metrics={"eval_score": value})  # type: ignore[arg-type]
        assert controls[0] == controls[1]
        assert ours.state() == theirs.state()
        assert vars(EarlyStoppingCallback.from_state(theirs.state())) == {**vars(ours), "reason_to_stop": ""}
        if state.best_metric is None or (value > state.best_metric) == greater_is_better:
            state.best_metric = value


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
