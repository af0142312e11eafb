"""A model from transformers, which computes its loss itself: batches are dicts, and there is no loss function.

A small BERT with random weights reads digits pixel by pixel, like sentences of 64 words.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.schedulers import CosineLrScheduler

NUM_SHADES = 17  # of a pixel, from 0 to 16: the words of this language


def main(num_epochs, batch_size):
    set_seed(42)  # before the split, so that it is the same in every process
    digits = load_digits()
    input_ids = torch.tensor(digits.data, dtype=torch.int64)
    labels = torch.tensor(digits.target)
    # Dicts of tensors are datasets; those of the datasets library, or any others that yield dicts, go as well.
    train_set, eval_set, test_set = (
        {"input_ids": input_ids[indices], "labels": labels[indices]}
        for indices in torch.randperm(len(labels)).split([1197, 300, 300])
    )

    config = BertConfig(
        vocab_size=NUM_SHADES,
        max_position_embeddings=input_ids.shape[1],
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
    )
    model = BertForSequenceClassification(config)

    trainer = Trainer(
        model,
        loss_func=None,  # the model returns its loss
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
    )
    trainer.train(
        train_set,
        num_epochs,
        eval_dataset=eval_set,
        per_device_batch_size=batch_size,
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
        gradient_clip_norm=1.0,
    )
    predictions = trainer.predict(test_set, per_device_batch_size=batch_size)["logits"].argmax(dim=1)
    accuracy = (predictions == test_set["labels"]).float().mean()
    trainer.print(f"Accuracy on held-out digits: {accuracy:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    main(**vars(parser.parse_args()))
