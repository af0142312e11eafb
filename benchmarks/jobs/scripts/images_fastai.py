from data import picture_folder, pretrained_weights

folder, pretrained = picture_folder(), pretrained_weights()

# --- job ---
from fastai.vision.all import *

augmented = aug_transforms(do_flip=False, max_rotate=10)
dls = ImageDataLoaders.from_folder(folder, valid="eval", batch_tfms=augmented, bs=32)
learn = vision_learner(dls, "resnet10t", metrics=accuracy, **pretrained)
learn.fine_tune(4)
print("accuracy:", learn.validate()[1])
