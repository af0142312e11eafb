"""Batches and updates without a label that counts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.errors import DataError
from tests.huggingface.runs import Regression, Rows, losses, make_trainer
from tests.support.reference import assert_same_parameters


class MeanOverLabels(Regression):
    """Is told the labels of the update, and takes the mean over those of the batch all the same: NaN without any."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        outputs = self.linear(x)
        if labels is None:
            return (outputs,)
        counts = labels != -100
        return (((outputs - labels) ** 2) * counts).sum() / counts.sum(), outputs


def rows_without_labels(*without: int) -> Rows:
    rows = Rows(12)
    rows.labels[list(without)] = -100
    return rows


def run(folder: Path, *without: int, **arguments: Any) -> Any:
    parts = {"model": MeanOverLabels(), "train_dataset": rows_without_labels(*without)}
    sequential = {"train_sampling_strategy": "sequential", "optim": "sgd", "num_train_epochs": 1}
    trainer = make_trainer(folder, parts=parts, **{**sequential, **arguments})
    trainer.train()
    return trainer


@pytest.mark.fact("Training: A batch in which all labels are ignored adds nothing, even if its mean loss is NaN")
def test_a_batch_without_labels_adds_nothing_to_its_update(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 2, 3, per_device_train_batch_size=6)
    parts = run(tmp_path / "parts", 2, 3, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-6)
    assert_same_parameters(parts.model, whole.model, tolerance=1e-6)


@pytest.mark.fact("Training: An update in which all labels are ignored is an error")
def test_an_update_without_labels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="An update has no items at all"):
        run(tmp_path, *range(6, 12), per_device_train_batch_size=2, gradient_accumulation_steps=3)
