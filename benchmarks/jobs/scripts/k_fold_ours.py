from data import cancer

x, y = cancer()

# --- job ---
from sklearn.model_selection import StratifiedKFold
from torch import nn, optim

from pytorch_accelerated import Trainer
from pytorch_accelerated.extras import recipes


def make_trainer(fold):
    scale = nn.BatchNorm1d(30, affine=False)
    model = nn.Sequential(scale, nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    return Trainer(model, nn.CrossEntropyLoss(), optim.AdamW(model.parameters(), lr=1e-2))


splits = StratifiedKFold(5).split(x, y)
result = recipes.cross_validate(make_trainer, (x, y), splits, 10, per_device_batch_size=32)
print("accuracy:", (result.predictions.argmax(dim=1).numpy() == y).mean())
