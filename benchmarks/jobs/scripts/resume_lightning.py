from data import CrashingDigits, accuracy_of

train_set = CrashingDigits()

# --- job ---
from lightning.pytorch import LightningModule, Trainer, callbacks
from torch import nn, optim
from torch.utils.data import DataLoader


class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return optim.AdamW(self.parameters(), 1e-2)


module = Digits()
saving = callbacks.ModelCheckpoint("checkpoints", save_last=True)
trainer = Trainer(max_epochs=6, callbacks=[saving])
trainer.fit(module, DataLoader(train_set, batch_size=32, shuffle=True), ckpt_path="last")
print("accuracy:", accuracy_of(module.model))
