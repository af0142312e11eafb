from data import picture_folder, pretrained_weights

folder, pretrained = picture_folder(), pretrained_weights()

from torchvision import datasets, transforms

to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
augmented = transforms.Compose([transforms.RandomAffine(10, translate=(0.1, 0.1)), to_tensor])
train_set = datasets.ImageFolder(folder / "train", augmented)
eval_set = datasets.ImageFolder(folder / "eval", to_tensor)

# --- job ---
import timm
from torch import nn

from pytorch_accelerated.extras.recipes import fine_tune

model = timm.create_model("resnet10t", num_classes=10, **pretrained)
trainer = fine_tune(model, nn.CrossEntropyLoss(), train_set, 4, eval_set, metrics=["accuracy"])
print("accuracy:", trainer.run_history.get_latest_metric("eval_accuracy"))
