"""Train a small convolutional network on MNIST, which torchvision downloads the first time.

In one process, in two, and as accelerate is configured:

    python examples/train_mnist.py
    python -m torch.distributed.run --nproc-per-node 2 examples/train_mnist.py
    accelerate launch --config_file config.yaml examples/train_mnist.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import random_split
from torchvision import transforms
from torchvision.datasets import MNIST

from pytorch_accelerated import Trainer, set_seed
from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, SaveBestModelCallback
from pytorch_accelerated.utils import local_process_zero_first


@local_process_zero_first  # one process downloads the files, the others find them
def load_mnist(data_dir, train):
    to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    return MNIST(data_dir, train=train, transform=to_tensor, download=True)


class MnistNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images):
        return self.classifier(self.features(images))


def main(data_dir, num_epochs, batch_size, save_path):
    set_seed(42)  # before the split, so that all processes split the same way
    dataset = load_mnist(data_dir, train=True)
    train_set, validation_set = random_split(dataset, [0.9, 0.1])
    test_set = load_mnist(data_dir, train=False)
    model = MnistNet()

    trainer = Trainer(
        model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        callbacks=[*DEFAULT_CALLBACKS, SaveBestModelCallback(save_path)],
    )
    trainer.train(train_set, num_epochs, eval_dataset=validation_set, per_device_batch_size=batch_size)
    trainer.evaluate(test_set, per_device_batch_size=batch_size)  # with the best weights, which have been loaded

    predictions = trainer.predict(test_set, per_device_batch_size=batch_size).argmax(dim=1)
    accuracy = (predictions == test_set.targets).float().mean()
    trainer.print(f"Test accuracy: {accuracy:.1%}. The best model is in {save_path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="data", help="folder with MNIST, or to download it to")
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--save-path", default="outputs/mnist/best_model.pt")
    main(**vars(parser.parse_args()))
