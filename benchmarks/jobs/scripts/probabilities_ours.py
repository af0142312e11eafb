from data import accuracy_of_probabilities, digits

x_train, y_train, x_new, _ = digits()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
trainer = Trainer(model, nn.CrossEntropyLoss(), optim.AdamW(model.parameters(), 1e-2))
trainer.train((x_train, y_train), 5, per_device_batch_size=32)
probabilities = trainer.predict(x_new).softmax(dim=1)
print("accuracy:", accuracy_of_probabilities(probabilities))
