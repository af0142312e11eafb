"""docs/events.md says the truth: each of its blocks is held against a recorded run."""

import functools
import math
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TerminateOnNaNCallback, TrainerCallback
from pytorch_accelerated.errors import StopTrainingError
from tests.support.recording import HOOKS, Recorder, expand
from tests.support.reference import regression_data

PAGE = Path(__file__).parents[1] / "docs" / "events.md"
INTERNAL = (
    "_create_accelerator",
    "_create_callback_handler",
    "_prepare_model_optimizer_and_dataloaders",
    "_create_run_config",
    "_clip_gradients",
)
TRAIN, EVALUATE = regression_data(6), regression_data(4)

# What each heading of the page describes: it gets the recorder and a folder, and returns what is called.
Scenario = Callable[[Recorder, Path], Callable[[], Any]]
SCENARIOS: dict[str, Scenario] = {}


def describes(heading: str) -> Callable[[Scenario], Scenario]:
    def register(scenario: Scenario) -> Scenario:
        SCENARIOS[heading] = scenario
        return scenario

    return register


def read_page() -> tuple[dict[str, str], dict[str, str]]:
    """The parts by name, and the other blocks by the heading they stand under."""
    parts, blocks, heading = {}, {}, ""
    for match in re.finditer(r"^#+ ([^\n]*)$|^```text\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL):
        if match[1] is not None:
            heading = match[1]
            continue
        first, _, below = match[2].partition("\n")
        if first.endswith(":") and not first.startswith("each"):
            parts[first[:-1]] = below
        else:
            assert heading not in blocks, f"{heading} has two blocks"
            blocks[heading] = match[2]
    return parts, blocks


PARTS, BLOCKS = read_page()


def test_every_block_of_the_page_is_tested_and_every_part_is_used() -> None:
    assert BLOCKS.keys() == SCENARIOS.keys()
    lines = {line.strip() for text in [*PARTS.values(), *BLOCKS.values()] for line in text.splitlines()}
    assert PARTS.keys() <= lines


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.parametrize("heading", SCENARIOS)
def test_the_page_shows_what_really_happens(heading: str, tmp_path: Path) -> None:
    recorder = Recorder((*HOOKS, *INTERNAL))
    call = SCENARIOS[heading](recorder, tmp_path)
    try:
        call()
        recorder.calls.append("returns")
    except Exception as error:
        recorder.calls.append(f"raises {type(error).__name__}")
    assert recorder.calls == expand(BLOCKS[heading], parts=PARTS)


class Act(TrainerCallback):
    """Does something at the n-th time that an event is fired, counted from 1."""

    def __init__(self, event: str, action: Callable[[Trainer], object], *, at: int = 1) -> None:
        self.event = event
        self.times = 0
        self.at = at
        self.action = action
        setattr(self, event, self.act)

    def act(self, trainer: Trainer, **kwargs: Any) -> None:
        self.times += 1
        if self.times == self.at:
            self.action(trainer)

    @property
    def state_key(self) -> str:
        return f"{self.event} {id(self)}"


def raising(error: BaseException) -> Callable[[Trainer], object]:
    def action(trainer: Trainer) -> None:
        raise error

    return action


def training(trainer: Trainer, **kwargs: Any) -> Callable[[], object]:
    """Everything that happens before the call is forgotten."""
    trainer.run_history.calls.clear()  # type: ignore[attr-defined]
    arguments = {"num_epochs": 2, "eval_dataset": EVALUATE, "per_device_batch_size": 2, **kwargs}
    return functools.partial(trainer.train, TRAIN, **arguments)


def evaluating(trainer: Trainer) -> Callable[[], object]:
    trainer.run_history.calls.clear()  # type: ignore[attr-defined]
    return functools.partial(trainer.evaluate, EVALUATE, per_device_batch_size=2)


def predicting(trainer: Trainer) -> Callable[[], object]:
    trainer.run_history.calls.clear()  # type: ignore[attr-defined]
    return functools.partial(trainer.predict, EVALUATE, per_device_batch_size=2)


class BadBatch(Trainer):
    """The loss of every second batch is not a number."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        return {**output, "loss": output["loss"] * (math.nan if self.run_state.updates == 1 else 1)}

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        return {**super().calculate_eval_batch_loss(batch), "loss": torch.tensor(math.nan)}


@describes("Making a trainer")
def _(recorder: Recorder, folder: Path) -> Any:
    return recorder.trainer


@describes("A whole run")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer())


@describes("Without an evaluation set")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer(), eval_dataset=None)


@describes("With gradient accumulation")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer(), gradient_accumulation_steps=2)


@describes("With a scheduler that steps per epoch")
def _(recorder: Recorder, folder: Path) -> Any:
    factory = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    return training(recorder.trainer(), step_scheduler="epoch", create_scheduler_fn=factory)


@describes("With an evaluation inside an epoch")
def _(recorder: Recorder, folder: Path) -> Any:
    ask = Act("on_train_step_end", Trainer.request_evaluation, at=2)
    return training(recorder.trainer(ask), num_epochs=1)


@describes("At the step limit inside an epoch")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer(), max_num_train_steps=4)


@describes("When the time is over")
def _(recorder: Recorder, folder: Path) -> Any:
    clock = types.SimpleNamespace(now=0.0)
    patch = pytest.MonkeyPatch()
    for module in ("loop", "trainer"):
        patch.setattr(f"pytorch_accelerated.{module}.time", types.SimpleNamespace(monotonic=lambda: clock.now))

    def wait(trainer: Trainer) -> None:
        clock.now += 61

    call = training(recorder.trainer(Act("on_train_step_start", wait, at=2)), max_duration="00:01:00")

    def timed() -> None:
        with patch.context():
            call()
        patch.undo()

    return timed


@describes("StopTrainingError inside an update")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer(Act("on_train_step_end", raising(StopTrainingError()), at=2)))


@describes("StopTrainingError before the first update")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer(Act("on_training_run_start", raising(StopTrainingError()))))


@describes("StopTrainingError after an epoch of training")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer(Act("on_train_epoch_end", raising(StopTrainingError()))))


@describes("StopTrainingError in an evaluation")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer(Act("on_eval_step_end", raising(StopTrainingError()))))


@describes("StopTrainingError after an evaluation")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer(Act("on_eval_epoch_end", raising(StopTrainingError()))))


@describes("StopTrainingError at the end of an epoch")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer(Act("on_training_run_epoch_end", raising(StopTrainingError()))))


@describes("A loss that is not finite")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer(TerminateOnNaNCallback, base=BadBatch))


@describes("Parameters that are not finite when they should be saved")
def _(recorder: Recorder, folder: Path) -> Any:
    save = Act("on_training_run_epoch_end", lambda trainer: trainer.save_training_state(folder / "state"))
    return training(recorder.trainer(save, base=BadBatch), eval_dataset=None)


@describes("Another exception")
def _(recorder: Recorder, folder: Path) -> Any:
    return training(recorder.trainer(Act("on_train_step_end", raising(RuntimeError()), at=2)))


@describes("An exception in the set-up")
def _(recorder: Recorder, folder: Path) -> Any:
    def factory(optimizer: Any) -> Any:
        raise RuntimeError

    return training(recorder.trainer(), create_scheduler_fn=factory)


def resumed(recorder: Recorder, folder: Path, event: str, *, at: int) -> Any:
    """A run that goes on from the state which another one saved, at the n-th time of an event."""
    save = Act(event, lambda trainer: trainer.save_training_state(folder / "state"), at=at)
    training(Recorder().trainer(save))()
    return training(recorder.trainer(), resume_from=folder / "state")


@describes("Resumed between two epochs")
def _(recorder: Recorder, folder: Path) -> Any:
    return resumed(recorder, folder, "on_training_run_epoch_end", at=1)


@describes("Resumed inside an epoch")
def _(recorder: Recorder, folder: Path) -> Any:
    return resumed(recorder, folder, "on_train_step_end", at=2)


@describes("Resumed before an evaluation")
def _(recorder: Recorder, folder: Path) -> Any:
    return resumed(recorder, folder, "on_train_epoch_end", at=2)


@describes("Resumed when there is nothing left to do")
def _(recorder: Recorder, folder: Path) -> Any:
    return resumed(recorder, folder, "on_training_run_epoch_end", at=2)


@describes("evaluate")
def _(recorder: Recorder, folder: Path) -> Any:
    return evaluating(recorder.trainer())


@describes("evaluate, stopped early")
def _(recorder: Recorder, folder: Path) -> Any:
    return evaluating(recorder.trainer(Act("on_eval_step_end", raising(StopTrainingError()))))


@describes("evaluate, with a loss that is not finite")
def _(recorder: Recorder, folder: Path) -> Any:
    return evaluating(recorder.trainer(TerminateOnNaNCallback, base=BadBatch))


@describes("predict")
def _(recorder: Recorder, folder: Path) -> Any:
    return predicting(recorder.trainer())


@describes("predict, stopped early")
def _(recorder: Recorder, folder: Path) -> Any:
    return predicting(recorder.trainer(Act("on_prediction_step_end", raising(StopTrainingError()))))


def test_step_events_say_which_batch_it_is_and_evaluation_events_whether_it_is_intermediate() -> None:
    class Arguments(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.evaluations: list[bool] = []

        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            assert kwargs.keys() == {"batch", "batch_output", "step"}
            self.steps.append(kwargs["step"])

        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            assert kwargs == {}
            if trainer.run_state.updates == 2:
                trainer.request_evaluation()

        def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            self.evaluations.append(kwargs["is_intermediate"])

        def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            self.evaluations.append(kwargs["is_intermediate"])

    arguments = Arguments()
    training(Recorder().trainer(arguments), gradient_accumulation_steps=2)()
    assert arguments.steps == [0, 1, 2, 0, 1, 2]
    assert arguments.evaluations == [True, True, False, False, False, False]


def test_an_exception_in_on_exception_does_not_hide_the_first_one() -> None:
    broken = Act("on_exception", raising(StopTrainingError("too late")))
    with pytest.raises(RuntimeError, match="the cause"):
        training(Recorder().trainer(Act("on_train_epoch_start", raising(RuntimeError("the cause"))), broken))()


@pytest.mark.parametrize("event", ["on_stop_training_error", "on_training_run_end"])
def test_a_wish_to_stop_when_the_run_is_ending_anyway_changes_nothing(event: str) -> None:
    stop = Act("on_train_epoch_end", raising(StopTrainingError("enough")))
    recorder = Recorder()
    training(recorder.trainer(stop, Act(event, raising(StopTrainingError("again")))))()
    assert recorder.calls[-3:] == ["on_stop_training_error", "training_run_end", "on_training_run_end"]
