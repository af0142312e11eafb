from data import accuracy_of, digit_sets

train_set, _ = digit_sets()

# --- job ---
from torch import nn, optim
from torch.utils.data import DataLoader

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
hidden = [model[0].weight, model[2].weight]
others = [model[0].bias, model[2].bias, *model[4].parameters()]
optimizers = [optim.Muon(hidden, 0.02), optim.AdamW(others, 3e-3)]
loader = DataLoader(train_set, batch_size=32, shuffle=True)
for _ in range(5):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
print("accuracy:", accuracy_of(model))
