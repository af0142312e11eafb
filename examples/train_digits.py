"""Train a small network on scikit-learn's handwritten digits, then test it on digits it has never seen.

In one process, and in two:

    python examples/train_digits.py
    python -m torch.distributed.run --nproc-per-node 2 examples/train_digits.py
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, ReportCallback, TrainerCallback
from pytorch_accelerated.schedulers import CosineLrScheduler


def load_datasets():
    """Digits for training, evaluation and a final test: pairs of a 1x8x8 image from 0 to 1 and its label."""
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    return random_split(TensorDataset(images, torch.tensor(digits.target)), [1197, 300, 300])


class DigitsNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 4 * 4, 10)),
        )


class AccuracyCallback(TrainerCallback):
    """Records the share of evaluated digits that are recognised."""

    def on_eval_epoch_start(self, trainer, **kwargs):
        self.is_right = []

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        _, labels = batch
        self.is_right.append(trainer.gather(batch_output["model_outputs"].argmax(dim=1) == labels))

    def on_eval_epoch_end(self, trainer, **kwargs):
        trainer.run_history.update_metric("eval_accuracy", torch.cat(self.is_right).float().mean())


def main(num_epochs, output_dir):
    set_seed(0)  # before the split, so that all processes split the same way
    train_set, eval_set, test_set = load_datasets()
    model = DigitsNet()

    trainer = Trainer(
        model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        callbacks=[AccuracyCallback, *DEFAULT_CALLBACKS, ReportCallback(output_dir / "report.html")],
    )
    trainer.train(
        train_set,
        num_epochs=num_epochs,
        eval_dataset=eval_set,
        per_device_batch_size=32,
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
    )
    trainer.save_checkpoint(output_dir / "model.pt")
    if trainer.run_config.is_world_process_zero:
        trainer.run_history.plot(path=output_dir / "curves.png")

    predictions = trainer.predict(test_set, per_device_batch_size=100).argmax(dim=1)
    labels = torch.tensor([label for _, label in test_set])
    mistaken = (predictions != labels).nonzero().flatten().tolist()
    num_right = len(test_set) - len(mistaken)

    trainer.print(f"\nHeld-out digits: {num_right} of {len(test_set)} recognised, {num_right / len(test_set):.1%}")
    if mistaken:
        trainer.print("\n" + side_by_side([test_set[index][0] for index in mistaken[:4]]))
        trainer.print("".join(f"{f'{labels[i]}, predicted {predictions[i]}':20}" for i in mistaken[:4]))
    trainer.print(f"\nModel:  {output_dir / 'model.pt'}\nCurves: {output_dir / 'curves.png'}")
    trainer.print(f"Report: {output_dir / 'report.html'}")


def side_by_side(images, shades=" .:+#@"):
    """Up to four images as text."""
    rows = torch.cat([nn.functional.pad(image[0], (0, 2)) for image in images], dim=1)
    return "\n".join("".join(2 * shades[round(pixel * 5)] for pixel in row) for row in rows.tolist())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-epochs", type=int, default=10)
    parser.add_argument("--output-dir", type=Path, default="outputs/digits")
    main(**vars(parser.parse_args()))
