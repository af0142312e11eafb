from data import new_digits, pretrained_weights

train_set, eval_set = new_digits()
pretrained = pretrained_weights()

# --- job ---
from fastai.vision.all import *

dls = DataLoaders.from_dsets(train_set, eval_set, bs=16)
learn = vision_learner(
    dls, "resnet10t", n_out=5, loss_func=CrossEntropyLossFlat(), metrics=accuracy, **pretrained
)
learn.fine_tune(8)
print("accuracy:", learn.validate()[1])
