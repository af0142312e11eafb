from data import digit_sets, logged_accuracy

train_set, eval_set = digit_sets()

# --- job ---
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.vision.all import *

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
dls = DataLoaders.from_dsets(train_set, eval_set, bs=32)
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), lr=1e-2, metrics=accuracy)
learn.fit(5, cbs=TensorBoardCallback("runs", trace_model=False, log_preds=False))
print("accuracy:", logged_accuracy("runs"))
