"""Two ranks that share a model save twice: ``dying_in_save.py FOLDER RANK OPERATION``.

In the second save RANK is killed right before that operation on the disk, counted from 0. Without a RANK both live, and
each prints how many operations it has needed.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tests.checkpointing.faulty_disk import Operation, wrap_operations
from tests.support.sharding import make_trainer

folder, rank, dies_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
trainer = make_trainer(shards=True)
assert trainer._ranks.count == int(os.environ["WORLD_SIZE"]) == 2
trainer.save_training_state(folder / "first")
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
trainer.save_training_state(folder / "second")
print(done)
