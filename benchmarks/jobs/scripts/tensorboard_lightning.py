from data import digit_sets, logged_accuracy

train_set, eval_set = digit_sets()

# --- job ---
from lightning.pytorch import LightningModule, Trainer
from torch import nn, optim
from torch.utils.data import DataLoader


class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_accuracy", (self.model(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self):
        return optim.AdamW(self.parameters(), 1e-2)


module = Digits()
trainer = Trainer(max_epochs=5)
train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
trainer.fit(module, train_loader, DataLoader(eval_set, batch_size=32))
print("accuracy:", logged_accuracy("lightning_logs"))
