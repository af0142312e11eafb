from data import accuracy_of_onnx, digits

x_train, y_train, _, _ = digits()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
trainer = Trainer(model, nn.CrossEntropyLoss(), optim.AdamW(model.parameters(), 1e-2))
trainer.train((x_train, y_train), 5, per_device_batch_size=32)
trainer.export("digits.onnx", x_train)
print("accuracy:", accuracy_of_onnx("digits.onnx"))
