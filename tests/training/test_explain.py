"""`Trainer.explain` tells beforehand what a run then does."""

import re
from typing import Any

import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from tests.support.processes import REPOSITORY
from tests.support.recording import REMARKS, SHOWN_HOOKS, Recorder, expand
from tests.support.reference import regression_data

EPOCHS, UPDATES, BATCHES = 2, 3, 2  # batches of an update, and of an evaluation
COUNTS = {"update": UPDATES, "batch of the update": BATCHES, "batch": BATCHES}
TRAIN, EVALUATE = regression_data(UPDATES * BATCHES * 2), regression_data(BATCHES * 2)


def watcher(name: str, acted: list[str], *events: str) -> TrainerCallback:
    """A callback of a class of that name, which notes when it acts."""

    def method(event: str) -> Any:
        return lambda self, trainer, **kwargs: acted.append(f"{event} {name}")

    kind: type[TrainerCallback] = type(name, (TrainerCallback,), {event: method(event) for event in events})
    return kind()


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
        arguments = {"per_device_batch_size": 2, "gradient_accumulation_steps": BATCHES}
        trainer.train(TRAIN, EPOCHS, evaluation_set, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", [Trainer, CountsItems])
@pytest.mark.parametrize("what", ["train", "train without evaluation", "evaluate", "predict"])
def test_the_text_is_what_a_run_does(what: str, base: type[Trainer]):
    recorder = Recorder([*SHOWN_HOOKS, "count_batch_items"] if base is CountsItems else SHOWN_HOOKS)
    trainer = recorder.trainer(base=base)
    text = section(trainer.explain(EPOCHS, evaluate=what == "train" or what == "evaluate"), what.split()[0])
    recorder.calls.clear()
    run(trainer, what)
    assert recorder.calls == expand(text, counts=COUNTS)


def test_the_callbacks_beside_an_event_are_those_that_handle_it():
    acted: list[str] = []
    beginnings = ("on_init_end", "on_train_epoch_start", "on_eval_epoch_start")
    others = ("on_train_step_end", "on_optimizer_step_end", "on_prediction_step_end")
    trainer = Recorder().trainer(watcher("First", acted, *beginnings), watcher("Second", acted, *beginnings, *others))
    text = trainer.explain(EPOCHS)
    promised = [step for name in ("Trainer", "train", "evaluate", "predict") for step in expand_actors(text, name)]
    for what in ("train", "evaluate", "predict"):
        run(trainer, what)
    assert acted == [step for step in promised if not step.endswith("Recorder")]


def expand_actors(text: str, name: str) -> list[str]:
    """The same order, with a line of its own for each callback at an event, as "event callback"."""
    lines = []
    event, depth = "", 0
    for line in section(text, name).splitlines():
        words = line.split()
        if len(words) == 1 and len(line) - len(words[0]) > 40:  # a further callback of the event above
            lines.append(f"{' ' * depth}{event} {words[0]}")
        elif words[0].startswith("on_"):
            event, depth = words[0], len(line) - len(line.lstrip())
            lines.append(f"{' ' * depth}{event} {words[1]}")
        elif line.endswith(":"):
            lines.append(line)
    return expand("\n".join(lines), counts=COUNTS)


def test_the_page_about_the_loop_shows_the_same():
    """Methods on the left, events and recorded metrics on the right."""
    page = (REPOSITORY / "docs" / "loop.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<!-- loop -->\n```text\n.*?\n\n(.*?)```", page, re.DOTALL)
    text = section(Recorder([]).trainer().explain(EPOCHS), "train").replace(f"each of {EPOCHS} epochs:", "each epoch:")
    lines = [line[:REMARKS].strip() for line in text.splitlines()]
    assert [line.strip() for line in shown.splitlines()] == [line for line in lines if not line.startswith("_")]


def test_overridden_hooks_and_custom_events_are_shown():
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

    lines = Recorder([]).trainer(Strange(), base=Mine).explain().splitlines()
    assert [line.split() for line in lines if "overridden" in line] == [
        ["backward_step", "overridden", "in", "Middle"],
        ["_clip_gradients", "overridden", "in", "Mine"],
    ]
    assert lines[-1].split() == ["batch_was_strange", "Strange"]
