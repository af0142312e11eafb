"""Kills a run, and the process that evaluates its states, at any moment, and compares the values with the run's own.

A script. Its arguments: kills, a seed, and an empty folder. It prints one JSON object with what it did.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import EvaluateBesideCallback, SaveTrainingStateCallback, TrainerCallback
from tests.callbacks.runs import BATCH_SIZE, DATA, a_trainer, fit, noisy_model
from tests.support.forks import Fork

EPOCHS_OF_A_KILL = 10


class Slow(TrainerCallback):
    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        time.sleep(0.02)


def values_of(trainer: Trainer) -> list[Any]:
    return [list(record) for record in trainer.run_history.records if record.name == "eval_loss_epoch"]


def main() -> None:
    kills, seed, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dice, epochs, states = random.Random(seed), EPOCHS_OF_A_KILL * kills, folder / "states"

    def train() -> None:
        saver = SaveTrainingStateCallback(states, save_every_n_epochs=1)
        trainer = a_trainer(EvaluateBesideCallback(states), saver, Slow())
        fit(trainer, epochs, eval_dataset=None, resume_from=states)
        print(json.dumps(values_of(trainer)))

    def evaluate() -> None:
        trainer = Trainer(noisy_model(seed=9), nn.MSELoss(), None, callbacks=())
        trainer.evaluate_states(states, dataset=DATA, per_device_batch_size=BATCH_SIZE)

    work = {"run": train, "beside": evaluate}
    forks = {side: Fork(task, folder / side) for side, task in work.items()}
    killed = dict.fromkeys(work, 0)
    for number in range(kills):
        time.sleep(dice.uniform(0.0, 0.8))
        side = ("run", "beside")[number % 2]
        os.kill(forks[side].pid, signal.SIGKILL)
        killed[side] += forks[side].wait().status == 128 + signal.SIGKILL
        forks[side] = Fork(work[side], folder / side)
    outcomes = {side: fork.wait() for side, fork in forks.items()}
    assert [outcome.status for outcome in outcomes.values()] == [0, 0], outcomes
    trainer = a_trainer()
    fit(trainer, epochs)
    values = json.loads(outcomes["run"].lines[-1])
    assert values == values_of(trainer), f"{len(values)} values differ from {epochs} of the run"
    print(json.dumps({"kills of the run": killed["run"], "kills beside": killed["beside"], "values": len(values)}))


if __name__ == "__main__":
    main()
