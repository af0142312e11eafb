"""A dataset that is changed during a run is changed for its workers too."""

import os
from typing import Any

import pytest
from torch import nn
from torch.utils.data import Dataset, Subset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.data.workers import WorkerInit
from tests.support.reference import regression_data, sgd, tiny_model


class Mosaic(Dataset[Any]):
    """Rows that are augmented as long as that is switched on, and that tell which process made them."""

    def __init__(self) -> None:
        self.inputs, self.targets = regression_data(8)
        self.options = {"augment": [True]}
        self.transform: Any = nn.Identity()

    def disable(self) -> None:
        self.options["augment"][0] = False

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        augmented = float(self.options["augment"][0])
        return self.transform(self.inputs[index]), self.targets[index], augmented, os.getpid()


class Seen(Trainer):
    """Keeps, for each epoch, whether rows were augmented and which processes they came from."""

    def train_epoch_start(self) -> None:
        super().train_epoch_start()
        self.epochs: list[tuple[set[Any], set[Any]]] = [*getattr(self, "epochs", []), (set(), set())]

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        for found, values in zip(self.epochs[-1], batch[2:], strict=True):
            found.update(values.tolist())
        return super().calculate_train_batch_loss(batch)


class DisableInEpoch(TrainerCallback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        if trainer.run_history.current_epoch == self.epoch:
            trainer.train_dataset.dataset.disable()


@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_that_a_callback_switches_off_is_off_in_workers_too(workers: int) -> None:
    trainer = Seen(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=(DisableInEpoch(3),), seed=1)
    rows = Subset(Mosaic(), range(8))
    trainer.train(rows, 4, per_device_batch_size=4, train_dataloader_kwargs={"num_workers": workers})
    assert [augmented for augmented, _ in trainer.epochs] == [{1.0}, {1.0}, {0.0}, {0.0}]
    processes = [process for _, process in trainer.epochs]
    if workers:  # they stay as long as nothing changes
        assert processes[0] == processes[1] != processes[2] == processes[3]


CHANGES: dict[str, Any] = {
    "flag": lambda dataset: setattr(dataset, "flag", True),
    "nested": lambda dataset: dataset.disable(),
    "transform": lambda dataset: setattr(dataset, "transform", nn.Identity()),
    "mode of a transform": lambda dataset: dataset.transform.eval(),
    "rows added": lambda dataset: dataset.options["augment"].append(1),
    "array replaced": lambda dataset: setattr(dataset, "inputs", dataset.inputs.clone()),
    "tensor in place": lambda dataset: dataset.inputs.add_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_noticed(change: Any) -> None:
    dataset = Subset(Mosaic(), range(8))
    init = WorkerInit(None, dataset)
    init.expect_new_workers(dataset)
    assert not init.is_outdated(dataset)
    change(dataset.dataset)
    assert init.is_outdated(dataset)
