"""When the methods that users override are looked up: a patch of the class or the trainer is seen from then on."""

from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer


def trainer_of() -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())


def train(trainer: Trainer, **arguments: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(20, 2), torch.randn(20, 1))
    trainer.train(data, 1, per_device_batch_size=4, **arguments)


def counting(holder: Any, hook: str, calls: list[str]) -> None:
    """Replace `hook` of a trainer or class by one that also notes its name."""
    original = getattr(holder, hook)

    def noted(*args: Any) -> Any:
        calls.append(hook)
        return original(*args)

    setattr(holder, hook, noted)


def test_hooks_patched_on_the_trainer_before_a_run_count_as_overridden() -> None:
    calls: list[str] = []
    trainer = trainer_of()
    for hook in ("scheduler_step", "count_batch_items"):
        counting(trainer, hook, calls)
    train(trainer)
    assert sorted(calls) == 5 * ["count_batch_items"] + 5 * ["scheduler_step"]


def test_the_run_before_the_first_call_is_made_once() -> None:
    trainer = trainer_of()
    run = trainer.current_run
    assert trainer.current_run is run
    train(trainer)
    assert trainer.current_run is not run
    assert trainer.current_run.number == 1
