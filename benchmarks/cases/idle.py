"""The cost of a callback per event that it does not handle."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.measuring import Result, Setting, Target, losses_of_same_work, seconds_per_step, take_turns
from benchmarks.ways import Way
from benchmarks.work import Feed, Job, Parts
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.trainer import Trainer

CALLBACKS = 50
STEP_EVENTS = ("on_train_step_start", "on_train_step_end", "on_optimizer_step_start", "on_optimizer_step_end")


class NumberedCallback(TrainerCallback):
    """One of many callbacks that must be distinguished."""

    def __init__(self, number: int) -> None:
        self._number = number

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__} {self._number}"


class EmptyCallback(NumberedCallback):
    """Has methods that do nothing."""

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        pass

    on_train_step_end = on_optimizer_step_start = on_optimizer_step_end = on_train_step_start


class OursWithCallbacks(Way):
    """With `CALLBACKS` callbacks of a class."""

    endings = ("", "")

    def __init__(self, name: str, callback_class: type[NumberedCallback] | None) -> None:
        self.library = name
        super().__init__()
        self._callback_class = callback_class

    def train(self, parts: Parts, feed: Feed) -> None:
        callbacks = [] if self._callback_class is None else map(self._callback_class, range(CALLBACKS))
        Trainer(*parts, callbacks=callbacks).train(feed.data, num_epochs=1, per_device_batch_size=feed.batch_size)


def run(setting: Setting) -> list[Result]:
    short = Job(samples=32 * setting.size(300, quick=10))
    long = Job(samples=32 * setting.size(1500, quick=50))
    none, *some = (
        OursWithCallbacks("no callback", None),
        OursWithCallbacks("a callback without a method for the event", NumberedCallback),
        OursWithCallbacks("a callback with an empty method for the event", EmptyCallback),
    )
    losses = losses_of_same_work([none, *some], short)
    slopes = take_turns(
        {way.name: partial(seconds_per_step, way, short, long) for way in (none, *some)}, setting.repeats
    )
    microseconds = {
        way.name: [
            (with_callbacks - without) * 1e6 / (CALLBACKS * len(STEP_EVENTS))
            for with_callbacks, without in zip(slopes[way.name], slopes[none.name], strict=True)
        ]
        for way in some
    }
    return [
        Result(
            title=f"An idle callback (from {CALLBACKS} of them, at the {len(STEP_EVENTS)} events of a step)",
            unit="µs per event and callback",
            rounds=microseconds,
            targets=[Target(way.name, at_most=1) for way in some],
            final_losses=losses,
        )
    ]
