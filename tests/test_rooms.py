"""What is optional can be taken away: without it, runs of both faces train, save, resume and evaluate as before."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import PACKAGE, SOURCE

RUN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pytorch_accelerated.callbacks
from pytorch_accelerated import Trainer

data = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
model = nn.Linear(3, 1)
trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1))
trainer.train(data, 2, data, per_device_batch_size=4)
trainer.evaluate(data, per_device_batch_size=4)
assert trainer.predict(data, per_device_batch_size=4).shape == (8, 1)
trainer.save_training_state("state")
trainer.train(data, 3, data, per_device_batch_size=4, resume_from="state")

from pytorch_accelerated import huggingface

class Model(nn.Linear):
    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(super().forward(x), labels)}

rows = [{"x": x, "labels": y} for x, y in data]
arguments = huggingface.TrainingArguments("out", num_train_epochs=1, use_cpu=True, report_to="none", disable_tqdm=True)
huggingface.Trainer(Model(3, 1), arguments, train_dataset=rows, eval_dataset=rows).train()
print(trainer.run_state.updates, pytorch_accelerated.__file__)
"""


@pytest.mark.processes
def test_a_run_needs_no_extras(tmp_path: Path):
    package = shutil.copytree(SOURCE / PACKAGE, tmp_path / PACKAGE)  # with what is compiled, which is much quicker
    shutil.rmtree(package / "extras")
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"6 {package / '__init__.py'}"
