"""Two ranks, the second of which is lost in the fourth update: it exits or hangs. Prints the error of rank 0.

Arguments: "ends", "hangs", or "huggingface" for the other face; a folder, and the seconds that a rank waits.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import LostPeerError
from pytorch_accelerated.huggingface import TrainerCallback as FaceCallback
from pytorch_accelerated.utils import world_process_zero_only
from tests.huggingface.runs import make_trainer

way, folder, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
is_told = folder / "told"


class LoseOne(TrainerCallback):
    def on_train_step_start(self, trainer, **kwargs):
        if trainer._ranks.index == 1 and trainer.run_state.updates == 3:
            if way == "hangs":
                while not is_told.exists():
                    time.sleep(0.1)
            os._exit(0)

    def on_exception(self, trainer, exception, **kwargs):
        print(f"callbacks hear of a {type(exception).__name__}")


class LoseOneOfFace(FaceCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == 3:
            os._exit(0)


try:
    if way == "huggingface":
        saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "ddp_timeout": seconds}
        face = make_trainer(folder / "states", LoseOneOfFace(), num_train_epochs=9, **saves)
        assert face.args.world_size == 2
        face.train()
    world_process_zero_only(lambda: None)()  # makes the group, with torch's limit
    model = nn.Linear(1, 1)
    saver = SaveTrainingStateCallback(folder / "states", save_every_n_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[LoseOne(), saver], timeout=seconds)
    assert trainer._ranks.count == 2
    trainer.train((torch.ones(160, 1), torch.zeros(160, 1)), 1)
except LostPeerError as error:
    print(f"caught:\n{error}\ncaused by {type(error.__cause__).__name__}")
    is_told.touch()
