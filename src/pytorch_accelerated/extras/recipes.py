"""Jobs that take a few lines each time: cross-validation, and fine-tuning."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

from pytorch_accelerated.callbacks import DEFAULT_CALLBACKS, UnfreezeCallback
from pytorch_accelerated.data import as_array_dataset
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, DataError
from pytorch_accelerated.extras.optimizers import head_of, param_groups
from pytorch_accelerated.facts.trees import merged
from pytorch_accelerated.ranks import listed
from pytorch_accelerated.record.text import aligned, format_number, table_of_rows
from pytorch_accelerated.schedulers import one_cycle
from pytorch_accelerated.trainer import Trainer

if TYPE_CHECKING:
    from pytorch_accelerated.tracking import RunHistory


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

    def _table(self) -> list[dict[str, str]]:
        folds = [{name: each.latest_record(name) for name in each.get_metric_names()} for each in self.histories]
        numbers = [{name: each.value for name, each in fold.items() if each and each.is_scalar} for fold in folds]
        names = [name for name in numbers[0] if all(name in fold for fold in numbers)]
        table = {name: [fold[name] for fold in numbers] for name in names}
        ends: dict[str, Callable[[list[float]], Any]] = {
            "mean": np.mean,
            "deviation": functools.partial(np.std, ddof=1),
        }
        rows = [(str(fold), {name: column[fold] for name, column in table.items()}) for fold in range(len(numbers))]
        rows += [(title, {name: end(column) for name, column in table.items()}) for title, end in ends.items()]
        return [{"fold": title, **{name: format_number(value) for name, value in row.items()}} for title, row in rows]

    def __str__(self) -> str:
        """A table with the last values of each fold, and their mean and standard deviation."""
        rows = self._table()
        return "\n".join(aligned([list(rows[0]), *(list(row.values()) for row in rows)]))

    def _repr_html_(self) -> str:
        """The same table for notebooks."""
        return table_of_rows(self._table())


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
        train_arguments: further ones of `Trainer.train`; the held-out rows are the evaluation set. In a path for
            `resume_from`, ``{fold}`` stands for the number of the fold: ``resume_from="states/{fold}"``.

    Returns:
        Predictions, histories and trainers.

    Raises:
        TypeError: if `splits` is a splitter, not what it returns, or `eval_dataset` is given.
        ConfigurationError: if all folds would resume from one folder, or train the same parameters.
        DataError: if the folds do not hold out each row exactly once.
    """
    resume_from = train_arguments.pop("resume_from", None)
    if resume_from is not None and "{fold}" not in str(resume_from):
        raise ConfigurationError(
            f"All folds would resume from {str(resume_from)!r}, and know the rows that they hold out. Give each fold a "
            'folder of its own: save to f"states/{fold}" in `make_trainer`, and pass resume_from="states/{fold}".'
        )
    if not isinstance(splits, Iterable):
        raise ArgumentTypeError(f"`splits` is {splits!r}: pass what a splitter returns, `KFold(5).split(inputs)`.")
    arrays = as_array_dataset(dataset)
    rows = dataset if arrays is None else arrays
    folds = [(np.asarray(train).tolist(), np.asarray(held_out).tolist()) for train, held_out in splits]
    order = list(itertools.chain.from_iterable(held_out for _, held_out in folds))
    if sorted(order) != list(range(len(rows))):
        raise DataError(
            f"The folds hold out {len(order)} rows, {len(set(order))} different ones, but the dataset has {len(rows)}: "
            "each must be held out once. Use a splitter such as KFold or StratifiedKFold."
        )
    trainers: list[Trainer] = []
    histories, predictions = [], []
    for number, (train, held_out) in enumerate(folds):
        trainer = make_trainer(number)
        _refuse_shared(trainer, trainers)
        unseen = Subset(rows, held_out)
        state = None if resume_from is None else str(resume_from).replace("{fold}", str(number))
        history = trainer.train(Subset(rows, train), num_epochs, unseen, resume_from=state, **train_arguments)
        histories.append(history)
        size = train_arguments.get("per_device_batch_size", 8)
        predictions.append(trainer.predict(unseen, per_device_batch_size=size))
        trainers.append(trainer)
    place = torch.argsort(torch.tensor(order))
    return CrossValidation(merged(lambda parts: torch.cat(parts)[place], predictions), histories, trainers)


