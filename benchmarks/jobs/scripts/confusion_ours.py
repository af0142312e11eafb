from data import digit_tensors

x_train, y_train, x_test, y_test = digit_tensors()

# --- job ---
from sklearn.metrics import confusion_matrix
from torch import nn, optim

from pytorch_accelerated import Trainer

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
trainer = Trainer(model, nn.CrossEntropyLoss(), optim.AdamW(model.parameters(), 1e-2))
trainer.train((x_train, y_train), 5, per_device_batch_size=32)
scores = trainer.predict(x_test)
matrix = confusion_matrix(y_test, scores.argmax(dim=1))
worst = nn.functional.cross_entropy(scores, y_test, reduction="none").topk(9)
print(matrix, worst.indices, worst.values)
print("accuracy:", matrix.trace() / matrix.sum())
