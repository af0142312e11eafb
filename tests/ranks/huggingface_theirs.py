"""Runs on two ranks: what is the same with `transformers`, and what is not.

The scale of the loss is the same, and which model is evaluated. If rows do not divide evenly, we evaluate each row
once, and `transformers` does not.
"""

import sys
from pathlib import Path

import pytest
import torch
import transformers.trainer

from tests.chaos.size import some
from tests.huggingface.runs import Regression, Rows, losses, make_trainer
from tests.huggingface.test_against_transformers import TRAINED, assert_same_history
from tests.huggingface.test_loss_scale import EXACT, SAME, trained
from tests.huggingface.test_subclasses import averaged, prepared_loaders
from tests.huggingface.test_subclasses import trained as trained_subclass

folder = Path(sys.argv[1])

CASES = list({**SAME, **EXACT}.items())
for number, (name, case) in enumerate(some(CASES[1::6], CASES)):
    for steps in some((2,) if name in EXACT else (1 + number % 2,), (1, 2)):
        batches = {"per_device_train_batch_size": 2 // steps, "gradient_accumulation_steps": steps}
        trainers = [trained(library, case, folder, max_steps=1, **batches) for library in ("ours", "theirs")]
        assert trainers[0].args.world_size == 2
        our_loss, their_loss = (losses(trainer)[0] for trainer in trainers)
        factor = 2 * steps if name in EXACT else 1
        tolerance = 0.1 if "penalty" in name else 1e-5  # it is multiplied once
        assert their_loss == pytest.approx(factor * our_loss, rel=tolerance), (name, steps, our_loss, their_loss)

# A model that takes the place of another for an evaluation is evaluated, and loaders may be prepared already.
for subclass in (averaged, prepared_loaders):
    ours, theirs = (trained_subclass(library, subclass, folder / library) for library in ("ours", "theirs"))
    assert_same_history(ours.state.log_history, theirs.state.log_history, tolerance=TRAINED)

# Seven rows in batches of two: two ranks have four places in the second round for the three remaining rows.
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
