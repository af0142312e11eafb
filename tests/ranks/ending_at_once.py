"""Processes that end right after their last save was asked for, each followed by the same command again.

The last line is JSON: by case, the states that the first process left, and the output of the second.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.huggingface import TrainerCallback as FaceCallback
from tests.huggingface.runs import make_trainer
from tests.support.forks import Fork
from tests.support.reference import regression_data, tiny_trainer
from tests.support.states import list_states

folder = Path(sys.argv[1])


def end(how: str) -> None:
    if how == "return":
        raise StopTrainingError
    if how == "exception":
        raise ZeroDivisionError
    os._exit(0)


class Ends(TrainerCallback):
    """Ends the process while the state of an update is being written."""

    def __init__(self, how: str, update: int) -> None:
        self.how, self.update = how, update

    def on_train_step_start(self, trainer: Any, **kwargs: Any) -> None:
        if trainer.run_state.updates == self.update:
            end(self.how)


class EndsFace(FaceCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            end("os._exit")


def native(states: Path, *callbacks: Any) -> Callable[[], None]:
    def work() -> None:
        saver = SaveTrainingStateCallback(states, save_every_n_steps=1, save_at_end=False, background=True)
        trainer = tiny_trainer(saver, *callbacks)
        trainer.train(regression_data(64), 1, per_device_batch_size=8, resume_from=states)
        print("updates", trainer.run_state.updates)

    return work


def hugging_face(output: Path, *callbacks: Any, resumes: bool) -> Callable[[], None]:
    def work() -> None:
        trainer = make_trainer(output, *callbacks, save_strategy="steps", save_steps=1)
        trainer.train(resume_from_checkpoint=resumes)
        print("updates", trainer.state.global_step)

    return work


cases: dict[str, tuple[Path, Callable[[], None], Callable[[], None]]] = {}
for how, update in (("return", 5), ("exception", 5), ("os._exit", 5), ("os._exit", 1)):
    states = folder / f"{how} {update}"
    cases[states.name] = states, native(states, Ends(how, update)), native(states)
output = folder / "huggingface"
cases[output.name] = output, hugging_face(output, EndsFace(), resumes=False), hugging_face(output, resumes=True)

found: dict[str, Any] = {}
for name, (states, first, again) in cases.items():
    Fork(first, folder / "log").wait()
    left = [state.name for state, _ in list_states(states)]
    found[name] = {"left": left, "lines": Fork(again, folder / "log").wait().lines}
print(json.dumps(found))
