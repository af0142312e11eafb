from data import accuracy_of, digit_sets

train_set, _ = digit_sets()

# --- job ---
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn, optim
from torch.utils.data import DataLoader


class Digits(LightningModule):
    def __init__(self, width: int = 32, lr: float = 1e-3, batch_size: int = 32):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def train_dataloader(self):
        return DataLoader(train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def configure_optimizers(self):
        return optim.AdamW(self.parameters(), self.hparams.lr)


cli = LightningCLI(Digits)
settings = cli.model.hparams
print("settings:", settings.width, settings.lr, settings.batch_size, cli.trainer.max_epochs)
print("accuracy:", accuracy_of(cli.model.model))
