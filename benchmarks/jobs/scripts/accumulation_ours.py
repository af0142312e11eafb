from data import accuracy_of, digit_sets

train_set, _ = digit_sets()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = optim.AdamW(model.parameters(), 1e-2)
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, mixed_precision="bf16")
trainer.train(train_set, 10, None, 32, gradient_accumulation_steps=4, gradient_clip_norm=1.0)
print("accuracy:", accuracy_of(model))
