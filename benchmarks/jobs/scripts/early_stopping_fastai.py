from data import accuracy_of, digit_sets

train_set, eval_set = digit_sets()

# --- job ---
from fastai.vision.all import *

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
dls = DataLoaders.from_dsets(train_set, eval_set, bs=32)
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), lr=1e-2)
learn.fit(50, cbs=[SaveModelCallback(), EarlyStoppingCallback(patience=3)])
print("accuracy:", accuracy_of(model))
