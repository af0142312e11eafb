from data import digits

x_train, y_train, x_test, y_test = digits()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = optim.AdamW(model.parameters(), 3e-3)
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, metrics=["accuracy", "f1", "auc"])
trainer.train((x_train, y_train), 10, (x_test, y_test), per_device_batch_size=32)
scores = trainer.evaluate()
print(scores)
print("f1:", scores["eval_f1"])
