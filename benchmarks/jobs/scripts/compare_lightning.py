from data import digit_sets, files_in

train_set, eval_set = digit_sets()

# --- job ---
from lightning.pytorch import LightningModule, Trainer, loggers
from torch import nn, optim
from torch.utils.data import DataLoader


class Digits(LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(x), y))

    def configure_optimizers(self):
        return optim.AdamW(self.parameters(), self.hparams.lr)


train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
for rate in (1e-3, 1e-2):
    trainer = Trainer(max_epochs=5, logger=loggers.TensorBoardLogger("runs", name=str(rate)))
    trainer.fit(Digits(rate), train_loader, DataLoader(eval_set, batch_size=32))
print("runs:", files_in("runs"))
