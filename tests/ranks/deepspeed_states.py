"""Runs under torchrun on two ranks: a run with a config of DeepSpeed is saved at ten moments, and resumed from each."""

import json
import sys
from pathlib import Path

import torch

from tests.support.resuming import assert_same
from tests.support.zero import everything, make_trainer, saver, train

folder, config = Path(sys.argv[1]), json.loads(sys.argv[2])

whole_run = train(make_trainer(config, saver(folder / "states")))
assert whole_run._ranks.count == 2
expected = everything(whole_run)
assert whole_run.run_state.updates == 60
states = list((folder / "states").iterdir())
assert len(states) == 10
# The last of these is written in the background.
for state in [*states, folder / "later" / "step_30"]:
    if not state.exists():
        train(make_trainer(config, saver(folder / "later", background=True)))
    resumed = train(make_trainer(config), resume_from=state)
    assert_same(everything(resumed), expected, str(state))

one_epoch = everything(train(make_trainer(config), epochs=1))
if whole_run._ranks.is_first:
    torch.save({"three": expected, "one": one_epoch}, folder / "results.pt")
print("all is well", flush=True)
