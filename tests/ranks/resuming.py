"""Runs under torchrun: a resumed run equals the whole one, at an epoch border, inside an epoch, and at a cut."""

import os
import sys
from pathlib import Path

from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from tests.support.resuming import SaveAndStop, SaveAtEpochEnd, assert_same, everything, run

folder = Path(sys.argv[1])
rows = 24 if int(os.environ["WORLD_SIZE"]) > 2 else 22  # BatchNorm needs two in each batch
whole_trainer, whole_ema = run(folder, rows=rows)
assert whole_trainer._ranks.count == int(os.environ["WORLD_SIZE"]) > 1
whole = everything(whole_trainer, whole_ema)
for name, saver in {
    "inside": SaveAndStop(folder / "inside", 3),
    "border": SaveAtEpochEnd(folder / "border", 1),
}.items():
    run(folder, saver, rows=rows)
    assert_same(everything(*run(folder, rows=rows, process_seed=99, resume_from=folder / name)), whole, name)
whole = everything(*run(folder, rows=rows, max_num_train_steps=5))
run(folder, SaveTrainingStateCallback(folder / "cut"), rows=rows, max_num_train_steps=3)
resumed = everything(*run(folder, rows=rows, process_seed=99, resume_from=folder / "cut", max_num_train_steps=5))
assert_same(resumed, whole, "cut within the second epoch")
