"""Progress bars of a run, and what is logged above them."""

from types import SimpleNamespace
from typing import Any

import pytest

from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments
from pytorch_accelerated.huggingface.events.callbacks import CallbackHandler, DefaultFlowCallback
from pytorch_accelerated.huggingface.events.progress import ProgressCallback
from pytorch_accelerated.huggingface.events.state import TrainerControl, TrainerState
from pytorch_accelerated.progress import progress
from pytorch_accelerated.progress.display import BarDisplay
from tests.support.terminal import in_a_terminal


def run(callback: ProgressCallback, state: TrainerState, *, until: str = "the end", logs: Any = None) -> None:
    """Four updates, after the second of which there is an evaluation of three batches."""
    handler = CallbackHandler([DefaultFlowCallback, callback], None, None, None, None)
    handler.eval_dataloader = [1, 2, 3]
    args, control = TrainingArguments(), TrainerControl()
    handler.on_train_begin(args, state, control)
    while state.global_step < 4:
        state.global_step += 1
        state.epoch += 0.25
        handler.on_step_end(args, state, control)
        if state.global_step == 2:
            for _ in handler.eval_dataloader:
                handler.on_prediction_step(args, state, control)
            if until == "the evaluation":
                return
            handler.on_evaluate(args, state, control, {"eval_loss": 1.0})
            if logs:
                handler.on_log(args, state, control, logs)
    handler.on_train_end(args, state, control)


@pytest.fixture(autouse=True)
def _bars_appear_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BarDisplay, "seconds_between_refreshes", 0.0)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_FACTS", 0.0)


@pytest.mark.fact("Logging: ProgressCallback shows training and evaluation, and leaves nothing behind")
def test_bars_show_training_and_evaluation_and_vanish() -> None:
    state = TrainerState(max_steps=4, log_history=[{"loss": 0.5}])
    with in_a_terminal() as terminal:
        run(ProgressCallback(), state)
        for share in ("training  25%", "evaluation  33%", "evaluation 100%", "training 100%"):
            assert share in terminal.received
        assert "epoch=1.00, loss=0.5000]" in terminal.received
        assert " steps/s" in terminal.received
        assert " batches/s" in terminal.received  # of the evaluation
        assert terminal.screen == []


def test_a_resumed_run_begins_where_it_stopped() -> None:
    with in_a_terminal() as terminal:
        run(ProgressCallback(), TrainerState(max_steps=4, global_step=3))
        assert "training 100%" in terminal.received
        assert "training  25%" not in terminal.received


def test_logs_are_printed_above_the_bars_without_the_operations() -> None:
    with in_a_terminal() as terminal:
        run(ProgressCallback(), TrainerState(max_steps=4), logs={"loss": 0.123456, "note": "x", "total_flos": 3.0})
        assert terminal.screen == ["loss 0.1235, note x"]


def test_nothing_is_shown_by_other_processes() -> None:
    with in_a_terminal() as terminal:
        run(ProgressCallback(), TrainerState(max_steps=4, is_local_process_zero=False), logs={"loss": 1.0})
        assert terminal.received == ""


def test_bars_of_a_run_that_broke_off_can_be_closed() -> None:
    callback = ProgressCallback()
    with in_a_terminal() as terminal:
        run(callback, TrainerState(max_steps=4), until="the evaluation")
        assert terminal.screen != []
        callback.close()
        assert terminal.screen == []


def test_a_stream_without_length_is_counted() -> None:
    callback, args, control = ProgressCallback(), TrainingArguments(), TrainerControl()
    with in_a_terminal() as terminal:
        for _ in range(3):
            callback.on_prediction_step(args, TrainerState(), control, eval_dataloader=SimpleNamespace())
        assert "evaluation 3" in terminal.received
        callback.on_predict(args, TrainerState(), control, metrics={})
        assert terminal.screen == []
