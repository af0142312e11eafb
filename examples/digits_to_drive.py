"""Train on digits with settings from the command line, and leave the result in a file: for `drive_runs.py`.

python examples/digits_to_drive.py '{"lr": 0.01, "width": 128}' --folder outputs/one_run
"""

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.callbacks import MetricsCallback, ResultCallback, SaveBestModelCallback, TerminateOnNaNCallback

SETTINGS = {"lr": 1e-3, "width": 32, "batch_size": 32, "weight_decay": 0.0, "outputs": 10, "seconds_per_row": 0.0}


class Digits(Dataset):
    def __init__(self, rows, seconds_per_row=0.0):
        digits = load_digits()
        self.images = torch.tensor(digits.data[rows] / 16, dtype=torch.float32)
        self.labels = torch.tensor(digits.target[rows])
        self.seconds_per_row = seconds_per_row

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        if self.seconds_per_row:
            time.sleep(self.seconds_per_row)
        return self.images[index], self.labels[index]


def accuracy(predictions, labels):
    return float((predictions == labels).float().mean())


def main(settings, folder, num_updates, max_duration):
    settings = {**SETTINGS, **settings}
    set_seed(0)  # so that runs differ in their settings only
    width, outputs = settings["width"], settings["outputs"]
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, outputs))
    best = {"watch_metric": "eval_accuracy", "greater_is_better": True}
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=settings["lr"], weight_decay=settings["weight_decay"]),
        callbacks=[
            MetricsCallback({"accuracy": accuracy}, predictions="argmax"),
            TerminateOnNaNCallback,
            SaveBestModelCallback(folder / "best.pt", load_saved_checkpoint=False, **best),
            ResultCallback(folder / "result.json", notes=settings),
        ],
        seed=0,
    )
    trainer.train(
        Digits(slice(1200), settings["seconds_per_row"]),
        num_epochs=None,
        eval_dataset=Digits(slice(1200, None)),
        per_device_batch_size=settings["batch_size"],
        max_num_train_steps=num_updates,
        max_duration=max_duration,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=json.loads, help="those that differ from the usual ones, as JSON")
    parser.add_argument("--folder", type=Path, default="outputs/one_run")
    parser.add_argument("--num-updates", type=int, default=200)
    parser.add_argument("--max-duration", type=float, default=60.0)
    main(**vars(parser.parse_args()))
