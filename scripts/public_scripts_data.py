"""Small datasets in the form that public scripts expect, without a download."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

WORDS = [f"word{index}" for index in range(40)]


def mnist(folder: Path) -> None:
    """scikit-learn's digits in MNIST's format."""
    from tests.support.mnist import write_mnist

    write_mnist(folder)


def ants_and_bees(folder: Path) -> None:
    """Two classes of images, in folders for training and evaluation."""
    _image_folders(folder / "hymenoptera_data", ["ants", "bees"], {"train": 12, "val": 4})


def imagenette(folder: Path) -> None:
    """Three classes of images, in folders for training and evaluation."""
    _image_folders(folder / "imagenette2-320", ["n01", "n02", "n03"], {"train": 16, "val": 4})


def pets(folder: Path) -> None:
    """Images whose names begin with their class."""
    images = folder / "pets" / "images"
    images.mkdir(parents=True)
    for label, name in enumerate(["abyssinian", "beagle"]):
        for index in range(20):
            _image(images / f"{name}_{index}.jpg", label)


def cars(folder: Path) -> None:
    """Images, some of them with a box, and a table of the boxes."""
    images = folder / "cars" / "training_images"
    images.mkdir(parents=True)
    rows = ["image,xmin,ymin,xmax,ymax"]
    for index in range(10):
        name = f"car_{index:02}.jpg"
        _image(images / name, index % 3, size=64)
        if index % 5:
            rows.append(f"{name},{8 + index},10,{30 + index},40")
    (folder / "cars" / "annotations.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def glue(folder: Path) -> None:
    """Pairs of sentences with or without the same meaning, a tiny BERT, and a metric."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    rows = random.Random(0)
    (folder / "mrpc").mkdir(parents=True)
    for split, size in {"train": 48, "validation": 12}.items():
        lines = [json.dumps(_sentence_pair(rows, index)) for index in range(size)]
        (folder / "mrpc" / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    model = folder / "tiny-bert"
    model.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (model / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizerFast(vocab=str(model / "vocab.txt"), do_lower_case=False).save_pretrained(model)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)  # each package gets a folder of its own
    BertForSequenceClassification(config).save_pretrained(model)

    metric = folder / "glue_metric"
    metric.mkdir()
    (metric / "glue_metric.py").write_text(_METRIC, encoding="utf-8")


_METRIC = '''"""The share of predictions that are right."""

import datasets
import evaluate


class GlueMetric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(int(one == other) for one, other in zip(predictions, references))
        return {"accuracy": right / len(references)}
'''


def _sentence_pair(rows: random.Random, index: int) -> dict[str, object]:
    first = [rows.choice(WORDS) for _ in range(rows.randint(3, 8))]
    is_same = index % 2
    second = rows.sample(first, len(first)) if is_same else [rows.choice(WORDS) for _ in first]
    return {"sentence1": " ".join(first), "sentence2": " ".join(second), "label": is_same, "idx": index}


def _image_folders(folder: Path, classes: list[str], sizes: dict[str, int]) -> None:
    for split, size in sizes.items():
        for label, name in enumerate(classes):
            images = folder / split / name
            images.mkdir(parents=True)
            for index in range(size):
                _image(images / f"{index:03}.jpg", label)


def _image(path: Path, label: int, size: int = 48) -> None:
    """An image with a stripe whose position depends on the class."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(len(str(path)) + label).integers(0, 60, (size, size, 3), dtype=np.uint8)
    pixels[:, label * size // 4 : (label + 1) * size // 4, label % 3] += 150
    Image.fromarray(pixels).save(path)


MAKERS: dict[str, Callable[[Path], None]] = {
    function.__name__: function for function in (mnist, ants_and_bees, imagenette, pets, cars, glue)
}
