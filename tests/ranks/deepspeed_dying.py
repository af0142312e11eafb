"""A run with DeepSpeed on two ranks: ``deepspeed_dying.py FOLDER CONFIG RANK OPERATION``.

RANK is killed right before that operation on the disk, counted from 0. Without a RANK both live, and each prints how
many operations it has needed. The run goes on from what it has saved before.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from tests.checkpointing.faulty_disk import Operation, wrap_operations
from tests.support.zero import everything, make_trainer, saver, train

folder, config, rank, dies_at = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
trainer = make_trainer(config, saver(folder / "states", max_checkpoints=2))
done = 0
one_at_a_time = threading.Lock()


def counted(name: str, operation: Operation) -> Operation:
    def run(*args: Any) -> Any:
        global done
        with one_at_a_time:
            if trainer._ranks.index == rank and done == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return operation(*args)

    return run


wrap_operations(counted)
train(trainer, resume_from=folder / "states")
operations = done
results = everything(trainer)
if trainer._ranks.is_first:
    torch.save(results, folder / "results.pt")
print(operations)
