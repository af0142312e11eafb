"""Runs on two ranks where one or both set a flag; the results go to a file."""

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import torch

from pytorch_accelerated.huggingface import TrainerCallback
from tests.chaos.size import some
from tests.huggingface.runs import Recorder, Rows, make_trainer, without_speed

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
EVENTS = ("on_step_end", "on_epoch_end", "on_evaluate", "on_log")
PAIRS = list(itertools.product(EVENTS, FLAGS))  # every fourth one has each event and each flag once at least


class Asking(TrainerCallback):
    """Sets a flag in an event of the third step or later, once."""

    def __init__(self, event: str, flag: str) -> None:
        self.flag = flag
        self.is_done = False
        setattr(self, event, self.ask)

    def ask(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 3 and not self.is_done:
            self.is_done = True
            setattr(control, self.flag, True)


def run(event: str, flag: str, askers: tuple[int, ...]) -> dict[str, Any]:
    recorder = Recorder()
    callbacks = [Asking(event, flag)] if rank in askers else []
    trainer = make_trainer(
        folder / f"{event}-{flag}-{len(askers)}",
        *callbacks,
        recorder,
        parts={"train_dataset": Rows(12)},
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        num_train_epochs=2,
    )
    assert trainer.args.world_size == 2
    trainer.train()
    return {
        # Which flags are set inside of an event where only one rank has set one is that rank's own business.
        "calls": [call.split()[0] for call in recorder.calls],
        "history": without_speed(trainer.state.log_history),
        "model": trainer.model.state_dict(),
        "flags": vars(trainer.control),
    }


found = {
    f"{event} {flag}": [run(event, flag, askers) for askers in ((1,), (0, 1))]
    for event, flag in some(PAIRS[::4], PAIRS)
}
torch.save(found, folder / f"{rank}.pt")
print("done")
