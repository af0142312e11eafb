"""A model from transformers that computes its loss itself: batches are dicts, and there is no loss function."""

import argparse

import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.schedulers import CosineLrScheduler


def load_datasets():
    """Digits for training, evaluation and a final test.

    Dicts of tensors are datasets; other datasets that yield dicts work too, for example those of the `datasets`
    library.
    """
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    parts = torch.randperm(len(labels)).split([1197, 300, 300])
    return [{"pixel_values": images[part], "labels": labels[part]} for part in parts]


def main(num_epochs):
    set_seed(42)  # before the split, so that all processes split the same way
    train_set, eval_set, test_set = load_datasets()
    # A small vision transformer with random weights. `from_pretrained` would load a trained one.
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
    )
    model = ViTForImageClassification(config)

    trainer = Trainer(
        model,
        loss_func=None,  # the model returns its loss
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
    )
    trainer.train(
        train_set,
        num_epochs,
        eval_dataset=eval_set,
        per_device_batch_size=32,
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
    )
    predictions = trainer.predict(test_set, per_device_batch_size=100)["logits"].argmax(dim=1)
    accuracy = (predictions == test_set["labels"]).float().mean()
    trainer.print(f"Accuracy on held-out digits: {accuracy:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
