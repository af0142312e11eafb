from data import accuracy_of, digit_sets

train_set, _ = digit_sets()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
hidden = [model[0].weight, model[2].weight]
others = [model[0].bias, model[2].bias, *model[4].parameters()]
optimizers = {"muon": optim.Muon(hidden, 0.02), "adamw": optim.AdamW(others, 3e-3)}
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizers)
trainer.train(train_set, 5, per_device_batch_size=32)
print("accuracy:", accuracy_of(model))
