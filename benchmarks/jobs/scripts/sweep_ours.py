from data import digit_sets

train_set, eval_set = digit_sets()

# --- job ---
import optuna
from torch import nn, optim

from pytorch_accelerated import Trainer, callbacks


def objective(trial):
    width = trial.suggest_int("width", 8, 128, log=True)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = optim.AdamW(model.parameters(), trial.suggest_float("lr", 1e-5, 1e-1, log=True))
    search = callbacks.OptunaCallback(trial, "eval_accuracy")
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, [..., search], metrics=["accuracy"])
    history = trainer.train(train_set, 4, eval_set, per_device_batch_size=32)
    return history.get_latest_metric("eval_accuracy")


study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(3))
study.optimize(objective, n_trials=12)
print("accuracy:", study.best_value)
