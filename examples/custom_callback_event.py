"""A custom event: a Trainer that tells its callbacks about every mistake the model makes."""

import argparse
from collections import Counter

import torch
from torch import nn
from train_digits import DigitsNet, load_datasets

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, TrainerCallback


class TrainerWithMistakes(Trainer):
    # Declaring the event avoids the warning about misspelt event names.
    custom_events = ("on_mistakes",)

    def calculate_eval_batch_loss(self, batch):
        batch_output = super().calculate_eval_batch_loss(batch)
        predictions = batch_output["model_outputs"].argmax(dim=1)
        predictions, labels = self.gather((predictions, batch[1]))  # from all processes
        is_wrong = predictions != labels
        if is_wrong.any():
            self.callback_handler.call_event(
                "on_mistakes", trainer=self, labels=labels[is_wrong], predictions=predictions[is_wrong]
            )
        return batch_output


class MistakesCallback(TrainerCallback):
    """Prints which digits are confused with which."""

    def on_eval_epoch_start(self, trainer, **kwargs):
        self.mistakes = Counter()

    def on_mistakes(self, trainer, labels, predictions, **kwargs):
        self.mistakes.update(zip(labels.tolist(), predictions.tolist(), strict=True))

    def on_training_run_end(self, trainer, **kwargs):
        trainer.print(f"Mistakes in the last evaluation: {self.mistakes.total()}")
        for (label, prediction), count in self.mistakes.most_common(5):
            trainer.print(f"  {label} taken for {prediction}: {count}")


def main(num_epochs):
    set_seed(42)
    train_set, eval_set, _ = load_datasets()
    model = DigitsNet()

    trainer = TrainerWithMistakes(
        model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        callbacks=[*DEFAULT_CALLBACKS, MistakesCallback],
    )
    trainer.train(train_set, num_epochs, eval_dataset=eval_set, per_device_batch_size=32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-epochs", type=int, default=3)
    main(**vars(parser.parse_args()))
