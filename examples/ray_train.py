"""Train on scikit-learn's handwritten digits with Ray Train: two workers, started again if one is lost.

pip install "ray[train]"
python examples/ray_train.py
"""

import argparse
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import RayTrainCallback, ray_checkpoint


def load_rows():
    """1500 digits for training and 297 for evaluation: 64 pixels from 0 to 1, and the label."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    return (pixels[:1500], labels[:1500]), (pixels[1500:], labels[1500:])


def make_trainer(*callbacks):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, metrics=["accuracy"], seed=0)


def train_on_worker(config):
    """What each of Ray's workers does."""
    train_rows, eval_rows = load_rows()
    trainer = make_trainer(RayTrainCallback())
    with ray_checkpoint() as state:  # None, unless Ray starts the run again
        trainer.train(train_rows, config["num_epochs"], eval_rows, per_device_batch_size=32, resume_from=state)


def main(num_epochs, output_dir):
    ray.init()
    result = TorchTrainer(
        train_on_worker,
        train_loop_config={"num_epochs": num_epochs},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(output_dir.resolve()), failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(f"Epoch {result.metrics['epoch']}: accuracy {result.metrics['eval_accuracy']:.1%}")

    trainer = make_trainer()
    with result.checkpoint.as_directory() as state:
        trainer.load_training_state(state)
    _, (pixels, labels) = load_rows()
    predictions = trainer.predict(pixels, per_device_batch_size=100).argmax(dim=1)
    print(f"Loaded from Ray's checkpoint: {int((predictions == labels).sum())} of {len(labels)} recognised")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-epochs", type=int, default=10)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/ray"))
    main(**vars(parser.parse_args()))
