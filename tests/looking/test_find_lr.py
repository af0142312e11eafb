"""The range test finds a rate that trains well, and leaves nothing behind."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TerminateOnNaNCallback, TrainerCallback
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.extras.looking.learning_rates import LearningRateTest
from tests.looking.worlds import Counting, make
from tests.support.processes import run_on_ranks
from tests.support.reference import regression_data


def test_groups_keep_their_ratios_and_rates_grow_by_a_constant_factor() -> None:
    seen = []

    class Watching(TrainerCallback):
        prepares_run = True

        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            seen.append([float(group["lr"]) for group in trainer.optimizer.param_groups])

    model = nn.Linear(3, 2).double()
    groups = [{"params": [model.weight], "lr": 0.002}, {"params": [model.bias], "lr": torch.tensor(0.01)}]
    optimizer = torch.optim.Adam(groups, capturable=False)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[Watching()])
    test = trainer.find_lr(
        regression_data(40),
        min_lr=1e-7,
        max_lr=1e-3,
        num_updates=21,
        per_device_batch_size=40,  # no noise
    )
    assert test.ratios == pytest.approx((0.2, 1.0))
    assert test.rates == pytest.approx([1e-7 * 10 ** (4 * step / 20) for step in range(21)])
    assert seen == [pytest.approx([0.2 * rate, rate]) for rate in test.rates]
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.002, 0.01])
    assert isinstance(optimizer.param_groups[1]["lr"], torch.Tensor)


def test_losses_are_the_means_of_updates() -> None:
    model = nn.Linear(3, 2).double()
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 1.0), callbacks=())
    data = regression_data(12)
    expected = nn.functional.mse_loss(model(data[0]), data[1]).item()
    test = trainer.find_lr(
        data, min_lr=1e-12, max_lr=1e-11, per_device_batch_size=5, gradient_accumulation_steps=3, num_updates=20
    )
    assert test.losses == pytest.approx([expected] * 20)
    assert test.suggestion is None
    assert not test.has_diverged
    assert "did not fall" in str(test)


def test_a_growing_loss_ends_the_search_and_users_callbacks_do_not_run() -> None:
    model = nn.Linear(3, 2).double()
    counting = Counting()
    callbacks = [counting, TerminateOnNaNCallback()]
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 1.0), callbacks=callbacks)
    inputs, _ = regression_data(40)
    test = trainer.find_lr((inputs, inputs[:, :2] * 5), max_lr=1e9, num_updates=150)
    assert test.has_diverged
    assert len(test.rates) < 150
    assert test.suggestion is not None
    assert 1e-4 < test.suggestion < 2
    assert counting.seen == []


def test_losses_that_are_not_finite_or_huge_do_not_hide_the_fall() -> None:
    rates = [10 ** (step / 10 - 6) for step in range(60)]
    falling = [2.0 - 1.5 / (1 + math.exp(-(step - 30) / 3)) for step in range(58)]
    for last in (math.inf, math.nan, 1e30):
        test = LearningRateTest(tuple(rates[:59]), (*falling, last), (1.0,), True)
        assert test.suggestion is not None
        assert rates[30] < test.suggestion < rates[45]
    nothing = LearningRateTest((1e-6,), (math.nan,), (1.0,), True)
    assert nothing.suggestion is None


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"min_lr": 0.0}, ConfigurationError, "above 0"),
        ({"min_lr": 1.0, "max_lr": 0.1}, ConfigurationError, "the second larger"),
        ({"max_lr": math.inf}, ConfigurationError, "finite"),
        ({"num_updates": 3}, ConfigurationError, "at least 20"),
        ({"num_epochs": 3}, ArgumentTypeError, "`num_epochs`, which it determines itself"),
    ],
)
def test_bad_input_is_an_error_before_anything_happens(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    trainer, data = make("mlp")
    with pytest.raises(error, match=words):
        trainer.find_lr(data, **arguments)
    assert trainer.run_state.updates == 0


def test_an_optimizer_without_rates_or_none_is_an_error() -> None:
    class WithItsOwn(Trainer):
        def optimizer_step(self) -> None: ...
        def optimizer_zero_grad(self) -> None: ...

    model = nn.Linear(3, 2).double()
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.0), None):
        trainer = WithItsOwn(model, nn.MSELoss(), optimizer, callbacks=())  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="whose ratios it keeps"):
            trainer.find_lr(regression_data(20))


@pytest.mark.processes
def test_two_ranks_find_the_same_and_are_as_before() -> None:
    output = run_on_ranks(Path(__file__).parents[1] / "ranks" / "looking.py", 2)
    assert output.stdout.count("all is well") == 2
