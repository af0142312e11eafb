"""A model and a learning-rate scheduler from timm.

`TrainerWithTimmScheduler` tells timm's schedulers how many updates and epochs are done.
"""

import argparse
from functools import partial

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn
from train_digits import load_datasets

from pytorch_accelerated import TrainerPlaceholderValues, set_seed
from pytorch_accelerated.trainer import TrainerWithTimmScheduler


class EnlargedDigits(torch.utils.data.Dataset):
    """Digits in the form that timm's models expect: three channels and 32x32 pixels."""

    def __init__(self, digits):
        self.digits = digits

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        image, label = self.digits[index]
        return nn.functional.interpolate(image.expand(1, 3, 8, 8), size=32)[0], label


def main(model_name, num_epochs, batch_size):
    set_seed(42)
    train_set, eval_set, test_set = map(EnlargedDigits, load_datasets())
    model = timm.create_model(model_name, num_classes=10)

    trainer = TrainerWithTimmScheduler(
        model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.01),
    )
    trainer.train(
        train_set,
        num_epochs,
        eval_dataset=eval_set,
        per_device_batch_size=batch_size,
        create_scheduler_fn=partial(
            CosineLRScheduler,
            # A placeholder: the number is filled in when the run starts.
            t_initial=TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
            warmup_t=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
            warmup_lr_init=1e-5,
            lr_min=1e-5,
            t_in_epochs=False,
        ),
    )
    predictions = trainer.predict(test_set, per_device_batch_size=batch_size).argmax(dim=1)
    accuracy = (predictions == torch.tensor([label for _, label in test_set])).float().mean()
    trainer.print(f"Accuracy on held-out digits: {accuracy:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-name", default="resnet10t")
    parser.add_argument("--num-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    main(**vars(parser.parse_args()))
