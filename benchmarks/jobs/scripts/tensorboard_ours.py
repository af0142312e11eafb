from data import digit_sets, logged_accuracy

train_set, eval_set = digit_sets()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer, callbacks

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer, tracker = optim.AdamW(model.parameters(), 1e-2), callbacks.TrackerCallback("tensorboard")
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, [tracker, ...], metrics=["accuracy"])
trainer.train(train_set, 5, eval_set, per_device_batch_size=32)
print("accuracy:", logged_accuracy("runs"))
