"""Runs under torchrun on two ranks: an update that is not finite on one of them is left out on both."""

import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TerminateOnNaNCallback
from pytorch_accelerated.errors import NonFiniteLossError
from tests.support.reference import (
    assert_same_parameters,
    regression_data,
    sgd,
    tiny_model,
    train_reference,
    windows_of_epoch,
)

SEED, SIZE, UPDATES = 5, 24, 6
DATA = regression_data(SIZE)
BAD = (3, 4)


class BadOnOneRank(Trainer):
    """On the second rank alone, in its first batch of an update; the gradients are finite."""

    faults: Any = BAD

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        is_first = self.run_state.batches_in_epoch % 2 == 0
        if self._ranks.index == 1 and self.run_state.updates in self.faults and is_first:
            output["loss"] = output["loss"] + math.inf
        return output


def train(policy: str, folder: Path, **arguments: Any) -> tuple[Trainer, list[str]]:
    model = tiny_model()
    callbacks = [TerminateOnNaNCallback, SaveTrainingStateCallback(folder, save_every_n_steps=2)]
    trainer = BadOnOneRank(model, nn.MSELoss(), sgd(model), callbacks=callbacks, seed=SEED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(
            DATA, 1, per_device_batch_size=1, gradient_accumulation_steps=2, nonfinite_policy=policy, **arguments
        )
    return trainer, [str(warning.message) for warning in caught if "cannot be applied" in str(warning.message)]


folder = Path(sys.argv[1])
windows = windows_of_epoch(SIZE, 4, seed=SEED, epoch=0)
expected, _ = train_reference(DATA, [window for index, window in enumerate(windows) if index not in BAD])
for policy in ("skip", "rollback"):
    trainer, messages = train(policy, folder / policy)
    assert trainer._ranks.count == int(os.environ["WORLD_SIZE"]) == 2
    assert_same_parameters(trainer.model, expected)
    assert (trainer.run_state.updates, trainer.run_state.skipped_updates) == (UPDATES, 2)
    assert math.isfinite(trainer.run_history.get_latest_metric("train_loss_epoch"))
    # Said on one process, with the rank that has it.
    assert len(messages) == (2 if trainer._ranks.is_first else 0), messages
    assert all("the loss of batch" in message and "on rank 1 is" in message for message in messages)
with pytest.raises(NonFiniteLossError, match=r"on rank 1 .* updates 4 to 5 could"):
    train("skip", folder / "limit", max_skipped_updates=1)
torch.distributed.destroy_process_group()
