"""Transfer learning: train the new head of a model first, then the whole model, with a lower rate for the rest.

python examples/transfer_learning.py --pretrained
"""

import argparse
from pathlib import Path

import timm
import torch
from timm_scheduler import EnlargedDigits
from torch import nn
from train_digits import load_datasets

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.finetuning import ModelFreezer


def create_model(model_name, pretrained):
    return timm.create_model(model_name, pretrained=pretrained, num_classes=10)


def main(model_name, pretrained, num_epochs, batch_size, output_dir):
    set_seed(42)
    train_set, eval_set, test_set = map(EnlargedDigits, load_datasets())
    model = create_model(model_name, pretrained)

    freezer = ModelFreezer(model, freeze_batch_norms=True)
    freezer.freeze()  # all layer groups except the last one, the new head
    optimizer = torch.optim.AdamW(freezer.get_trainable_parameters(), lr=1e-2)
    trainer = Trainer(model, loss_func=nn.CrossEntropyLoss(), optimizer=optimizer)

    def train_on(**kwargs):
        num_trained = sum(parameter.numel() for parameter in freezer.get_trainable_parameters())
        num_all = sum(parameter.numel() for parameter in model.parameters())
        trainer.print(f"\nTraining {num_trained:,} of {num_all:,} parameters")
        trainer.train(train_set, num_epochs, eval_dataset=eval_set, per_device_batch_size=batch_size, **kwargs)

    train_on()
    trainer.save_checkpoint(output_dir / "only_head.pt")

    for param_group in freezer.unfreeze().values():
        optimizer.add_param_group({**param_group, "lr": 1e-3})
    train_on(reset_run_history=False)  # continues the epoch numbers
    trainer.save_checkpoint(output_dir / "whole_model.pt")

    predictions = trainer.predict(test_set, per_device_batch_size=batch_size).argmax(dim=1)
    accuracy = (predictions == torch.tensor([label for _, label in test_set])).float().mean()
    trainer.print(f"\nAccuracy on held-out digits: {accuracy:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-name", default="resnet10t")
    parser.add_argument("--pretrained", action="store_true", help="download weights trained on ImageNet")
    parser.add_argument("--num-epochs", type=int, default=2, help="epochs for the head, and again for the whole model")
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--output-dir", type=Path, default="outputs/transfer_learning")
    main(**vars(parser.parse_args()))
