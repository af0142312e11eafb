"""Metrics by name for every natural shape of outputs and targets, and what scikit-learn says of them."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import sklearn.metrics as theirs
import torch
from scipy.special import expit, softmax
from torch import nn
from torch.nn import functional as F

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import MetricsCallback

SIZE = 53
Oracle = dict[str, float]


class Case(NamedTuple):
    """A row of the table: what is trained on, how it is asked for, and the right values."""

    name: str
    loss: Callable[..., Any] | None
    outputs: torch.Tensor
    targets: torch.Tensor
    expected: Oracle
    asked: dict[str, Any] = {}


class Same(nn.Module):
    """Outputs that are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0 * self.nothing


def own(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that tells nothing."""
    return outputs.float().mean()


def of_two(truth: Any, scores: Any, threshold: float) -> Oracle:
    """Of classes 0 and 1 from one score."""
    truth, scores = np.asarray(truth).ravel().astype(int), np.asarray(scores, dtype=np.float64).ravel()
    found = scores > threshold
    return {
        "accuracy": theirs.accuracy_score(truth, found),
        "balanced_accuracy": theirs.balanced_accuracy_score(truth, found),
        "precision": theirs.precision_score(truth, found, zero_division=0),
        "recall": theirs.recall_score(truth, found),
        "f1": theirs.f1_score(truth, found),
        "iou": theirs.jaccard_score(truth, found),
        "auc": theirs.roc_auc_score(truth, scores),
        "average_precision": theirs.average_precision_score(truth, scores),
        "mcc": theirs.matthews_corrcoef(truth, found),
    }


def of_several(truth: Any, scores: Any, average: str = "macro") -> Oracle:
    """Of several classes from [rows, classes]."""
    truth, scores = np.asarray(truth).ravel(), np.asarray(scores, dtype=np.float64)
    found, probabilities = scores.argmax(1), softmax(scores, axis=1)
    averaged: dict[str, Any] = {"average": average, "zero_division": 0}
    one_hot = np.eye(scores.shape[1])[truth]
    return {
        "accuracy": theirs.accuracy_score(truth, found),
        "balanced_accuracy": theirs.balanced_accuracy_score(truth, found),
        "precision": theirs.precision_score(truth, found, **averaged),
        "recall": theirs.recall_score(truth, found, **averaged),
        "f1": theirs.f1_score(truth, found, **averaged),
        "iou": theirs.jaccard_score(truth, found, **averaged),
        "auc": theirs.roc_auc_score(one_hot, probabilities, average=average),
        "average_precision": theirs.average_precision_score(one_hot, probabilities, average=average),
        "mcc": theirs.matthews_corrcoef(truth, found),
    }


def of_labels(truth: Any, scores: Any, threshold: float) -> Oracle:
    """Of several labels from [rows, labels]."""
    truth, scores = np.asarray(truth).astype(int), np.asarray(scores, dtype=np.float64)
    found = (scores > threshold).astype(int)
    averaged: dict[str, Any] = {"average": "macro", "zero_division": 0}
    balanced = [theirs.balanced_accuracy_score(*pair) for pair in zip(truth.T, found.T, strict=True)]
    return {
        "accuracy": 1 - theirs.hamming_loss(truth, found),
        "balanced_accuracy": float(np.mean(balanced)),
        "precision": theirs.precision_score(truth, found, **averaged),
        "recall": theirs.recall_score(truth, found, **averaged),
        "f1": theirs.f1_score(truth, found, **averaged),
        "iou": theirs.jaccard_score(truth, found, **averaged),
        "auc": theirs.roc_auc_score(truth, scores),
        "average_precision": theirs.average_precision_score(truth, scores),
        "mcc": float(np.mean([theirs.matthews_corrcoef(*pair) for pair in zip(truth.T, found.T, strict=True)])),
    }


def of_numbers(truth: Any, found: Any) -> Oracle:
    truth, found = (np.asarray(each, dtype=np.float64).reshape(len(truth), -1) for each in (truth, found))
    return {
        "mae": theirs.mean_absolute_error(truth, found),
        "mse": theirs.mean_squared_error(truth, found),
        "rmse": theirs.root_mean_squared_error(truth, found),
        "r2": theirs.r2_score(truth, found),
    }


def without(ignored: int, truth: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of [n] and [n, ...] whose target counts."""
    counts = truth.reshape(-1) != ignored
    return truth.reshape(-1)[counts], scores.reshape(truth.numel(), *scores.shape[1:])[counts]


def cases() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rare = (torch.rand(SIZE, generator=generator) < 0.15).long()
    rare[:3] = 1
    one = normal(SIZE) + 1.5 * rare - 1
    logits = nn.BCEWithLogitsLoss()
    yield Case("one logit [N], [N] float", logits, one, rare.float(), of_two(rare, one, 0))
    yield Case("one logit [N, 1], [N, 1] float", logits, one[:, None], rare.float()[:, None], of_two(rare, one, 0))
    yield Case("one logit [N, 1], [N]", own, one[:, None], rare, of_two(rare, one, 0))
    small, large = 0.2 * one + 0.25, 200 * one
    yield Case("small logits", logits, small, rare.float(), of_two(rare, small, 0))
    yield Case("small logits, own loss", own, small, rare, of_two(rare, small, 0))
    yield Case("extreme logits", logits, large, rare.float(), of_two(rare, large, 0))
    between = one.sigmoid()
    yield Case("one probability", nn.BCELoss(), between, rare.float(), of_two(rare, between, 0.5))
    yield Case("said to be probabilities", own, between, rare, of_two(rare, between, 0.5), {"scores": "probabilities"})
    yield Case("said to be logits", own, between, rare, of_two(rare, between, 0), {"scores": "logits"})
    squashed = {"predictions": torch.sigmoid, "scores": "probabilities"}
    yield Case(
        "squashed by the user", logits, one, rare.float(), of_two(rare, expit(one.double().numpy()), 0.5), squashed
    )
    missing = rare.clone()
    missing[4:30:2] = -100
    yield Case("one logit, -100", own, one, missing, of_two(*without(-100, missing, one), 0))
    yes = {name: value for name, value in of_two(rare, one, 0).items() if name not in ("auc", "average_precision")}
    yield Case("class numbers of two", own, one, rare, yes, {"predictions": lambda outputs: outputs > 0})

    classes = torch.randint(0, 4, (SIZE,), generator=generator)
    classes[torch.rand(SIZE, generator=generator) < 0.4] = 0
    scores = normal(SIZE, 4)
    scores[torch.arange(SIZE), classes] += 1
    entropy = nn.CrossEntropyLoss()
    several = of_several(classes, scores)
    yield Case("[N, C], [N]", entropy, scores, classes, several)
    yield Case("[N, C], [N], own loss", own, scores, classes, several)
    yield Case("[N, C], [N], argmax", own, scores, classes, several, {"predictions": "argmax"})
    yield Case("extreme scores", entropy, 30 * scores, classes, of_several(classes, 30 * scores))
    yield Case(
        "log probabilities", nn.NLLLoss(), scores.log_softmax(1), classes, of_several(classes, scores.log_softmax(1))
    )
    yield Case("one-hot", entropy, scores, F.one_hot(classes, 4).float(), several)
    yield Case("shares", entropy, scores, 0.8 * F.one_hot(classes, 4).float() + 0.05, several)
    yield Case("one-hot, said", own, scores, F.one_hot(classes, 4).float(), several, {"task": "multiclass"})
    weighted = of_several(classes, scores, "weighted")
    yield Case("weighted", entropy, scores, classes, weighted, {"average": "weighted"})
    ignored = classes.clone()
    ignored[3:20:2] = 255
    known = nn.CrossEntropyLoss(ignore_index=255)
    yield Case("ignored by the loss", known, scores, ignored, of_several(*without(255, ignored, scores)))
    yield Case("ignored, said", own, scores, ignored, of_several(*without(255, ignored, scores)), {"ignore_index": 255})
    eight, of_eight = normal(SIZE, 8), torch.arange(SIZE) % 8
    top = {"top_5_accuracy": theirs.top_k_accuracy_score(of_eight.numpy(), eight.numpy(), k=5)}
    yield Case("the five highest", entropy, eight, of_eight, top)
    two = torch.stack([-one / 2, one / 2], dim=1)
    yield Case("two logits", entropy, two, rare, of_two(rare, (two[:, 1] - two[:, 0]).double(), 0))
    both = of_several(rare, two)
    both = {name: value for name, value in both.items() if name not in ("auc", "average_precision")}
    yield Case("two logits, both classes", entropy, two, rare, both, {"average": "macro"})

    dense, places = normal(SIZE, 3, 4, 5), torch.randint(0, 3, (SIZE, 4, 5), generator=generator)
    dense.scatter_add_(1, places[:, None], torch.ones(SIZE, 1, 4, 5))
    places[:, 0, :2] = 255
    rows = dense.movedim(1, -1).reshape(-1, 3)
    of_pixels = of_several(*without(255, places, rows))
    yield Case("maps [N, C, H, W]", known, dense, places, of_pixels)
    yield Case(
        "tokens [N, T, C]",
        own,
        *(tokens := (normal(SIZE, 7, 5), torch.randint(0, 5, (SIZE, 7), generator=generator))),
        of_several(tokens[1], tokens[0].reshape(-1, 5)),
    )
    square = normal(SIZE, 5, 5), torch.randint(0, 5, (SIZE, 5), generator=generator)
    yield Case(
        "tokens [N, 5, 5], said", own, *square, of_several(square[1], square[0].reshape(-1, 5)), {"classes_dim": -1}
    )
    flat = of_several(square[1], square[0].movedim(1, -1).reshape(-1, 5))
    yield Case("[N, 5, 5] of torch's loss", entropy, *square, flat)
    mask, shown = normal(SIZE, 1, 4, 5), (torch.rand(SIZE, 1, 4, 5, generator=generator) < 0.3).float()
    yield Case("masks [N, 1, H, W]", logits, mask, shown, of_two(shown, mask, 0))
    yield Case("masks [N, 1, H, W], [N, H, W]", own, mask, shown[:, 0].long(), of_two(shown, mask, 0))
    yield Case("masks [N, H, W]", logits, mask[:, 0], shown[:, 0], of_two(shown, mask, 0), {"task": "binary"})

    labels = (torch.rand(SIZE, 5, generator=generator) < 0.2).float()
    labels[:2] = 1
    of_each = normal(SIZE, 5) + 1.5 * labels - 1
    yield Case("5 labels", logits, of_each, labels, of_labels(labels, of_each, 0))
    yield Case("5 labels, said", own, of_each, labels, of_labels(labels, of_each, 0), {"task": "labels"})
    yield Case("5 labels as numbers", logits, of_each, labels.double(), of_labels(labels, of_each, 0))
    shares = of_each.sigmoid()
    yield Case("5 labels, probabilities", nn.BCELoss(), shares, labels, of_labels(labels, shares, 0.5))

    squares = nn.MSELoss()
    for name, shape in {
        "[N]": (),
        "[N, 1]": (1,),
        "[N, 3]": (3,),
        "series [N, T]": (6,),
        "maps [N, 1, H, W]": (1, 3, 2),
    }.items():
        truth = normal(SIZE, *shape)
        found = truth + 0.5 * normal(SIZE, *shape)
        yield Case(f"numbers {name}", squares, found, truth, of_numbers(truth, found))
    yield Case(
        "numbers [N, 1], [N]",
        own,
        found.reshape(SIZE, -1)[:, :1],
        truth.reshape(SIZE, -1)[:, 0],
        of_numbers(truth.reshape(SIZE, -1)[:, 0], found.reshape(SIZE, -1)[:, 0]),
    )
    yield Case("absolute numbers", nn.L1Loss(), found, truth, of_numbers(truth, found))


def check(batch_sizes: Sequence[int]) -> int:
    """Compare each name of each case with scikit-learn. Returns the number of values."""
    number = 0
    for case in cases():
        for batch_size in batch_sizes:
            metrics = MetricsCallback(list(case.expected), **case.asked)
            trainer = Trainer(Same(), case.loss if case.loss is not None else own, None, callbacks=[metrics])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torchmetrics, about batches without a class
                trainer.evaluate((case.outputs, case.targets), per_device_batch_size=batch_size)
            for name, value in case.expected.items():
                found = float(trainer.run_history.get_latest_metric(f"eval_{name}"))
                if not abs(found - value) <= 1e-6 * max(1, abs(value)):
                    raise AssertionError(f"{case.name}, batches of {batch_size}: {name} is {found}, not {value}")
                number += 1
    return number
