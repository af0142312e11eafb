"""Mixup from timm and averaged weights: each training image blends two images and their labels."""

import argparse

import torch
from timm.data import Mixup
from torch import nn
from train_digits import DigitsNet, load_datasets

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, ModelEmaCallback


class MixupTrainer(Trainer):
    def __init__(self, *args, mixup, **kwargs):
        super().__init__(*args, **kwargs)
        self.mixup = mixup

    def calculate_train_batch_loss(self, batch):
        # The labels become class probabilities, which CrossEntropyLoss also accepts.
        mixed_images, soft_labels = self.mixup(*batch)
        return super().calculate_train_batch_loss((mixed_images, soft_labels))


def main(num_epochs, ema_path):
    set_seed(42)
    train_set, eval_set, test_set = load_datasets()
    model = DigitsNet()

    trainer = MixupTrainer(
        model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        mixup=Mixup(mixup_alpha=0.2, label_smoothing=0.05, num_classes=10),
        # It comes before the callback that logs, so that the metrics of the average are logged too.
        callbacks=[ModelEmaCallback(decay=0.98, save_path=ema_path), *DEFAULT_CALLBACKS],
    )
    trainer.train(
        train_set,
        num_epochs,
        eval_dataset=eval_set,
        per_device_batch_size=32,
        train_dataloader_kwargs={"drop_last": True},  # Mixup forms pairs, so the batch size must be even
    )
    for name in ("the last weights", "the averaged weights"):
        if name == "the averaged weights":
            trainer.load_checkpoint(ema_path)
        predictions = trainer.predict(test_set, per_device_batch_size=100).argmax(dim=1)
        accuracy = (predictions == torch.tensor([label for _, label in test_set])).float().mean()
        trainer.print(f"Accuracy on held-out digits with {name}: {accuracy:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-epochs", type=int, default=8)
    parser.add_argument("--ema-path", default="outputs/ema_model.pt")
    main(**vars(parser.parse_args()))
