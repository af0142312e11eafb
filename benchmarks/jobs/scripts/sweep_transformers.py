from data import digit_sets

train_set, eval_set = digit_sets()
train_set = [{"pixels": x, "labels": y} for x, y in train_set]
eval_set = [{"pixels": x, "labels": y} for x, y in eval_set]

# --- job ---
import optuna
from torch import nn
from transformers import Trainer, TrainingArguments


class Digits(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, pixels, labels):
        logits = self.layers(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_model(trial):
    return Digits(trial.suggest_int("width", 8, 128, log=True) if trial else 8)


def space(trial):
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True)}


def accuracy(evaluated):
    return {"accuracy": (evaluated.predictions.argmax(axis=1) == evaluated.label_ids).mean()}


trainer = Trainer(
    model_init=make_model,
    args=TrainingArguments(
        num_train_epochs=4, per_device_train_batch_size=32, eval_strategy="epoch"
    ),
    train_dataset=train_set,
    eval_dataset=eval_set,
    compute_metrics=accuracy,
)
best = trainer.hyperparameter_search(
    hp_space=space,
    compute_objective=lambda metrics: metrics["eval_accuracy"],
    direction="maximize",
    n_trials=12,
    backend="optuna",
    pruner=optuna.pruners.MedianPruner(3),
)
print("accuracy:", best.objective)
