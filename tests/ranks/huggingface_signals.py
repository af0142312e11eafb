"""Runs on any number of ranks: a run that receives SIGTERM leaves a checkpoint, from which it resumes exactly."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.errors import SignalExit
from pytorch_accelerated.huggingface import Trainer, TrainerCallback
from tests.huggingface.runs import everything, noisy_trainer
from tests.support.resuming import assert_same

folder = Path(sys.argv[1])
last_rank = int(os.environ.get("WORLD_SIZE", "1")) - 1


class Terminate(TrainerCallback):
    """Sends the last rank a signal, in a step or in the evaluation after it."""

    def __init__(self, step: int, *, while_evaluating: bool = False) -> None:
        self.step, self.while_evaluating = step, while_evaluating

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.send(args, state.global_step + 1, is_evaluation=False)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.send(args, state.global_step, is_evaluation=True)

    def send(self, args: Any, step: int, *, is_evaluation: bool) -> None:
        if (step, is_evaluation, args.process_index) == (self.step, self.while_evaluating, last_rank):
            self.step = -1
            os.kill(os.getpid(), signal.SIGTERM)


def prepare(name: str, *callbacks: TrainerCallback, save_strategy: str = "steps") -> Trainer:
    return noisy_trainer(folder / name, *callbacks, per_device_train_batch_size=1, save_strategy=save_strategy)


whole = prepare("whole")
whole.train()
for name, callback in (
    ("in a step", Terminate(5)),
    ("before an evaluation", Terminate(2)),
    ("in an evaluation", Terminate(2, while_evaluating=True)),
):
    interrupted = prepare(name, callback)
    with pytest.raises(SignalExit) as caught:
        interrupted.train()
    step = interrupted.state.global_step
    assert step in (2, 5)
    assert caught.value.saved_to == folder / name / f"checkpoint-{step}"
    assert caught.value.code == 128 + signal.SIGTERM
    resumed = prepare(name)
    resumed.train(resume_from_checkpoint=True)
    assert_same(everything(resumed), everything(whole), name)

# Who saves nothing gets no checkpoint from a signal either.
unsaved = prepare("unsaved", Terminate(2), save_strategy="no")
with pytest.raises(SignalExit) as caught:
    unsaved.train()
assert caught.value.saved_to is None
assert not list((folder / "unsaved").glob("checkpoint-*"))
print("done")
