from data import cancer

x, y = cancer()

# --- job ---
from sklearn.model_selection import cross_val_predict
from skorch import NeuralNetClassifier
from torch import nn, optim

scale = nn.BatchNorm1d(30, affine=False)
model = nn.Sequential(scale, nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
net = NeuralNetClassifier(
    model, criterion=nn.CrossEntropyLoss, optimizer=optim.AdamW, lr=1e-2, max_epochs=20
)
predictions = cross_val_predict(net, x, y, cv=5, method="predict_proba")
print("accuracy:", (predictions.argmax(axis=1) == y).mean())
