"""Two ranks that share a model save twice: ``dying_in_save.py FOLDER RANK OPERATION``.

In the second save RANK is killed right before that operation on the disk, counted from 0. Without a RANK both live, and
each prints how many operations it has needed.
"""

import os
import sys
from pathlib import Path

from tests.checkpointing.faulty_disk import count_until_death
from tests.support.sharding import make_trainer

folder, rank, dies_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
trainer = make_trainer(shards=True)
assert trainer._ranks.count == int(os.environ["WORLD_SIZE"]) == 2
trainer.save_training_state(folder / "first")
operations = count_until_death(dies_at=dies_at if trainer._ranks.index == rank else None)
trainer.save_training_state(folder / "second")
print(operations())
