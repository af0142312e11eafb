"""The plain loop that every way of splitting the work must match: one process, one batch per update."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.data.sampling import epoch_order

TOLERANCE = 1e-12  # in float64; only the order of sums differs
# The effect of the order of one short sum on any processor: 64 roundings of float64, 8 of float32.
ROUNDING = 2.0**-46
SINGLE = 2.0**-20


def tiny_model(*, seed: int = 0, features: int = 3, outputs: int = 2) -> nn.Module:
    """A small float64 network, the same for the same seed, whatever the state of the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def regression_data(size: int, *, features: int = 3, outputs: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Random float64 inputs and targets; the first rows are the same for every size."""
    generator = torch.Generator().manual_seed(17)
    rows = torch.randn(size, features + outputs, generator=generator, dtype=torch.float64)
    return rows[:, :features].clone(), rows[:, features:].clone()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def tiny_trainer(*callbacks: Any, base: type[Trainer] = Trainer, **kwargs: Any) -> Trainer:
    """A trainer of a `tiny_model` with `sgd`."""
    model = tiny_model()
    return base(model, nn.MSELoss(), sgd(model), callbacks=callbacks, **kwargs)


def windows_of_epoch(size: int, samples_per_update: int, *, seed: int, epoch: int) -> list[torch.Tensor]:
    """The samples of each update as documented: the epoch's order split into pieces."""
    return list(epoch_order(size, seed=seed, epoch=epoch).split(samples_per_update))


def train_reference(
    data: tuple[torch.Tensor, torch.Tensor],
    windows: Iterable[torch.Tensor],
    *,
    clip: Callable[[Iterable[nn.Parameter]], Any] | None = None,
    loss_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.mse_loss,
) -> tuple[nn.Module, list[float]]:
    """A model trained on one batch per window, and the mean loss of each window."""
    model = tiny_model()
    optimizer = sgd(model)
    losses = []
    for indices in windows:
        loss = loss_func(model(data[0][indices]), data[1][indices])
        loss.backward()
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def assert_same_numbers(actual: Any, expected: Any, *, tolerance: float = ROUNDING) -> None:
    """Assert equality up to `tolerance` times the largest of the expected numbers.

    Not relative to each entry: an entry that nearly cancels out carries the rounding errors of its summands.
    """
    expected = torch.as_tensor(expected)
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(torch.as_tensor(actual), expected, rtol=0, atol=tolerance * scale)


def assert_same_parameters(actual: nn.Module, expected: nn.Module, *, tolerance: float = TOLERANCE) -> None:
    """Assert that every parameter and buffer is equal, relative to its size; a tolerance of 0 means bit for bit."""
    expected_state = expected.state_dict()
    assert actual.state_dict().keys() == expected_state.keys()
    for name, tensor in actual.state_dict().items():
        torch.testing.assert_close(tensor, expected_state[name], rtol=tolerance, atol=tolerance, msg=f"{name} differs")
