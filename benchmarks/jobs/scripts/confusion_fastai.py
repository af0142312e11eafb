from data import digit_sets

train_set, eval_set = digit_sets()
eval_set.vocab = range(10)  # the names of the classes

# --- job ---
from fastai.vision.all import *

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
dls = DataLoaders.from_dsets(train_set, eval_set, bs=32)
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat())
learn.fit(5, 1e-2)
interpretation = ClassificationInterpretation.from_learner(learn)
matrix = interpretation.confusion_matrix()
losses, indices = interpretation.top_losses(9)[:2]
print(matrix, indices, losses)
print("accuracy:", matrix.trace() / matrix.sum())
