from data import diabetes

x_train, y_train, x_test, y_test = diabetes()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer

model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
trainer = Trainer(model, nn.MSELoss(), optim.AdamW(model.parameters(), 1e-3), metrics=["r2"])
history = trainer.train((x_train, y_train), 30, (x_test, y_test), per_device_batch_size=32)
print("R2:", history.get_latest_metric("eval_r2"))
