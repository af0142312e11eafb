"""Predictions and targets of an evaluation in one CSV file, for any number of processes."""

import argparse
import csv
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from train_digits import DigitsNet

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, TrainerCallback


class PredictionsToCsvCallback(TrainerCallback):
    """Writes one row per sample of the last evaluation."""

    def __init__(self, path):
        self.path = path

    def on_eval_epoch_start(self, trainer, **kwargs):
        self.rows = []

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        probability, prediction = batch_output["model_outputs"].softmax(dim=1).max(dim=1)
        # From all processes; every sample comes exactly once.
        columns = trainer.gather((batch["index"], batch["label"], prediction, probability))
        self.rows.extend(zip(*(column.tolist() for column in columns), strict=True))

    def on_evaluation_run_end(self, trainer, **kwargs):
        if not trainer.run_config.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["index", "label", "prediction", "probability"])
            writer.writerows(self.rows)
        trainer.print(f"{len(self.rows)} predictions are in {self.path}")


def loss_func(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch["label"])


def main(num_epochs, output_path):
    set_seed(42)  # before the split, so that all processes split the same way
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    # Dicts of tensors are datasets too. The model receives the entries that its `forward` names, here `input`; the
    # index tells which sample a prediction belongs to.
    train_set, eval_set = (
        {"index": index, "input": images[index], "label": labels[index]}
        for index in torch.randperm(len(labels)).split([1500, 297])
    )

    model = DigitsNet()
    trainer = Trainer(
        model,
        loss_func=loss_func,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        callbacks=[*DEFAULT_CALLBACKS, PredictionsToCsvCallback(output_path)],
    )
    trainer.train(train_set, num_epochs, per_device_batch_size=32)
    trainer.evaluate(eval_set, per_device_batch_size=32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--output-path", type=Path, default="outputs/predictions.csv")
    main(**vars(parser.parse_args()))
