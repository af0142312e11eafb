from data import digit_sets

train_set, eval_set = digit_sets()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer, schedulers

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = optim.AdamW(model.parameters())
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, metrics=["accuracy"])
rate = trainer.find_lr(train_set, per_device_batch_size=32).suggestion
trainer.train(train_set, 5, eval_set, 32, create_scheduler_fn=schedulers.one_cycle(rate))
print("accuracy:", trainer.evaluate()["eval_accuracy"])
