"""Modules are ready before a run begins."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated.callbacks.preparation import ConvertSyncBatchNormCallback, MoveModulesToDeviceCallback
from pytorch_accelerated.trainer import Trainer
from tests.support.reference import regression_data, sgd, tiny_model


class CountsMoves(nn.Module):
    """A module that counts how often it is moved."""

    moves = 0

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.moves += 1
        return super().to(*args, **kwargs)


class Loss(CountsMoves):
    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, targets)


def test_modules_of_the_trainer_are_moved_at_the_start_of_every_kind_of_run():
    data = regression_data(8)
    model = tiny_model()
    loss, teacher = Loss(), CountsMoves()
    trainer = Trainer(model, loss, sgd(model), callbacks=[MoveModulesToDeviceCallback])
    trainer.teacher = teacher  # type: ignore[attr-defined]
    trainer.train(data, 1)
    assert (loss.moves, teacher.moves) == (1, 1)
    trainer.evaluate(data)
    assert (loss.moves, teacher.moves) == (2, 2)
    trainer.predict(data)
    assert (loss.moves, teacher.moves) == (3, 3)


@pytest.mark.gpu
def test_a_loss_function_with_weights_follows_the_model_to_the_gpu():
    data = torch.randn(8, 3), torch.randint(2, (8,))
    model = nn.Linear(3, 2)
    loss_func = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0]))
    trainer = Trainer(model, loss_func, sgd(model), callbacks=[MoveModulesToDeviceCallback])
    trainer.train(data, 1)
    assert loss_func.get_buffer("weight").device.type == "cuda"


def batch_norm_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def one_of_two_gpus(model: nn.Module) -> Any:
    """The part of a trainer that matters here, in a process with a GPU of its own."""
    return SimpleNamespace(
        model=model,
        get_model=lambda: model,
        device=torch.device("cuda"),
        run_context=SimpleNamespace(parts=SimpleNamespace(ranks=SimpleNamespace(count=2, is_first=True))),
    )


def test_batch_norm_layers_are_converted_and_keep_their_parameters():
    model = batch_norm_model()
    parameters = list(model.parameters())
    trainer = one_of_two_gpus(model)
    ConvertSyncBatchNormCallback().on_init_end(trainer)
    assert isinstance(trainer.model[1], nn.SyncBatchNorm)
    assert all(old is new for old, new in zip(parameters, trainer.model.parameters(), strict=True))
