"""`overfit_batches`: the same few batches in every epoch, and in evaluation."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.schedulers import CosineLrScheduler

ROWS = torch.arange(20.0).reshape(20, 1)


class Recording(Trainer):
    """Notes the first column of every batch."""

    def __init__(self, **kwargs: Any) -> None:
        self.trained: list[list[float]] = []
        self.evaluated: list[list[float]] = []
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        super().__init__(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 1e-4), **{"callbacks": (), **kwargs})

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.trained.append(batch[0].flatten().tolist())
        return super().calculate_train_batch_loss(batch)

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.evaluated.append(batch[0].flatten().tolist())
        return super().calculate_eval_batch_loss(batch)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(row, row) for row in ROWS])


FIRST_TWO = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    "data",
    [(ROWS, ROWS), TensorDataset(ROWS, ROWS), DataLoader(TensorDataset(ROWS, ROWS), batch_size=3), Stream()],
    ids=["tensors", "dataset", "loader", "stream"],
)
def test_every_epoch_and_evaluation_has_the_same_first_batches(data: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Recording()
    history = trainer.train(data, 3, (ROWS + 100, ROWS), per_device_batch_size=3, overfit_batches=2)
    assert trainer.trained == FIRST_TWO * 3
    assert trainer.evaluated == FIRST_TWO * 3
    assert len(history.get_metric_values("eval_loss_epoch")) == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if "Overfitting" in line]
    assert lines == [
        "Overfitting: every epoch trains and evaluates on the first 2 batches of each rank, without shuffling"
    ]


def test_accumulation_and_the_schedule_count_the_short_epochs() -> None:
    trainer = Recording()
    trainer.train(
        (ROWS, ROWS),
        4,
        per_device_batch_size=3,
        gradient_accumulation_steps=2,
        overfit_batches=3,
        create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(
            num_warmup_epochs=0, total_num_epochs=TrainerPlaceholderValues.NUM_EPOCHS
        ),
    )
    assert trainer.run_config.num_update_steps_per_epoch == 2
    assert trainer.run_config.max_num_train_steps == trainer.run_state.updates == 8
    assert trainer.optimizer.param_groups[0]["lr"] < 1e-5


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(TensorDataset(ROWS, ROWS), batch_size=3, shuffle=True),
        DataLoader(TensorDataset(ROWS, ROWS), batch_size=3, sampler=WeightedRandomSampler([1.0] * 20, 20)),
    ],
)
def test_a_loader_that_shuffles_is_an_error(data: Any) -> None:
    with pytest.raises(ConfigurationError, match="`overfit_batches` .* but a .*RandomSampler may choose others .*Pass"):
        Recording().train(data, 1, overfit_batches=2)
