"""Metrics in a callback that can be added to any Trainer.

`pytorch_accelerated.callbacks.MetricsCallback` does this for any torchmetrics; this example shows how to write your
own.
"""

import argparse

import torch
from torch import nn
from torchmetrics import Accuracy, F1Score, MetricCollection
from train_digits import DigitsNet, load_datasets

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, TrainerCallback


class ClassificationMetricsCallback(TrainerCallback):
    """Records the accuracy and the F1 score of each evaluation."""

    def __init__(self, num_classes):
        self.metrics = MetricCollection(
            {
                "eval_accuracy": Accuracy(task="multiclass", num_classes=num_classes),
                "eval_f1_score": F1Score(task="multiclass", num_classes=num_classes, average="macro"),
            }
        )

    def on_eval_epoch_start(self, trainer, **kwargs):
        self.metrics.to(trainer.device)
        self.metrics.reset()

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        _, labels = batch
        self.metrics.update(batch_output["model_outputs"], labels)

    def on_eval_epoch_end(self, trainer, **kwargs):
        for name, value in self.metrics.compute().items():
            trainer.run_history.update_metric(name, value)


def main(num_epochs):
    set_seed(42)
    train_set, eval_set, test_set = load_datasets()
    model = DigitsNet()

    trainer = Trainer(
        model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        # It comes before the default callbacks, one of which logs what has been recorded so far.
        callbacks=[ClassificationMetricsCallback(num_classes=10), *DEFAULT_CALLBACKS],
    )
    trainer.train(train_set, num_epochs, eval_dataset=eval_set, per_device_batch_size=32)
    trainer.evaluate(test_set, per_device_batch_size=32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-epochs", type=int, default=5)
    main(**vars(parser.parse_args()))
