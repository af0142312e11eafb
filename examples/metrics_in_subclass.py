"""Metrics inside a Trainer: created in its constructor, updated with each batch, recorded after each evaluation."""

import argparse

import torch
from torch import nn
from torchmetrics import Accuracy
from train_digits import DigitsNet, load_datasets

from pytorch_accelerated import Trainer, set_seed


class TrainerWithAccuracy(Trainer):
    def __init__(self, *args, num_classes, **kwargs):
        super().__init__(*args, **kwargs)
        # The default callbacks move modules that are attributes of the trainer to its device.
        self.accuracy = Accuracy(task="multiclass", num_classes=num_classes)

    def calculate_eval_batch_loss(self, batch):
        batch_output = super().calculate_eval_batch_loss(batch)
        _, labels = batch
        self.accuracy.update(batch_output["model_outputs"], labels)
        return batch_output

    def eval_epoch_end(self):
        super().eval_epoch_end()
        # `compute` combines the results of all processes.
        self.run_history.update_metric("eval_accuracy", self.accuracy.compute())
        self.accuracy.reset()


def main(num_epochs):
    set_seed(42)
    train_set, eval_set, test_set = load_datasets()
    model = DigitsNet()

    trainer = TrainerWithAccuracy(
        model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        num_classes=10,
    )
    trainer.train(train_set, num_epochs, eval_dataset=eval_set, per_device_batch_size=32)
    metrics = trainer.evaluate(test_set, per_device_batch_size=32)
    trainer.print(f"Accuracy on held-out digits: {metrics['eval_accuracy']:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-epochs", type=int, default=5)
    main(**vars(parser.parse_args()))
