"""docs/events.md and `Trainer.explain` say the truth: each block of the page is held against a recorded run."""

import functools
import math
import re
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TerminateOnNaNCallback, TrainerCallback
from pytorch_accelerated.errors import SignalExit, StopTrainingError
from tests.support.dispositions import default_signals
from tests.support.processes import REPOSITORY
from tests.support.recording import PAGE, REMARKS, SHOWN_HOOKS, Recorder, expand
from tests.support.reference import regression_data

EPOCHS = 2
COUNTS = {"update": 3, "batch of the update": 1, "batch": 2}
TRAIN, EVALUATE = regression_data(6), regression_data(4)


def read_page() -> tuple[dict[str, str], dict[str, str]]:
    """The parts by name, and the other blocks by the heading they stand under."""
    parts, blocks, heading = {}, {}, ""
    for match in re.finditer(r"^#+ ([^\n]*)$|^```text\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL):
        if match[1] is not None:
            heading = match[1]
            continue
        first, _, below = match[2].partition("\n")
        if first.endswith(":") and not first.startswith("each"):
            parts[first[:-1]] = textwrap.dedent(below)
        else:
            assert heading not in blocks, f"{heading} has two blocks"
            blocks[heading] = match[2]
    return parts, blocks


PARTS, BLOCKS = read_page()


class Act(TrainerCallback):
    """Does something at the n-th time that an event is fired, counted from 1."""

    def __init__(self, event: str, action: Callable[[Trainer], object], *, at: int = 1) -> None:
        self.event = event
        self.action = action
        self.at = at
        self.times = 0
        setattr(self, event, self.act)

    def act(self, trainer: Trainer, **kwargs: Any) -> None:
        self.times += 1
        if self.times == self.at:
            self.action(trainer)

    @property
    def state_key(self) -> str:
        return f"{self.event} {id(self)}"


def raises(error: BaseException, event: str, *, at: int = 1) -> Act:
    def action(trainer: Trainer) -> None:
        raise error

    return Act(event, action, at=at)


def stops(event: str, *, at: int = 1) -> Act:
    return raises(StopTrainingError("enough"), event, at=at)


def saves(folder: Path, event: str, *, at: int = 1) -> Act:
    return Act(event, lambda trainer: trainer.save_training_state(folder / "state"), at=at)


def signalled(event: str, *, at: int = 1) -> Act:
    return Act(event, lambda trainer: signal.raise_signal(signal.SIGTERM), at=at)


class BadLosses(Trainer):
    """The loss of the second batch of a run is not a number, nor is any in an evaluation."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        return {**output, "loss": output["loss"] * (math.nan if self.run_state.updates == 1 else 1)}

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        return {**super().calculate_eval_batch_loss(batch), "loss": torch.tensor(math.nan)}


def broken_factory(optimizer: Any) -> Any:
    raise RuntimeError


class Scene:
    """What a heading of the page is about: runs that are noted by `recorder`, and may save something to `folder`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.recorder = Recorder(SHOWN_HOOKS)

    def make(self, *callbacks: Any, base: type[Trainer] = Trainer) -> Trainer:
        """A trainer; that it is made is not noted."""
        trainer = self.recorder.trainer(*callbacks, base=base)
        self.recorder.calls.clear()
        return trainer

    def train(self, *callbacks: Any, base: type[Trainer] = Trainer, **kwargs: Any) -> None:
        arguments = {"num_epochs": 2, "eval_dataset": EVALUATE, "per_device_batch_size": 2, **kwargs}
        self.make(*callbacks, base=base).train(TRAIN, **arguments)

    def evaluate(self, *callbacks: Any, base: type[Trainer] = Trainer) -> None:
        self.make(*callbacks, base=base).evaluate(EVALUATE, per_device_batch_size=2)

    def predict(self, *callbacks: Any) -> None:
        self.make(*callbacks).predict(EVALUATE, per_device_batch_size=2)

    def resume(self, event: str, *, at: int) -> None:
        """Go on from what another run saved at the n-th time of an event."""
        self.train(saves(self.folder, event, at=at))
        self.train(resume_from=self.folder / "state")

    def resume_in_evaluation(self) -> None:
        """Go on from where a signal ended a run, in an evaluation inside an epoch."""

        def callbacks(*extra: Any) -> tuple[Any, ...]:
            return (
                Act("on_train_step_end", Trainer.request_evaluation, at=2),
                SaveTrainingStateCallback(self.folder),
                *extra,
            )

        with pytest.raises(SignalExit):
            self.train(*callbacks(signalled("on_eval_step_end")), num_epochs=1)
        self.train(*callbacks(), num_epochs=1, resume_from=self.folder)

    def run_out_of_time(self) -> None:
        """In the second update."""
        now = time.monotonic
        patch = self.monkeypatch.setattr
        wait = Act("on_train_step_start", lambda trainer: patch(time, "monotonic", lambda: now() + 3600), at=2)
        self.train(wait, max_duration="01:00:00")


STEP_LR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
SCENES: dict[str, Callable[[Scene], object]] = {
    "Making a trainer": lambda scene: scene.recorder.trainer(),
    "A whole run": lambda scene: scene.train(),
    "Without an evaluation set": lambda scene: scene.train(eval_dataset=None),
    "With gradient accumulation": lambda scene: scene.train(gradient_accumulation_steps=2),
    "With a scheduler that steps per epoch": lambda scene: scene.train(
        step_scheduler="epoch", create_scheduler_fn=STEP_LR
    ),
    "With an evaluation inside an epoch": lambda scene: scene.train(
        Act("on_train_step_end", Trainer.request_evaluation, at=2), num_epochs=1
    ),
    "At the step limit inside an epoch": lambda scene: scene.train(max_num_train_steps=4),
    "When the time is over": Scene.run_out_of_time,
    "When a signal comes": lambda scene: scene.train(signalled("on_train_step_end", at=2)),
    "StopTrainingError inside an update": lambda scene: scene.train(stops("on_train_step_end", at=2)),
    "StopTrainingError before the first update": lambda scene: scene.train(stops("on_training_run_start")),
    "StopTrainingError after an epoch of training": lambda scene: scene.train(stops("on_train_epoch_end")),
    "StopTrainingError in an evaluation": lambda scene: scene.train(stops("on_eval_step_end")),
    "StopTrainingError after an evaluation": lambda scene: scene.train(stops("on_eval_epoch_end")),
    "StopTrainingError at the end of an epoch": lambda scene: scene.train(stops("on_training_run_epoch_end")),
    "A loss that is not finite": lambda scene: scene.train(TerminateOnNaNCallback, base=BadLosses),
    "Parameters that are not finite when they should be saved": lambda scene: scene.train(
        saves(scene.folder, "on_training_run_epoch_end"), base=BadLosses, eval_dataset=None
    ),
    "Another exception": lambda scene: scene.train(raises(RuntimeError(), "on_train_step_end", at=2)),
    "An exception in the set-up": lambda scene: scene.train(create_scheduler_fn=broken_factory),
    "Resumed between two epochs": lambda scene: scene.resume("on_training_run_epoch_end", at=1),
    "Resumed inside an epoch": lambda scene: scene.resume("on_train_step_end", at=2),
    "Resumed before an evaluation": lambda scene: scene.resume("on_train_epoch_end", at=2),
    "Resumed before an evaluation inside an epoch": Scene.resume_in_evaluation,
    "Resumed when there is nothing left to do": lambda scene: scene.resume("on_training_run_epoch_end", at=2),
    "evaluate": lambda scene: scene.evaluate(),
    "evaluate, stopped early": lambda scene: scene.evaluate(stops("on_eval_step_end")),
    "evaluate, ended by a signal": lambda scene: scene.evaluate(signalled("on_eval_step_end")),
    "evaluate, with a loss that is not finite": lambda scene: scene.evaluate(TerminateOnNaNCallback, base=BadLosses),
    "predict": lambda scene: scene.predict(),
    "predict, stopped early": lambda scene: scene.predict(stops("on_prediction_step_end")),
    "predict, ended by a signal": lambda scene: scene.predict(signalled("on_prediction_step_end")),
}


def test_every_block_of_the_page_is_tested_and_every_part_is_used():
    assert BLOCKS.keys() == SCENES.keys()
    assert PARTS.keys() <= {line.strip() for text in [*PARTS.values(), *BLOCKS.values()] for line in text.splitlines()}


@pytest.mark.parametrize("heading", SCENES)
def test_the_page_shows_what_really_happens(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scene = Scene(tmp_path, monkeypatch)
    try:
        with default_signals():
            SCENES[heading](scene)
        ending = "returns"
    except (Exception, SignalExit) as error:
        ending = f"raises {type(error).__name__}"
    assert [*scene.recorder.calls, ending] == expand(BLOCKS[heading], counts=COUNTS, parts=PARTS)


def test_events_get_what_they_are_about_by_keyword(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Arguments(TrainerCallback):
        seen: tuple[Any, ...] = ()

        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            assert kwargs.keys() == {"batch", "batch_output", "step"}
            self.seen += (kwargs["step"],)

        def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            self.seen += tuple(kwargs.items())

        def on_eval_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            assert kwargs.keys() == {"batch", "batch_output"}

        def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            self.seen += tuple(kwargs.items())

    arguments = Arguments()
    ask = Act("on_optimizer_step_end", Trainer.request_evaluation)
    Scene(tmp_path, monkeypatch).train(ask, arguments, gradient_accumulation_steps=2)
    inside, after = [("is_intermediate", True)] * 2, [("is_intermediate", False)] * 2
    assert list(arguments.seen) == [0, 1, *inside, 2, *after, 0, 1, 2, *after]


# What `Trainer.explain` tells beforehand is what a run then does: here with two batches of an update


class CountsItems(Trainer):
    def count_batch_items(self, batch: Any) -> int:
        return len(batch[0])


def section(text: str, name: str) -> str:
    """What is indented below ``name(...):``."""
    (found,) = [part for part in text.split("\n\n") if part.startswith(f"{name}(...):\n")]
    return found.partition("\n")[2]


def run(trainer: Trainer, what: str) -> None:
    if what == "predict":
        trainer.predict(EVALUATE, per_device_batch_size=2)
    elif what == "evaluate":
        trainer.evaluate(EVALUATE, per_device_batch_size=2)
    else:
        evaluation_set = EVALUATE if what == "train" else None
        arguments = {"per_device_batch_size": 2, "gradient_accumulation_steps": 2}
        trainer.train(regression_data(12), EPOCHS, evaluation_set, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", [Trainer, CountsItems])
@pytest.mark.parametrize("what", ["train", "train without evaluation", "evaluate", "predict"])
def test_the_text_is_what_a_run_does(what: str, base: type[Trainer]):
    recorder = Recorder([*SHOWN_HOOKS, "count_batch_items"] if base is CountsItems else SHOWN_HOOKS)
    trainer = recorder.trainer(base=base)
    text = section(trainer.explain(EPOCHS, evaluate=what == "train" or what == "evaluate"), what.split()[0])
    recorder.calls.clear()
    run(trainer, what)
    assert recorder.calls == expand(text, counts={**COUNTS, "batch of the update": 2})


def test_the_page_about_the_loop_shows_the_same():
    """Methods on the left, events and recorded metrics on the right."""
    page = (REPOSITORY / "docs" / "loop.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<!-- loop -->\n```text\n.*?\n\n(.*?)```", page, re.DOTALL)
    text = section(Recorder([]).trainer().explain(EPOCHS), "train").replace(f"each of {EPOCHS} epochs:", "each epoch:")
    lines = [line[:REMARKS].strip() for line in text.splitlines()]
    assert [line.strip() for line in shown.splitlines()] == [line for line in lines if not line.startswith("_")]


def test_overridden_hooks_and_events_with_the_callbacks_that_handle_them_are_shown():
    class Middle(Trainer):
        custom_events = ("batch_was_strange",)

        def backward_step(self, loss: Any) -> None:
            super().backward_step(loss)

    class Mine(Middle):
        def _clip_gradients(self) -> None:
            pass

    class Strange(TrainerCallback):
        def batch_was_strange(self, trainer: Trainer, **kwargs: Any) -> None:
            pass

        on_train_step_end = on_eval_step_start = batch_was_strange

    class Calm(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            pass

    lines = Recorder([]).trainer(Strange(), Calm(), base=Mine).explain().splitlines()
    assert [line.split() for line in lines if "overridden" in line] == [
        ["backward_step", "overridden", "in", "Middle"],
        ["_clip_gradients", "overridden", "in", "Mine"],
    ]
    beside, event = [], ""
    for line in lines:
        event = line[:REMARKS].strip() or event
        beside += [f"{event} {name}" for name in ("Strange", "Calm") if line.endswith(name)]
    steps = ["on_train_step_end Strange", "on_train_step_end Calm", "on_eval_step_start Strange"]
    assert beside == [*steps, "on_eval_step_start Strange", "batch_was_strange Strange"]
