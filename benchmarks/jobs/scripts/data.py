"""What the scripts start from: data, weights to fine-tune, a run that crashes.

It is the same for both sides, and not counted. The seeds are set here, too.
"""

import atexit
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("MPLBACKEND", "agg")
sys.path.append(str(Path(__file__).parents[3]))

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from pytorch_accelerated import set_seed
from tests.support import torchvision_on_cpu

warnings.filterwarnings("ignore")
torchvision_on_cpu.install()
torch.set_num_threads(1)
set_seed(0)  # torch, numpy and random; all libraries draw from these

NUM_TRAINED = 1200


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows of pixels and digits to train on, and others to evaluate on."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = (data.data / 16).astype(np.float32), data.target.astype(np.int64)
    return x[:NUM_TRAINED], y[:NUM_TRAINED], x[NUM_TRAINED:], y[NUM_TRAINED:]


def digit_tensors() -> tuple[torch.Tensor, ...]:
    """The same as tensors."""
    return tuple(map(torch.from_numpy, digits()))


def digit_sets() -> tuple[TensorDataset, TensorDataset]:
    """The same as datasets of torch."""
    x_train, y_train, x_test, y_test = digit_tensors()
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def accuracy_of(model: Any) -> float:
    """The share of the digits to evaluate on that a model, called with a tensor, gets right."""
    _, _, x, y = digit_tensors()
    if isinstance(model, nn.Module):
        model.eval()
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).float().mean())


def diabetes() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Inputs and targets of a regression, scaled by what the rows to train on have."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    order = np.random.default_rng(0).permutation(len(data.data))
    train, test = order[:350], order[350:]
    x, y = data.data, data.target[:, None]
    x, y = (
        (x - x[train].mean(axis=0)) / x[train].std(axis=0),
        (y - y[train].mean()) / y[train].std(),
    )
    x, y = x.astype(np.float32), y.astype(np.float32)
    return x[train], y[train], x[test], y[test]


def cancer() -> tuple[np.ndarray, np.ndarray]:
    """Inputs, not scaled, and two classes."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    return data.data.astype(np.float32), data.target.astype(np.int64)


def rare_digit() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Two classes: a digit that looks like others, and the nine others."""
    x_train, y_train, x_test, y_test = digits()
    return x_train, (y_train == 8).astype(np.int64), x_test, (y_test == 8).astype(np.int64)


def table() -> tuple[Any, list[str], list[str], list[int]]:
    """A table with the column ``kind`` to predict, and the rows to evaluate on.

    In between, the names of the columns of categories and of numbers, which have gaps.
    """
    import pandas as pd
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer(as_frame=True)
    numbers = [
        "mean texture",
        "mean smoothness",
        "mean compactness",
        "mean symmetry",
        "worst texture",
    ]
    frame = data.data[numbers].copy()
    for name, column in {"size": "mean area", "edge": "mean concavity"}.items():
        labels = ["small", "medium", "large", "huge"]
        frame[name] = pd.qcut(data.data[column], 4, labels=labels).astype(object)
    frame["kind"] = data.target.map({0: "malignant", 1: "benign"}).astype(object)
    random = np.random.default_rng(0)
    for name in [*numbers, "size", "edge"]:
        frame.loc[random.random(len(frame)) < 0.1, name] = np.nan if name in numbers else None
    return frame, ["size", "edge"], numbers, list(range(0, len(frame), 4))


def picture_folder() -> Path:
    """A folder with ``train`` and ``eval``, and in each a folder of pictures for each digit."""
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    for number, (image, label) in enumerate(zip(data.images[:600], data.target[:600], strict=True)):
        folder = Path("pictures", "eval" if number % 4 == 0 else "train", f"digit {label}")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15.9).astype("uint8")).convert("RGB").resize((32, 32)).save(
            folder / f"{number}.png"
        )
    return Path("pictures")


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Digits as RGB pictures of 32 times 32 pixels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images[:, None] / 8 - 1, dtype=torch.float32)
    images = (
        nn.functional.interpolate(images, size=(32, 32), mode="bilinear")
        .expand(-1, 3, -1, -1)
        .contiguous()
    )
    return images, torch.tensor(data.target)


