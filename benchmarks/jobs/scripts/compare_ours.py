from data import digit_sets, files_in

train_set, eval_set = digit_sets()

# --- job ---
from torch import nn, optim

from pytorch_accelerated import Trainer, callbacks

for rate in (1e-3, 1e-2):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    watch = [..., callbacks.ReportCallback(f"runs/{rate}.html")]
    trainer = Trainer(model, nn.CrossEntropyLoss(), optim.AdamW(model.parameters(), rate), watch)
    trainer.train(train_set, 5, eval_set, per_device_batch_size=32)
print("runs:", files_in("runs"))
