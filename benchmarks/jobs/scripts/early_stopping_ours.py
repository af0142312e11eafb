from data import accuracy_of, digits

x_train, y_train, x_test, y_test = digits()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer, callbacks

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
watch = [..., callbacks.SaveBestModelCallback(), callbacks.EarlyStoppingCallback(3)]
trainer = Trainer(model, nn.CrossEntropyLoss(), optim.AdamW(model.parameters(), 1e-2), watch)
trainer.train((x_train, y_train), 50, (x_test, y_test), per_device_batch_size=32)
print("accuracy:", accuracy_of(model))