def new_digits() -> tuple[TensorDataset, TensorDataset]:
    """Pictures of the digits 5 to 9: a hundred to train on, others to evaluate on."""
    images, labels = pictures()
    images, labels = images[labels > 4], labels[labels > 4] - 5
    return TensorDataset(images[:100], labels[:100]), TensorDataset(
        images[100:400], labels[100:400]
    )


def pretrained_weights() -> dict[str, Any]:
    """Arguments of timm instead of ``pretrained=True``, which would download weights.

    They name those of a resnet10t that was trained on pictures of the digits 0 to 4.
    """
    import timm

    path = Path("resnet10t.pt")
    images, labels = pictures()
    images, labels = images[labels < 5], labels[labels < 5]
    model = timm.create_model("resnet10t", num_classes=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(2):
        for rows in torch.randperm(len(images))[:640].split(32):
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(model.state_dict(), path)
    return {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}}


class CrashingDigits(Dataset):
    """Digits to train on. At the read of row number 4,000, in the fourth epoch, the first run dies.

    How many rows a process has read is in the file ``rows_read.txt``.
    """

    def __init__(self) -> None:
        self.x, self.y, _, _ = digit_tensors()
        self.rows_read = 0
        self.is_first_run = not Path("rows_read.txt").exists()
        atexit.register(lambda: Path("rows_read.txt").write_text(str(self.rows_read)))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows_read += 1
        if self.is_first_run and self.rows_read == 4000:
            Path("rows_read.txt").write_text(str(self.rows_read))
            os.kill(os.getpid(), signal.SIGKILL)
        return self.x[index], self.y[index]


def rare_digit_tensors() -> tuple[torch.Tensor, ...]:
    """The two classes as tensors."""
    return tuple(map(torch.from_numpy, rare_digit()))


def balanced_accuracy_of(scores: Any) -> float:
    """The mean over the two classes of the share of its rows that scores get right."""
    from sklearn.metrics import balanced_accuracy_score

    return float(balanced_accuracy_score(rare_digit()[3], np.asarray(scores).argmax(axis=1)))


def accuracy_of_probabilities(probabilities: Any) -> float:
    """The accuracy of probabilities of the digits to evaluate on, in their order."""
    rows = np.asarray(probabilities)
    assert rows.shape == (597, 10)
    assert rows.min() >= 0
    assert np.allclose(rows.sum(axis=1), 1, atol=1e-4)
    return float((rows.argmax(axis=1) == digits()[3]).mean())


def accuracy_of_onnx(path: str) -> float:
    """The accuracy of a model in a file, by another runtime."""
    import onnxruntime

    _, _, x, y = digits()
    session = onnxruntime.InferenceSession(path)
    (scores,) = session.run(None, {session.get_inputs()[0].name: x})
    return float((scores.argmax(axis=1) == y).mean())


def logged_accuracy(folder: str) -> float:
    """The last accuracy on held-out rows that TensorBoard shows of the run in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = {}
    for path in {path.parent for path in Path(folder).rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(path)).Reload()
        curves.update({name: events.Scalars(name) for name in events.Tags()["scalars"]})
    assert any("loss" in name for name in curves), list(curves)
    (name,) = [name for name in curves if name.endswith("accuracy") and "train" not in name]
    return float(curves[name][-1].value)


def likeness(generator: Any) -> float:
    """How much like digits is what a generator makes of 16 random numbers.

    It is the correlation, over pixels, of the means, or of the standard deviations if that is less.
    """
    real = digit_tensors()[0]
    with torch.no_grad():
        made = generator(torch.randn(1000, 16)).reshape(1000, 64)
    pairs = [(real.mean(0), made.mean(0)), (real.std(0), made.std(0))]
    return min(float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in pairs)


def files_in(folder: str) -> int:
    """How many files of runs are in a folder."""
    return sum(
        path.is_file() and ("tfevents" in path.name or path.suffix == ".html")
        for path in Path(folder).rglob("*")
    )
