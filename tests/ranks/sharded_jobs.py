"""Several optimizers and activation checkpointing of a sharded model, on two ranks. Argument: a folder."""

import os
import sys
from pathlib import Path

import torch

from tests.support.resuming import SaveAndStop, assert_same
from tests.support.sharding import everything, make_trainer, train

folder = Path(sys.argv[1])
trainer = train(make_trainer(shards=True, several_optimizers=True), ranks=2)
assert trainer._ranks.count == int(os.environ["WORLD_SIZE"]) == 2
result = everything(trainer)
if trainer._ranks.is_first:
    torch.save(result, folder / "several.pt")
for update in (1, 3):
    state = folder / f"state_{update}"
    train(make_trainer(shards=True, several_optimizers=True, callbacks=[SaveAndStop(state, update)]), ranks=2)
    resumed = train(make_trainer(shards=True, several_optimizers=True), ranks=2, resume_from=state)
    assert_same(everything(resumed), result, str(state))

plain, again = (make_trainer(shards=True, dropout=0.3, checkpoints_activations=each) for each in (False, True))
assert_same(everything(train(again, ranks=2)), everything(train(plain, ranks=2)))
torch.distributed.destroy_process_group()
