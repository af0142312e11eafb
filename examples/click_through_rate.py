"""Will a user click? Embeddings in plain PyTorch, judged by AUC and by the AUC within each user.

The data is synthetic: users in the same age group share a taste, every user also has an individual one, and a click
depends on taste, on how popular the item is, and on chance. Because of chance, no model can reach an AUC of 1; the
table shows the AUC of the true probabilities.

Run it, interrupt it, resume with ``--resume``, and write predictions from the newest checkpoint with ``--predict``.
"""

import argparse
import csv
from pathlib import Path

import torch
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import Dataset

from pytorch_accelerated.huggingface import (
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    get_last_checkpoint,
    set_seed,
)

NUM_USERS, NUM_NEW_USERS, NUM_ITEMS, NUM_AGE_GROUPS, TASTE_SIZE = 150, 50, 100, 6, 4


class Impressions(Dataset):
    """Items shown to users, as dicts; the label is 1 for a click."""

    def __init__(self, columns, chance):
        self.columns = columns
        self.chance = chance  # the true probability of a click; hidden from the model

    def __len__(self):
        return len(self.chance)

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}


def make_datasets(size=20000):
    """One dataset for training, and two for evaluation: later impressions of the same users, and of users not in
    training.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    age_group = torch.randint(NUM_AGE_GROUPS, (NUM_USERS + NUM_NEW_USERS,), generator=generator)
    user_taste = normal(NUM_AGE_GROUPS, TASTE_SIZE)[age_group] + 0.5 * normal(len(age_group), TASTE_SIZE)
    item_taste, popularity = normal(NUM_ITEMS, TASTE_SIZE), normal(NUM_ITEMS)

    def impressions(count, first_user, last_user):
        user = torch.randint(first_user, last_user, (count,), generator=generator)
        item = torch.randint(NUM_ITEMS, (count,), generator=generator)
        chance = torch.sigmoid((user_taste[user] * item_taste[item]).sum(dim=1) + popularity[item] - 2)
        columns = {"user": user, "age_group": age_group[user], "item": item}
        return Impressions({**columns, "labels": torch.bernoulli(chance, generator=generator)}, chance)

    evaluated = {
        "seen": impressions(size // 5, 0, NUM_USERS),
        "new": impressions(size // 5, NUM_USERS, NUM_USERS + NUM_NEW_USERS),
    }
    return impressions(size, 0, NUM_USERS), evaluated


class ClickModel(nn.Module):
    """A factorization machine: the taste of user and age group times that of the item."""

    main_input_name = "user"  # the input that `compute_metrics` receives

    def __init__(self, size=8):
        super().__init__()
        self.user = nn.Embedding(NUM_USERS + 1, size)  # the last row is for users not seen in training
        self.age_group = nn.Embedding(NUM_AGE_GROUPS, size)
        self.item = nn.Embedding(NUM_ITEMS, size)
        self.bias = nn.Embedding(NUM_ITEMS, 1)
        for embedding in self.children():
            nn.init.normal_(embedding.weight, std=0.1)
        nn.init.zeros_(self.user.weight)  # initially every user is a typical member of the age group

    def forward(self, user, age_group, item, labels=None):
        taste = self.user(user.clamp(max=NUM_USERS)) + self.age_group(age_group)
        logits = (taste * self.item(item)).sum(dim=1) + self.bias(item).squeeze(dim=1)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


def compute_metrics(evaluated):
    """AUC, and the mean AUC within users, weighted by their number of impressions.

    Items compete for the attention of one user, so a recommender depends on the order within each user.
    """
    scores, clicks, users = map(torch.from_numpy, (evaluated.predictions, evaluated.label_ids, evaluated.inputs))
    total = count = 0
    for user in users.unique():
        rows = users == user
        if 0 < clicks[rows].sum() < rows.sum():  # otherwise there is no pair to rank
            total += rows.sum() * roc_auc_score(clicks[rows], scores[rows])
            count += rows.sum()
    return {"auc": roc_auc_score(clicks, scores), "grouped_auc": total / count}


def train(arguments, size, resume):
    train_set, eval_sets = make_datasets(size)
    set_seed(arguments.seed)  # the trainer seeds too, but the model is created before it
    trainer = Trainer(
        ClickModel(),
        arguments,
        train_dataset=train_set,
        eval_dataset=eval_sets,
        compute_metrics=compute_metrics,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"Best of {trainer.state.epoch:g} epochs: step {trainer.state.best_global_step}")
        print(f"{'users':>8}{'clicks':>8}{'loss':>8}{'AUC':>8}{'grouped':>9}{'best possible AUC':>19}")
        for name, rows in eval_sets.items():
            loss, auc, grouped = (metrics[f"eval_{name}_{metric}"] for metric in ("loss", "auc", "grouped_auc"))
            clicks = rows.columns["labels"]
            figures = f"{clicks.mean():8.1%}{loss:8.4f}{auc:8.4f}{grouped:9.4f}"
            print(f"{name:>8}{figures}{roc_auc_score(clicks, rows.chance):19.4f}")


def predict(arguments, size):
    checkpoint = get_last_checkpoint(arguments.output_dir)
    if checkpoint is None:
        raise SystemExit(f"There is no checkpoint in {arguments.output_dir} to predict with. Train first.")
    model = ClickModel()
    model.load_state_dict(load_file(f"{checkpoint}/model.safetensors"))
    rows = make_datasets(size)[1]["new"]
    del rows.columns["labels"]  # unknown at this point
    arguments.label_names = []
    trainer = Trainer(model, arguments)
    probabilities = torch.sigmoid(torch.from_numpy(trainer.predict(rows).predictions))
    if trainer.is_world_process_zero():
        path = Path(arguments.output_dir) / "predictions.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["user", "item", "probability"])
            columns = [rows.columns["user"], rows.columns["item"], probabilities]
            writer.writerows(zip(*(column.tolist() for column in columns), strict=True))
        print(f"{len(rows)} predictions of {checkpoint} are in {path}")


def main(num_epochs, size, output_dir, resume, predict_only):
    arguments = TrainingArguments(
        output_dir,
        num_train_epochs=num_epochs,
        per_device_train_batch_size=128,
        per_device_eval_batch_size=2000,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="seen_grouped_auc",
        greater_is_better=True,
        include_for_metrics=["inputs"],
        restore_callback_states_from_checkpoint=True,  # the patience of early stopping is resumed too
    )
    if predict_only:
        predict(arguments, size)
    else:
        train(arguments, size, resume)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-epochs", type=int, default=10)
    parser.add_argument("--size", type=int, default=20000, help="impressions to train on")
    parser.add_argument("--output-dir", default="outputs/click_through_rate")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    parser.add_argument("--predict", action="store_true", dest="predict_only", help="use the newest checkpoint")
    main(**vars(parser.parse_args()))
