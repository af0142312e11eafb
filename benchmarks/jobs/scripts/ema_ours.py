from data import accuracy_of, digit_sets

train_set, eval_set = digit_sets()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer, callbacks

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
ema = callbacks.ModelEmaCallback(0.98)
trainer = Trainer(model, nn.CrossEntropyLoss(), optim.AdamW(model.parameters(), 1e-2), [ema, ...])
trainer.train(train_set, 5, eval_set, per_device_batch_size=32)
print("accuracy:", accuracy_of(ema.ema_model.module))
