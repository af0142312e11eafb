from data import accuracy_of, digit_sets

train_set, _ = digit_sets()

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
averaging = callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=0.6)
trainer = Trainer(max_epochs=10, callbacks=[averaging])
trainer.fit(module, DataLoader(train_set, batch_size=32, shuffle=True))
print("accuracy:", accuracy_of(module.model))
