"""Runs on two ranks: if rows do not divide evenly, we evaluate each row once, and `transformers` does not.

Seven rows in batches of two: two ranks have four places in the second round for the three remaining rows.
"""

import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.huggingface.runs import Regression, Rows, make_trainer

folder = Path(sys.argv[1])
rows = Rows(7)
with torch.no_grad():
    exact = Regression()(rows.x, rows.labels)[0].item()

ours = make_trainer(folder / "ours", per_device_eval_batch_size=2)
assert ours.args.world_size == 2
assert ours.evaluate(rows)["eval_loss"] == pytest.approx(exact, rel=1e-6)

arguments = transformers.TrainingArguments(
    str(folder / "theirs"), per_device_eval_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True
)
theirs = transformers.Trainer(Regression(), arguments)
assert arguments.world_size == 2
assert theirs.evaluate(rows)["eval_loss"] != pytest.approx(exact, rel=1e-3)
print("done")
