"""The order of the callbacks' events, and what they get."""

from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.huggingface import (
    DEFAULT_CALLBACKS,
    PrinterCallback,
    ProgressCallback,
    TensorBoardCallback,
    TrainerCallback,
)
from tests.huggingface.runs import Recorder, make_trainer
from tests.support.recording import expand


@pytest.mark.fact(
    "Events: Order: init_end, train_begin; in each epoch epoch_begin, step_begin ... step_end per update, epoch_end"
)
@pytest.mark.fact("Events: At the end, the summary is logged before train_end")
@pytest.mark.fact(
    "Events: An evaluation fires prediction_step per batch, log, evaluate; within a step the order is log, evaluate, "
    "save"
)
def test_the_order_of_a_run(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        recorder := Recorder(),
        gradient_accumulation_steps=2,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        per_device_eval_batch_size=3,
    )
    trainer.train()
    expected = expand("""
        init_end
        train_begin
        each of 2 epochs:
          epoch_begin
          each of 2 updates:
            step_begin
            substep_end
            pre_optimizer_step
            optimizer_step
            step_end
          step_begin  the last batch of the epoch is an update of its own
          pre_optimizer_step
          optimizer_step
          step_end
          log
          prediction_step
          prediction_step
          log
          evaluate
          save
          epoch_end
        log
        train_end
    """)
    assert recorder.events == expected


@pytest.mark.fact("Events: pre_optimizer_step comes after clipping, optimizer_step before zero_grad")
def test_gradients_and_weights_at_the_events_of_an_update(tmp_path: Path) -> None:
    class Look(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, bool, bool]] = []
            self.weight = None

        def note(self, name: str, model: Any) -> None:
            weight, gradient = model.linear.weight.clone(), model.linear.weight.grad
            has_moved = self.weight is not None and not weight.equal(self.weight)
            self.weight = weight
            self.seen.append((name, gradient is not None, has_moved))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.note("begin", kwargs["model"])

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.note("before", kwargs["model"])

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.note("after", kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.note("end", kwargs["model"])

    make_trainer(tmp_path, look := Look(), max_steps=2).train()
    step = [("begin", False, False), ("before", True, False), ("after", True, True), ("end", False, False)]
    assert look.seen == step * 2


@pytest.mark.fact(
    "Events: Callbacks receive args, state, control by position; model, optimizer, dataloaders and so on by keyword"
)
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


@pytest.mark.fact("Events: A returned control replaces the control for the next callback and the trainer")
def test_a_returned_control_takes_the_place(tmp_path: Path) -> None:
    returned: list[Any] = []
    seen: list[Any] = []

    class Replaces(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            returned.append(type(control)(**vars(control)))
            returned[-1].should_training_stop = state.global_step == 2
            return returned[-1]

    class Watches(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(control)

    trainer = make_trainer(tmp_path, Replaces(), Watches())
    trainer.train()
    assert trainer.state.global_step == 2
    assert all(one is other for one, other in zip(seen, returned, strict=True))
    assert trainer.control is returned[-1]


@pytest.mark.fact(
    "Trainer: Callback order: DefaultFlowCallback, reports, the user's callbacks, ProgressCallback or PrinterCallback"
)
@pytest.mark.parametrize("shows_bars", [True, False])
@pytest.mark.parametrize(("report_to", "reports"), [("none", []), ("tensorboard", [TensorBoardCallback])])
def test_the_order_of_the_callbacks(shows_bars: bool, report_to: str, reports: list[Any], tmp_path: Path) -> None:
    from pytorch_accelerated.huggingface import Trainer
    from tests.huggingface.runs import Regression, make_arguments

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


@pytest.mark.fact("Events: If a callback sets flags, the trainer logs, evaluates and saves after the step")
def test_flags_are_honoured_at_the_safe_point(tmp_path: Path) -> None:
    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                control.should_log = control.should_evaluate = control.should_save = True

    trainer = make_trainer(tmp_path, Asks(), recorder := Recorder(), logging_strategy="no")
    trainer.train()
    acted = [call.split()[0] for call in recorder.calls if call.startswith(("log", "evaluate", "save"))]
    assert acted == ["log@3", "log@3", "evaluate@3", "save@3", "log@10"]
    assert (tmp_path / "checkpoint-3").is_dir()
