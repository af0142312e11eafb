from data import digit_sets

train_set, eval_set = digit_sets()

# --- job ---
import lightning
import optuna
from optuna_integration import PyTorchLightningPruningCallback
from torch import nn, optim
from torch.utils.data import DataLoader


class Digits(lightning.LightningModule):
    def __init__(self, width, lr):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.lr = lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self):
        return optim.AdamW(self.parameters(), self.lr)


def objective(trial):
    width = trial.suggest_int("width", 8, 128, log=True)
    module = Digits(width, trial.suggest_float("lr", 1e-5, 1e-1, log=True))
    pruning = PyTorchLightningPruningCallback(trial, monitor="accuracy")
    trainer = lightning.Trainer(max_epochs=4, callbacks=[pruning])
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    trainer.fit(module, train_loader, DataLoader(eval_set, batch_size=32))
    return trainer.callback_metrics["accuracy"].item()


study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(3))
study.optimize(objective, n_trials=12)
print("accuracy:", study.best_value)
