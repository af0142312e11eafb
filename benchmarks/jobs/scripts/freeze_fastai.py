from data import accuracy_of, digit_sets

train_set, eval_set = digit_sets()

# --- job ---
from fastai.vision.all import *

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
dls = DataLoaders.from_dsets(train_set, eval_set, bs=32)
splitter = lambda model: [params(model[0]), params(model[2])]  # noqa: E731
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), splitter=splitter, lr=3e-3)
learn.freeze()
learn.fit(2)
learn.unfreeze()
learn.fit(5)
print("accuracy:", accuracy_of(model))
