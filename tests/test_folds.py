"""Cross-validation, compared with folds by hand."""

from typing import Any

import pytest
import torch
from sklearn.model_selection import KFold, ShuffleSplit
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import DataError
from pytorch_accelerated.folds import cross_validate

INPUTS = torch.randn(23, 3, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)


def make_trainer(fold: int) -> Trainer:
    torch.manual_seed(fold)
    model = nn.Linear(3, 1)
    return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=(), seed=fold)


@pytest.mark.parametrize("dataset", [(INPUTS, TARGETS), TensorDataset(INPUTS, TARGETS)], ids=["arrays", "dataset"])
def test_each_row_is_predicted_by_the_model_that_has_not_seen_it(dataset: Any) -> None:
    folds = list(KFold(4, shuffle=True, random_state=1).split(INPUTS))
    result = cross_validate(make_trainer, dataset, folds, 2, per_device_batch_size=5)
    assert result.predictions.shape == (23, 1)
    for number, (train, held_out) in enumerate(folds):
        trainer = make_trainer(number)
        history = trainer.train((INPUTS[train], TARGETS[train]), 2, (INPUTS[held_out], TARGETS[held_out]), 5)
        torch.testing.assert_close(result.predictions[held_out], trainer.predict(INPUTS[held_out]))
        losses = result.histories[number].get_metric_values("eval_loss_epoch")
        assert losses == pytest.approx(history.get_metric_values("eval_loss_epoch"), rel=1e-6)


def test_predictions_keep_their_structure() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"rows": inputs[:, 0], "outputs": self.linear(inputs)}

    def make(fold: int) -> Trainer:
        model = Both()
        loss = lambda outputs, targets: nn.functional.mse_loss(outputs["outputs"], targets)  # noqa: E731
        return Trainer(model, loss, torch.optim.SGD(model.parameters(), 0.1), callbacks=())

    result = cross_validate(make, (INPUTS, TARGETS), KFold(3, shuffle=True, random_state=0).split(INPUTS), 1)
    assert torch.equal(result.predictions["rows"], INPUTS[:, 0])


def test_folds_that_do_not_hold_out_each_row_once_are_refused() -> None:
    with pytest.raises(DataError, match="each must be held out once"):
        cross_validate(make_trainer, (INPUTS, TARGETS), ShuffleSplit(3, random_state=0).split(INPUTS), 1)
