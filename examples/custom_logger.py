"""Metrics in a place of your own: a logger that writes them to a file as JSON lines, as they come."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from train_digits import DigitsNet, load_datasets

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, LogMetricsCallback


class JSONLinesLogger(LogMetricsCallback):
    """Appends a line to a file after each training epoch and each evaluation."""

    def __init__(self, path):
        self.path = path

    def log_metrics(self, trainer, metrics):
        if not trainer.run_config.is_world_process_zero:
            return
        line = {"epoch": trainer.run_history.current_epoch, "update": trainer.run_state.updates, **metrics}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)


def main(num_epochs, log_path):
    set_seed(42)
    train_set, eval_set, _ = load_datasets()
    model = DigitsNet()

    trainer = Trainer(
        model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        callbacks=[*DEFAULT_CALLBACKS, JSONLinesLogger(log_path)],  # in addition to the table
    )
    trainer.train(train_set, num_epochs, eval_dataset=eval_set, per_device_batch_size=32)
    trainer.print(f"Every metric is also in {log_path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-epochs", type=int, default=5)
    parser.add_argument("--log-path", type=Path, default="outputs/metrics.jsonl")
    main(**vars(parser.parse_args()))
