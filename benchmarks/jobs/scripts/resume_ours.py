from data import CrashingDigits, accuracy_of

train_set = CrashingDigits()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer, callbacks

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
saving = callbacks.SaveTrainingStateCallback("states", save_every_n_epochs=1)
optimizer = optim.AdamW(model.parameters(), 1e-2)
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, [..., saving])
trainer.train(train_set, 6, per_device_batch_size=32, resume_from="states")
print("accuracy:", accuracy_of(model))
