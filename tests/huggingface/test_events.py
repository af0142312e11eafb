"""The events of the callbacks and what they get, what a step leaves out because nobody needs it, and what is logged."""

import time
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.huggingface import (
    DEFAULT_CALLBACKS,
    PrinterCallback,
    ProgressCallback,
    TensorBoardCallback,
    Trainer,
    TrainerCallback,
)
from tests.huggingface.runs import Recorder, Regression, Rows, StopAt, make_arguments, make_trainer


def test_gradients_and_weights_at_the_events_of_an_update(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, look := TrainerCallback(), max_steps=2)
    seen: list[tuple[str, bool, bool]] = []
    weights = [trainer.model.linear.weight.tolist()]

    def note(event: str) -> Any:
        def method(args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            weights.append(model.linear.weight.tolist())
            seen.append((event, model.linear.weight.grad is not None, weights[-1] != weights[-2]))

        return method

    has_gradient_and_moved = {
        "on_step_begin": (False, False),
        "on_pre_optimizer_step": (True, False),
        "on_optimizer_step": (True, True),
        "on_step_end": (False, False),
    }
    for event in has_gradient_and_moved:
        setattr(look, event, note(event))
    trainer.train()
    assert seen == [(event, *expected) for event, expected in has_gradient_and_moved.items()] * 2


def test_callbacks_and_their_methods_may_be_exchanged_in_the_middle_of_a_run(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []

    class Listening(TrainerCallback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            heard.append((self.name, state.global_step))

    class Exchange(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            callbacks = trainer.callback_handler.callbacks
            if state.global_step == 1:
                callbacks[callbacks.index(first)] = Listening("second")
            elif state.global_step == 2:
                late.on_step_begin = lambda *args, **kwargs: heard.append(("late", 2))  # type: ignore[method-assign]
                trainer.remove_callback(self)

    first, late = Listening("first"), TrainerCallback()
    trainer = make_trainer(tmp_path, first, Exchange(), late, max_steps=3)
    trainer.train()
    assert heard == [("first", 0), ("second", 1), ("second", 2), ("late", 2)]


def test_events_pass_the_documented_arguments(tmp_path: Path) -> None:
    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.positional, self.given = (args, state, control), kwargs

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.metrics = kwargs["metrics"]
            self.eval_dataloader = kwargs["eval_dataloader"]

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.log = kwargs

    trainer = make_trainer(tmp_path, look := Look(), eval_strategy="epoch", max_steps=5)
    trainer.callback_handler.processing_class = "tokenizer"
    output = trainer.train()
    assert look.positional == (trainer.args, trainer.state, trainer.control)
    train_dataloader, eval_dataloader = look.given.pop("train_dataloader"), look.given.pop("eval_dataloader")
    assert look.given == {
        "model": trainer.model,
        "processing_class": "tokenizer",
        "optimizer": trainer.optimizer,
        "lr_scheduler": trainer.lr_scheduler,
    }
    assert len(train_dataloader) == 5
    assert eval_dataloader is None
    assert len(look.eval_dataloader) == 1
    assert "eval_loss" in look.metrics
    assert look.log.pop("logs") == output.metrics
    assert look.log.keys() == {*look.given, "train_dataloader", "eval_dataloader"}


@pytest.mark.parametrize("shows_bars", [True, False])
@pytest.mark.parametrize(("report_to", "reports"), [("none", []), ("tensorboard", [TensorBoardCallback])])
def test_the_order_of_the_callbacks(shows_bars: bool, report_to: str, reports: list[Any], tmp_path: Path) -> None:
    mine = Recorder()
    args = make_arguments(tmp_path, disable_tqdm=not shows_bars, report_to=report_to)
    trainer = Trainer(Regression(), args, callbacks=[mine])
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds == [*DEFAULT_CALLBACKS, *reports, Recorder, ProgressCallback if shows_bars else PrinterCallback]
    assert trainer.callback_handler.callbacks[-2] is mine
    assert trainer.pop_callback(Recorder) is mine
    assert trainer.pop_callback(Recorder) is None
    trainer.add_callback(mine)
    trainer.remove_callback(mine)
    assert mine not in trainer.callback_handler.callbacks


def test_a_callback_may_stop_the_run_politely(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                raise StopTrainingError("enough")

    trainer = make_trainer(tmp_path, Stops(), recorder := Recorder(), gradient_accumulation_steps=2)
    output = trainer.train()
    assert output.global_step == 2  # the update is finished
    assert recorder.events[-2:] == ["log", "train_end"]


def test_an_exception_is_raised_and_the_trainer_can_be_used_again(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    trainer = make_trainer(tmp_path, fails := Fails())
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not trainer.is_in_train
    trainer.remove_callback(fails)
    assert trainer.train().global_step == 10


@pytest.mark.parametrize(("counts", "expected"), [("all", 20), ("non_padding", 15), ("no", 0)])
def test_tokens_are_counted(counts: str, expected: int, tmp_path: Path) -> None:
    class Masked(Regression):
        main_input_name = "x"

        def forward(self, x: Any, labels: Any = None, attention_mask: Any = None) -> Any:
            return super().forward(x, labels)

    rows = [{**Rows(10)[index], "attention_mask": Rows(10)[index]["x"] * 0 + index % 2} for index in range(10)]
    for row in rows[::2]:
        row["attention_mask"][0] = 1
    trainer = make_trainer(
        tmp_path,
        parts={"model": Masked(), "train_dataset": rows},
        include_num_input_tokens_seen=counts,
        num_train_epochs=1,
    )
    trainer.train()
    assert trainer.state.num_input_tokens_seen == expected
    assert ("num_input_tokens_seen" in trainer.state.log_history[0]) == (counts != "no")


class TwoSecondsAStep(TrainerCallback):
    """Tells the time: no other comes by than these."""

    def __init__(self) -> None:
        self.now = 100.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now += 2.0


def test_the_speed_in_tokens_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*callbacks: Any, **arguments: Any) -> list[dict[str, Any]]:
        clock, model = TwoSecondsAStep(), Regression()
        model.main_input_name = "x"  # type: ignore[assignment]
        trainer = make_trainer(tmp_path, clock, *callbacks, parts={"model": model}, include_num_input_tokens_seen="all")
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: clock.now)
            trainer.train(**arguments)
        return trainer.state.log_history

    first, *_, summary = run(StopAt(3))
    keys = "loss grad_norm learning_rate epoch num_input_tokens_seen train_runtime train_tokens_per_second step"
    assert list(first) == keys.split()
    assert (first["num_input_tokens_seen"], first["train_runtime"], first["train_tokens_per_second"]) == (4, 2.0, 2.0)
    assert "train_tokens_per_second" not in summary  # as in transformers
    resumed = run(resume_from_checkpoint=True)[-4]
    assert (resumed["step"], resumed["num_input_tokens_seen"]) == (8, 32)
    assert resumed["train_tokens_per_second"] == 2.0