def _refuse_shared(trainer: Trainer, earlier: Sequence[Trainer]) -> None:
    """Reject a fold whose model has learned from the rows that it holds out."""
    known = {id(each) for other in earlier for each in other.get_model().parameters()}
    shared = [name for name, each in trainer.get_model().named_parameters() if id(each) in known]
    if shared:
        raise ConfigurationError(
            f"Two folds share the parameters {listed(shared)}, so the second has seen the rows that it holds out. Make "
            "the model within `make_trainer`, a new one for each fold."
        )


def fine_tune(
    model: nn.Module,
    loss_func: Callable[..., Any] | None,
    train_dataset: Any,
    num_epochs: int,
    eval_dataset: Any = None,
    *,
    head: str | None = None,
    freeze_epochs: int = 1,
    lr: float = 2e-3,
    layer_decay: float = 0.75,
    weight_decay: float = 0.01,
    callbacks: Iterable[Any] = DEFAULT_CALLBACKS,
    metrics: Any = None,
    seed: int | None = None,
    **train_arguments: Any,
) -> Trainer:
    """Train a model whose head is new: the head first, then all of it, with lower rates for earlier layers.

    ::

        model = torchvision.models.resnet18(weights="DEFAULT")
        model.fc = nn.Linear(512, 10)
        trainer = fine_tune(model, nn.CrossEntropyLoss(), train_set, 5, eval_set, per_device_batch_size=64)

    One run of AdamW with `one_cycle`, so that it can be resumed, watched and saved like any other. Must be called by
    all ranks.

    Args:
        model: the model.
        loss_func, train_dataset, eval_dataset: see `Trainer`.
        num_epochs: in which all is trained, after `freeze_epochs`.
        head: a regular expression for the names of the parameters of the head. Default: what timm's `get_classifier`
            returns, the last layer of an `nn.Sequential`, or the only child that is called as heads are, such as "fc",
            "head" or "classifier". What is taken is printed.
        freeze_epochs: the epochs before, in which only the head is trained.
        lr: the highest learning rate of the last layer.
        layer_decay: the rate of a layer as a multiple of the next layer's; see `param_groups`.
        weight_decay: of AdamW, for all but biases and norms.
        callbacks, metrics, seed: see `Trainer`.
        train_arguments: further ones of `Trainer.train`.

    Returns:
        The trainer, after its run.

    Raises:
        ConfigurationError: if nothing says which part of the model is the head.
    """
    if head is None:
        head = f"^{re.escape(head_of(model))}([.]|$)"
    groups = param_groups(model, lr=lr, no_decay=True, layer_decay=layer_decay)
    optimizer = torch.optim.AdamW(groups, weight_decay=weight_decay)
    stages = {1: head, freeze_epochs + 1: "."} if freeze_epochs else {1: "."}
    trainer = Trainer(model, loss_func, optimizer, [UnfreezeCallback(stages), *callbacks], metrics=metrics, seed=seed)
    of_head = [name for name, _ in model.named_parameters() if re.search(head, name)]
    layers = len({group["lr"] for group in groups})
    rates = [group["lr"] for group in groups]
    trainer.print(f"The head is {listed(of_head)}; {layers} learning rates, from {min(rates):.1e} to {lr:.1e}")
    settings = {"create_scheduler_fn": one_cycle(), **train_arguments}
    trainer.train(train_dataset, freeze_epochs + num_epochs, eval_dataset, **settings)
    return trainer
