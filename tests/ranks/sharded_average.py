"""The average of a sharded model, on any number of ranks, is that of one process. Argument: a folder with that."""

import os
import sys
from pathlib import Path

import torch

from pytorch_accelerated.callbacks import ModelEmaCallback
from tests.support.resuming import SaveAndStop, assert_same
from tests.support.sharding import everything, make_trainer, train

folder = Path(sys.argv[1])
ranks = int(os.environ["WORLD_SIZE"])
alone = torch.load(folder / "alone.pt")
average = ModelEmaCallback(0.7, save_path=folder / "average.pt")
trainer = train(make_trainer(shards=True, callbacks=[average]), ranks=ranks)
assert trainer._ranks.count == ranks

losses = trainer.run_history.get_metric_values("ema_model_eval_loss_epoch")
assert_same(list(losses), alone["losses"], tolerance=1e-12)
saved = torch.load(folder / "average.pt")["model_state_dict"]
assert_same(dict(saved), alone["average"], tolerance=1e-12)
assert_same(everything(trainer)["model"], everything(train(make_trainer(shards=True), ranks=ranks))["model"])

state = folder / "state"
train(make_trainer(shards=True, callbacks=[average, SaveAndStop(state, 4)]), ranks=ranks)
train(make_trainer(shards=True, callbacks=[average]), ranks=ranks, resume_from=state)
assert_same(dict(torch.load(folder / "average.pt")["model_state_dict"]), dict(saved))
torch.distributed.destroy_process_group()
