from data import accuracy_of, digit_sets

train_set, _ = digit_sets()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
trainer = Trainer(model, nn.CrossEntropyLoss(), optim.AdamW(model.parameters(), 1e-2))
trainer.train(train_set, 5, per_device_batch_size=16)
trainer.print("accuracy:", accuracy_of(model))
