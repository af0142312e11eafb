"""Two ranks that believe they are two machines, each with a separate disk or both with one.

Prints the results of saving and resuming, by rank.
"""

import json
import os
import sys
from pathlib import Path

# Each is the only one of its machine.
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from pytorch_accelerated.errors import PytorchAcceleratedError
from pytorch_accelerated.states import run_folder

run_folder.SECONDS_TO_APPEAR = 0.1
rank = int(os.environ["RANK"])
folder = Path(sys.argv[1])
own_disk, other_disk, shared = folder / f"own{rank}", folder / f"own{1 - rank}", folder / "shared"


def outcome(states, epochs=1, resume_from=None, background=False):
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    saver = SaveTrainingStateCallback(states, save_every_n_epochs=1, background=background)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[saver])
    assert trainer._ranks.count == 2
    try:
        trainer.train((torch.ones(8, 1), torch.zeros(8, 1)), epochs, resume_from=resume_from)
    except PytorchAcceleratedError as error:
        return f"{type(error).__name__}: {error}"
    return f"{trainer.run_state.updates} updates"


said = {
    "saved to disks of their own": outcome(own_disk),
    "in the background": outcome(own_disk / "background", background=True),
    "resumed from disks of their own": outcome(shared, 3, own_disk),
    "resumed where the other machine is the first": outcome(shared, 3, other_disk if rank else folder / "nothing"),
    "resumed on one rank": outcome(shared, 3, own_disk if rank == 0 else None),
    "afresh": outcome(shared, 1, shared),
    "resumed from a shared disk": outcome(shared, 3, shared),
}
print(json.dumps(said))
