"""Evaluation sets and their loaders: what is evaluated is the dataset that was given, whatever was kept before."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface.runs import Regression, Rows, make_trainer

PERSISTENT: dict[str, Any] = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


class Constant(Rows):
    """Rows whose loss says which dataset they are of."""

    def __init__(self, label: float, size: int = 3) -> None:
        super().__init__(size)
        self.x.zero_()
        self.labels.fill_(label)


class Biased(Regression):
    """Returns its labels as its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = super().forward(x)[0]
        return (outputs,) if labels is None else (labels.mean() + 0 * outputs.sum(), outputs)


class RowsOfWorkers(Rows):
    """Rows that hold the process that fetched them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "x": torch.full((2,), float(os.getpid()))}


class Telling(Regression):
    """Notes the processes that fetched the rows it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if not self.training:
            self.seen += x[:, 0].tolist()
        return super().forward(x, labels)


@pytest.mark.fact("Evaluation: With persistent workers, evaluation still uses the given dataset, never an earlier one")
def test_the_given_dataset_is_evaluated(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, parts={"model": Biased(), "eval_dataset": Constant(0.5)}, **PERSISTENT)
    for label in range(1, 13):  # each set is gone when the next one is made, which may get its address
        assert trainer.evaluate(Constant(label))["eval_loss"] == label
    assert trainer.evaluate()["eval_loss"] == 0.5
    trainer.eval_dataset = Constant(7)
    assert trainer.evaluate()["eval_loss"] == 7
    for label in (1, 2):
        trainer.eval_dataset = {"one": Constant(label)}
        assert trainer.evaluate()["eval_one_loss"] == label


def test_one_set_has_one_loader_whatever_it_is_called(tmp_path: Path) -> None:
    one = Constant(1)
    trainer = make_trainer(tmp_path, parts={"eval_dataset": {"one": one}}, **PERSISTENT)
    assert trainer.get_eval_dataloader("one") is trainer.get_eval_dataloader(one)
    assert trainer.get_eval_dataloader("one") is not trainer.get_eval_dataloader(Constant(1))
    trainer.eval_dataset = one
    assert trainer.get_eval_dataloader() is trainer.get_eval_dataloader(one)


@pytest.mark.fact("Arguments: dataloader_persistent_workers keeps the evaluation workers until training ends")
def test_the_workers_of_evaluations_stay_during_a_training(tmp_path: Path) -> None:
    pools = []
    for stays in (False, True):
        trainer = make_trainer(
            tmp_path,
            parts={"model": Telling(), "eval_dataset": RowsOfWorkers(3)},
            **{**PERSISTENT, "dataloader_persistent_workers": stays},
            eval_strategy="epoch",
            num_train_epochs=3,
        )
        trainer.train()
        assert len(trainer.model.seen) == 9
        pools.append(len(set(trainer.model.seen)))
        assert not {child.pid for child in multiprocessing.active_children()}.intersection(trainer.model.seen)
    assert pools == [3, 1]
