from data import accuracy_of, digit_sets

train_set, _ = digit_sets()

# --- job ---
from jsonargparse import auto_cli
from torch import nn, optim

from pytorch_accelerated import Trainer


def main(width: int = 32, lr: float = 1e-3, batch_size: int = 32, epochs: int = 3):
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    trainer = Trainer(model, nn.CrossEntropyLoss(), optim.AdamW(model.parameters(), lr))
    trainer.train(train_set, epochs, per_device_batch_size=batch_size)
    print("settings:", width, lr, batch_size, epochs)
    print("accuracy:", accuracy_of(model))


auto_cli(main)
