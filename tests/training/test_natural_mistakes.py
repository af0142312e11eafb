"""The mistakes that everybody makes in the first hour: each is found early, and the words say what to do instead."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
)
from pytorch_accelerated.errors import ArgumentTypeError, DataError

INPUTS = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(12) % 2
DATA = (INPUTS, LABELS)
TEXTS = np.array(["cat", "dog"] * 6)


def trainer(callbacks: Any = (), model: nn.Module | None = None, base: type[Trainer] = Trainer, **more: Any) -> Any:
    torch.manual_seed(0)
    model = model or nn.Linear(3, 2)
    return base(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks, **more)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "fit": (lambda: trainer().fit(DATA, 1), AttributeError, "'Trainer' object has no attribute 'fit'"),
    "lr": (lambda: trainer().train(DATA, 1, lr=0.1), TypeError, "unexpected keyword argument 'lr'"),
    "one callback": (
        lambda: trainer(EarlyStoppingCallback(3)),
        ArgumentTypeError,
        "`callbacks` is one EarlyStoppingCallback: pass a list of callbacks, such as `[..., callback]`",
    ),
    "one class": (
        lambda: trainer(EarlyStoppingCallback),
        ArgumentTypeError,
        "`callbacks` is one EarlyStoppingCallback:",
    ),
    "inputs and targets": (
        lambda: trainer().train(INPUTS, LABELS),
        ArgumentTypeError,
        "`num_epochs` is int64 [12] on cpu, values from 0 to 1: pass a whole number of at least 1. Inputs and targets "
        "are one dataset: `train((inputs, targets), num_epochs)`.",
    ),
    "labels as a list": (lambda: trainer().train((INPUTS, LABELS.tolist()), 1), DataError, "`torch.tensor(labels)`"),
    "labels as texts": (
        lambda: trainer().train((INPUTS, ["cat", "dog"] * 6), 1),
        DataError,
        "`np.unique(labels, return",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_by_what_to_do(name: str) -> None:
    make, kind, words = MISTAKES[name]
    with pytest.raises(kind) as caught:
        make()
    assert words in str(caught.value)
    assert "tensor(" not in str(caught.value).replace("torch.tensor(labels)", "")  # no printed values
    assert len(str(caught.value)) < 400


IN_A_BATCH: dict[str, tuple[Callable[[], Any], str]] = {
    "images without Flatten": (lambda: trainer().train((torch.zeros(12, 1, 8, 8), LABELS), 1), "`nn.Flatten()`"),
    "one feature": (
        lambda: trainer(model=nn.Linear(1, 2)).train((torch.zeros(12), LABELS), 1),
        "a single feature is [samples, 1]",
    ),
    "an array of texts": (lambda: trainer().train((INPUTS, TEXTS), 1), "`np.unique(labels, return_inverse=True)[1]`"),
    "an array of objects": (lambda: trainer().train((INPUTS, TEXTS.astype(object)), 1), "`np.unique(labels"),
}


@pytest.mark.parametrize("name", IN_A_BATCH)
def test_the_note_of_a_failed_batch_has_the_place_then_the_cause_then_the_batch(name: str) -> None:
    make, cause = IN_A_BATCH[name]
    with pytest.raises((RuntimeError, TypeError)) as caught:
        make()
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    place, why, batch = note.splitlines()
    assert place.endswith("epoch 1, update 1 of the run, batch 1 of the epoch.")
    assert why.startswith("The usual cause: ")
    assert cause in why
    assert batch.startswith("The batch: ")
