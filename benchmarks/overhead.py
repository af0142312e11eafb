"""What the loop costs above a hand-written one, and what its loader saves: `make bench`.

Every way of training gets the same model, optimizer, data and number of steps, and they take turns in one process, so
that a slow moment of the machine hits all of them. Two figures are taken:

- microseconds per step above the raw loop, from the slope between a short and a long run on ready-made batches: set-up
  costs drop out;
- seconds of an epoch over 60,000 samples in memory, as a user would write it, as a ratio to the hand-written
  `DataLoader` loop of the same round.

Final losses are compared, so that nobody wins by doing less.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import accelerate
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.data.sampling import epoch_order

BATCH_SIZE = 32
SHORT, LONG = 300, 1500
EPOCH_SAMPLES = 60_000
RESULTS = Path(__file__).parent / "results"

Batch = tuple[torch.Tensor, torch.Tensor]
Parts = tuple[nn.Module, nn.Module, torch.optim.Optimizer]


def parts(features: int, hidden: int) -> Parts:
    """The same small network, loss and optimizer each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def samples(size: int, features: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, features, generator=generator), torch.randint(10, (size,), generator=generator)


class ReadyBatches:
    """Batches that cost nothing to load."""

    def __init__(self, number: int) -> None:
        inputs, targets = samples(number * BATCH_SIZE, features=32)
        self.batches = list(zip(inputs.split(BATCH_SIZE), targets.split(BATCH_SIZE), strict=True))

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


# ------------------------------------------------------------------------------------------------------ ways to train


def raw_loop(parts_: Parts, batches: object) -> None:
    model, loss_func, optimizer = parts_
    model.train()
    for inputs, targets in batches:  # type: ignore[attr-defined]
        loss = loss_func(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def accelerate_by_hand(parts_: Parts, batches: object) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(parts_[0], parts_[2])
    model.train()
    for inputs, targets in batches:  # type: ignore[attr-defined]
        loss = parts_[1](model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()


def ours_bare(parts_: Parts, data: object) -> None:
    Trainer(*parts_, callbacks=()).train(data, 1, per_device_batch_size=BATCH_SIZE)


def ours_with_default_callbacks(parts_: Parts, data: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        Trainer(*parts_).train(data, 1, per_device_batch_size=BATCH_SIZE)


def raw_loop_on_a_dataloader(parts_: Parts, data: TensorDataset) -> None:
    raw_loop(parts_, DataLoader(data, batch_size=BATCH_SIZE, shuffle=True))


def raw_loop_on_whole_batches(parts_: Parts, data: TensorDataset) -> None:
    inputs, targets = data.tensors
    order = epoch_order(len(data), seed=0, epoch=0)
    raw_loop(
        parts_, ((inputs.index_select(0, rows), targets.index_select(0, rows)) for rows in order.split(BATCH_SIZE))
    )


# ---------------------------------------------------------------------------------------------------------- measuring


def seconds(train: Callable[..., None], parts_: Parts, data: object) -> float:
    start = time.perf_counter()
    train(parts_, data)
    return time.perf_counter() - start


def microseconds_per_step(repeats: int) -> dict[str, list[float]]:
    """The slope of each way, round by round."""
    ways = {
        "raw loop": raw_loop,
        "accelerate by hand": accelerate_by_hand,
        "ours, no callbacks": ours_bare,
        "ours, default callbacks": ours_with_default_callbacks,
    }
    short, long = ReadyBatches(SHORT), ReadyBatches(LONG)
    final_losses = {}
    for name, train in ways.items():  # also warms everything up
        used = parts(32, 64)
        train(used, short)
        final_losses[name] = nn.functional.cross_entropy(used[0](short.batches[0][0]), short.batches[0][1]).item()
    assert len(set(final_losses.values())) == 1, final_losses
    slopes: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, train in ways.items():
            difference = seconds(train, parts(32, 64), long) - seconds(train, parts(32, 64), short)
            slopes[name].append(difference / (LONG - SHORT) * 1e6)
    return slopes


def epoch_seconds(repeats: int) -> dict[str, list[float]]:
    """The time of one epoch in memory, round by round."""
    ways: dict[str, Callable[..., None]] = {
        "raw loop, DataLoader": raw_loop_on_a_dataloader,
        "raw loop, whole-batch indexing": raw_loop_on_whole_batches,
        "ours, no callbacks": ours_bare,
        "ours, default callbacks": ours_with_default_callbacks,
    }
    data = TensorDataset(*samples(EPOCH_SAMPLES, features=64))
    times: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for round_ in range(repeats + 1):
        for name, train in ways.items():
            used = parts(64, 128)
            taken = seconds(train, used, data)
            losses[name] = nn.functional.cross_entropy(used[0](data.tensors[0]), data.tensors[1]).item()
            if round_:  # the first one warms up
                times[name].append(taken)
    assert max(losses.values()) - min(losses.values()) < 0.05, losses  # the same work in different orders
    return times


def table(title: str, unit: str, figures: dict[str, list[float]], baseline: str, *, as_ratio: bool) -> str:
    lines = [f"### {title}", "", f"| way | {unit}, median (min to max) | against {baseline} |", "| --- | --- | --- |"]
    for name, values in figures.items():
        rounds = list(zip(values, figures[baseline], strict=True))
        compared = [value / base if as_ratio else value - base for value, base in rounds]
        shown = f"{statistics.median(compared):.2f}" if as_ratio else f"{statistics.median(compared):+.1f} µs"
        spread = f"{min(values):.4g} to {max(values):.4g}"
        lines.append(f"| {name} | {statistics.median(values):.4g} ({spread}) | {shown} |")
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--output", type=Path, default=RESULTS)
    options = arguments.parse_args()
    torch.set_num_threads(1)

    steps = microseconds_per_step(options.repeats)
    epochs = epoch_seconds(options.repeats)
    machine = {
        "command": f"python benchmarks/overhead.py --repeats {options.repeats}",
        "machine": f"{platform.machine()} CPU, 1 thread",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "repeats": options.repeats,
    }
    report = "\n\n".join(
        [
            "# Overhead of the loop",
            ", ".join(f"{name}: {value}" for name, value in machine.items()),
            table("A step on ready-made batches", "µs per step", steps, "raw loop", as_ratio=False),
            table(
                f"An epoch over {EPOCH_SAMPLES:,} samples in memory, batch {BATCH_SIZE}",
                "seconds",
                epochs,
                "raw loop, DataLoader",
                as_ratio=True,
            ),
        ]
    )
    options.output.mkdir(parents=True, exist_ok=True)
    figures = {**machine, "microseconds_per_step": steps, "epoch_seconds": epochs}
    (options.output / "overhead.json").write_text(json.dumps(figures, indent=1) + "\n")
    (options.output / "overhead.md").write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    main()
