"""Runs on any number of ranks: rows of an evaluation count once, and what a loss adds to its mean counts once."""

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from pytorch_accelerated import Trainer
from pytorch_accelerated.huggingface import EvalPrediction, TrainingArguments
from pytorch_accelerated.huggingface import Trainer as HuggingFaceTrainer

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
generator = torch.Generator().manual_seed(4)
INPUTS = torch.randn(26, 4, 3, dtype=torch.float64, generator=generator)  # rows, tokens, features
CLASSES = INPUTS[:, :, 0].gt(0).long()
SOME_CLASSES = CLASSES.masked_fill(torch.rand(26, 4, generator=generator) < 0.4, -100)
PENALTY = 0.3


class Scores(nn.Module):
    """Two scores for each token; returns the mean loss of the tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.linear = nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        scores = self.linear(x)
        if labels is None:
            return {"logits": scores}
        return {"loss": F.cross_entropy(scores.flatten(0, -2), labels.flatten()), "logits": scores}


class AnyKeyword(Scores):
    """Is told the number of labels, as many models of transformers are."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(x, labels)


def penalty_of(model: Any) -> torch.Tensor:
    return PENALTY * sum(each.square().sum() for each in model.parameters())  # type: ignore[no-any-return]


def by_hand(classes: torch.Tensor, per_update: int) -> Scores:
    """Each update: the mean over its tokens, and the penalty once."""
    net = Scores()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for rows in torch.arange(len(INPUTS)).split(per_update):
        (net(INPUTS[rows], classes[rows])["loss"] + penalty_of(net)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


class Counted(Trainer):
    """The number of tokens is known beforehand."""

    def count_batch_items(self, batch: Any) -> int:
        return int((batch["labels"] != -100).sum())

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        return {**output, "loss": output["loss"] + penalty_of(self.get_model())}


class CountedLate(Trainer):
    """The number of tokens is known when the loss is."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        count = (batch["labels"] != -100).sum()
        return {**output, "loss": output["loss"] + penalty_of(self.get_model()), "num_items_in_batch": count}


class Mean(HuggingFaceTrainer):
    """A loss that is declared as a mean."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True)
        loss = loss + penalty_of(self.model)
        return (loss, outputs) if return_outputs else loss


def arguments(**given: Any) -> TrainingArguments:
    return TrainingArguments(
        sys.argv[1],
        num_train_epochs=1,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        train_sampling_strategy="sequential",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **given,
    )


def check(net: Any, classes: torch.Tensor, case: str) -> None:
    expected = by_hand(classes, 3 * 2 * RANKS)
    torch.testing.assert_close(net.state_dict(), expected.state_dict(), rtol=1e-10, atol=1e-10, msg=case)


# ------------------------------------------------------------------------------------------- parts that are no means

for kind in (Counted, CountedLate):
    net: Any = Scores()
    trainer: Any = kind(net, None, torch.optim.SGD(net.parameters(), 0.1), callbacks=[])
    trainer.train(
        {"x": INPUTS, "labels": SOME_CLASSES},
        1,
        per_device_batch_size=3,
        gradient_accumulation_steps=2,
        train_dataloader_kwargs={"shuffle": False},
    )
    check(net, SOME_CLASSES, kind.__name__)
# A model that isn't told the number of labels weights batches by their rows.
for model, classes in ((Scores, CLASSES), (AnyKeyword, SOME_CLASSES)):
    net = model()
    args = arguments(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    rows = [{"x": x, "labels": labels} for x, labels in zip(INPUTS, classes, strict=True)]
    Mean(net, args, train_dataset=rows, optimizers=(torch.optim.SGD(net.parameters(), 0.1), None)).train()
    check(net, classes, model.__name__)

# --------------------------------- areal-project/AReaL#1096: training drops rows that fill no batch, an evaluation none

inputs, targets = INPUTS[:, 0], CLASSES[:, 0].clone()
targets[::3] ^= 1  # some that the model gets wrong
rows = [{"x": x, "labels": label} for x, label in zip(inputs, targets, strict=True)]
train, held_out = rows[11:], rows[:11]


def hits(net: Scores) -> float:
    return (net(inputs[:11])["logits"].argmax(-1) == targets[:11]).double().mean().item()


net = Scores()
loader: Any = DataLoader(train, batch_size=4, drop_last=True)  # type: ignore[arg-type]
trainer = Trainer(net, None, torch.optim.SGD(net.parameters(), 0.1), metrics=["accuracy"], callbacks=[])
history = trainer.train(loader, 1, held_out, eval_per_device_batch_size=4)
assert trainer.run_state.samples == len(train) // (4 * RANKS) * 4 * RANKS < len(train)
assert abs(history.get_latest_metric("eval_accuracy") - hits(net)) < 1e-12
assert 0 < hits(net) < 1


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    labels: Any = prediction.label_ids
    return {"accuracy": (prediction.predictions.argmax(-1) == labels).mean(), "rows": len(labels)}


net = Scores()
args = arguments(per_device_train_batch_size=4, per_device_eval_batch_size=4, dataloader_drop_last=True)
face = HuggingFaceTrainer(net, args, train_dataset=train, eval_dataset=held_out, compute_metrics=accuracy)
face.train()
metrics = face.evaluate()
assert metrics["eval_rows"] == 11
assert abs(metrics["eval_accuracy"] - hits(net)) < 1e-12
print("done")
