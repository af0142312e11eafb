"""Batches that do not fit into memory: the run begins anew with smaller ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated.huggingface import Trainer
from tests.huggingface.runs import Regression, Rows, StopAt, everything, losses, make_trainer
from tests.support.resuming import assert_same


class Large(Regression):
    """Runs out of memory with more than three rows, in its third batch. With statistics of batches, and dropout."""

    def __init__(self, most: int = 3, error: RuntimeError | None = None) -> None:
        super().__init__(dropout=0.3)
        self.norm = nn.BatchNorm1d(2)
        self.most, self.batches = most, 0
        self.error = torch.OutOfMemoryError("no room") if error is None else error

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.batches += 1
        if self.training and len(x) > self.most and self.batches >= 3:
            raise self.error
        return super().forward(self.norm(x), labels)


def fit(folder: Path, *callbacks: Any, most: int = 3, size: int = 8, finds: bool = True, **arguments: Any) -> Trainer:
    parts: dict[str, Any] = {"model": Large(most), "train_dataset": Rows(30), **arguments.pop("parts", {})}
    return make_trainer(
        folder,
        *callbacks,
        parts=parts,
        **{
            "auto_find_batch_size": finds,
            "per_device_train_batch_size": size,
            "train_sampling_strategy": "random",
            **arguments,
        },
    )


@pytest.mark.parametrize("given", ["model", "optimizers"])
def test_a_run_that_starts_over_equals_one_with_smaller_batches(given: str, tmp_path: Path) -> None:
    def prepare(**arguments: Any) -> Trainer:
        parts: dict[str, Any] = {"model": Large()}
        if given == "optimizers":
            optimizer = torch.optim.SGD(parts["model"].parameters(), lr=0.1, momentum=0.9)
            parts["optimizers"] = (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
        return fit(tmp_path, parts=parts, **arguments)

    direct = prepare(size=2, finds=False)
    direct.train()
    trainer = prepare()
    with pytest.warns(UserWarning, match=r"Batches of . rows do not fit") as warned:
        trainer.train()
    assert [str(warning.message)[:18] for warning in warned] == ["Batches of 8 rows ", "Batches of 4 rows "]
    assert_same(everything(trainer), everything(direct))
    assert trainer.state.train_batch_size == 2
    assert trainer.args.per_device_train_batch_size == 8


def test_a_resumed_run_knows_what_fits(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", size=2, finds=False)
    whole.train()
    with pytest.warns(UserWarning, match="do not fit"):
        fit(tmp_path, StopAt(4)).train()
    resumed = fit(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.train_batch_size == 2
    assert losses(resumed) == losses(whole)
    with pytest.warns(UserWarning, match="do not fit"):
        resumed.train()  # anew, with what the arguments say
    other = fit(tmp_path, most=8, finds=False)
    other.train(resume_from_checkpoint=True)
    assert other.state.train_batch_size == 8


@pytest.mark.filterwarnings("ignore:Batches of")
def test_a_row_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        fit(tmp_path, most=0, size=2).train()
