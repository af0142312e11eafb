"""Cross-validation: a model for each fold, and predictions for each row by the one that has not seen it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from pytorch_accelerated.data.rows import as_array_dataset
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.trees import merged

if TYPE_CHECKING:
    from pytorch_accelerated.tracking.history import RunHistory
    from pytorch_accelerated.trainer import Trainer


class CrossValidation(NamedTuple):
    """The result of `cross_validate`.

    Attributes:
        predictions: for each row by the model that was not trained on it, in the order of the dataset; nested tensors
            as `Trainer.predict` returns them.
        histories: the run history of each fold.
        trainers: the trainer of each fold, with its model.
    """

    predictions: Any
    histories: list[RunHistory]
    trainers: list[Trainer]


def cross_validate(
    make_trainer: Callable[[int], Trainer],
    dataset: Any,
    splits: Iterable[tuple[Sequence[int], Sequence[int]]],
    num_epochs: int | None,
    **train_arguments: Any,
) -> CrossValidation:
    """Train a model for each fold, and predict the rows that it has not seen. Must be called by all ranks.

    ::

        splits = sklearn.model_selection.StratifiedKFold(5, shuffle=True, random_state=0).split(inputs, targets)
        result = cross_validate(make_trainer, (inputs, targets), splits, num_epochs=10)

    Args:
        make_trainer: makes a trainer with a new model, from the number of the fold, counted from 0.
        dataset: a map-style dataset, or arrays, as `Trainer.train` takes them.
        splits: for each fold the rows to train on, and those to hold out, as scikit-learn's splitters give them.
        num_epochs: of each run.
        train_arguments: further ones of `Trainer.train`; the held-out rows are the evaluation set.

    Returns:
        Predictions, histories and trainers.

    Raises:
        DataError: if the folds do not hold out each row exactly once.
    """
    arrays = as_array_dataset(dataset)
    rows = dataset if arrays is None else arrays
    folds = [(np.asarray(train).tolist(), np.asarray(held_out).tolist()) for train, held_out in splits]
    order = list(itertools.chain.from_iterable(held_out for _, held_out in folds))
    if sorted(order) != list(range(len(rows))):
        raise DataError(
            f"The folds hold out {len(order)} rows, {len(set(order))} different ones, but the dataset has {len(rows)}: "
            "each must be held out once. Use a splitter such as KFold or StratifiedKFold."
        )
    trainers, histories, predictions = [], [], []
    for number, (train, held_out) in enumerate(folds):
        trainer = make_trainer(number)
        unseen = Subset(rows, held_out)
        histories.append(trainer.train(Subset(rows, train), num_epochs, unseen, **train_arguments))
        size = train_arguments.get("per_device_batch_size", 8)
        predictions.append(trainer.predict(unseen, per_device_batch_size=size))
        trainers.append(trainer)
    place = torch.argsort(torch.tensor(order))
    return CrossValidation(merged(lambda parts: torch.cat(parts)[place], predictions), histories, trainers)
