"""Small problems for the scenarios, and how what was seen becomes JSON."""

import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pytorch_accelerated import Trainer

ROWS = 12
# In order and in the main process, so that both packages see the same batches.
IN_ORDER = {"shuffle": False, "num_workers": 0}


def model() -> nn.Module:
    """A small float64 network, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def dataset(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(data[:, :3].clone(), data[:, 3:].clone())


def trainer(base: Any = Trainer, callbacks: Any = (), lr: float = 0.1, **kwargs: Any) -> Any:
    """A trainer of the small network with plain SGD, in which a wrong scale of the gradient shows."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    return base(network, nn.MSELoss(), optimizer, callbacks=callbacks, **kwargs)


def train(made: Any, num_epochs: int | None = 2, rows: int = ROWS, eval_rows: int | None = 5, **kwargs: Any) -> Any:
    """Train `made` on the small problem, in order; returns it."""
    kwargs = {"per_device_batch_size": 4, **kwargs}
    for name in ("train_dataloader_kwargs", "eval_dataloader_kwargs"):
        kwargs[name] = {**IN_ORDER, **(kwargs.get(name) or {})}
    evaluated = None if eval_rows is None else dataset(eval_rows)
    made.train(dataset(rows), num_epochs, evaluated, **kwargs)
    return made


def history_of(made: Any) -> dict[str, Any]:
    """All values of the run history, by name."""
    return {
        name: list(made.run_history.get_metric_values(name)) for name in sorted(made.run_history.get_metric_names())
    }


def weights_of(network: Any) -> list[float]:
    """The sum and the sum of squares of each parameter: short, and different where the training was."""
    return [
        number.item()
        for parameter in network.parameters()
        for number in (parameter.detach().sum(), parameter.detach().square().sum())
    ]


def attempt(call: Callable[[], Any]) -> Any:
    """What `call` returns, as JSON, or which error it ends with."""
    try:
        return plain(call())
    except (Exception, SystemExit) as error:
        builtin = next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")
        return {"raises": builtin if builtin != "Exception" else type(error).__name__}


def grid(call: Callable[..., Any], cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What `call` gives with the arguments of each case."""
    return {name: attempt(functools.partial(call, **arguments)) for name, arguments in cases.items()}


def plain(value: Any) -> Any:
    """`value` as JSON."""
    if value is None or isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype), "values": value.detach().flatten().tolist()}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [plain(entry) for entry in value]
        if any(isinstance(entry, (dict, list)) for entry in entries):
            return {str(index): entry for index, entry in enumerate(entries)}
        return entries
    if isinstance(value, (torch.device, torch.dtype, torch.Size, Path)):
        return str(value)
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__qualname__
    return f"a {type(value).__name__}"
