from data import new_digits, pretrained_weights

train_set, eval_set = new_digits()
pretrained = pretrained_weights()

# --- job ---
import timm
from torch import nn

from pytorch_accelerated.extras.recipes import fine_tune

model = timm.create_model("resnet10t", num_classes=5, **pretrained)
trainer = fine_tune(model, nn.CrossEntropyLoss(), train_set, 8, eval_set, metrics=["accuracy"])
print("accuracy:", trainer.run_history.get_latest_metric("eval_accuracy"))
