from data import digit_sets

train_set, eval_set = digit_sets()

# --- job ---
from fastai.vision.all import *

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
dls = DataLoaders.from_dsets(train_set, eval_set, bs=32)
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
rate = learn.lr_find(show_plot=False).valley
learn.fit_one_cycle(5, rate)
print("accuracy:", learn.validate()[1])
