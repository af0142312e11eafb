"""The cost of the loop on a GPU, compared with the raw loop: ``python -m benchmarks.gpu [--quick] [--output FOLDER]``.

Compares eager with eager, compiled with compiled, and compiled into CUDA graphs with the same, for one network that is
limited by launching its kernels and for two that are not; and a fourth, eager, whose large batches come from the host.
Takes less than ten minutes on one GPU. ``--quick`` needs no GPU: it only checks that everything runs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.data import Batch
from benchmarks.measuring import Result, Setting, Target, take_turns
from benchmarks.reporting import as_markdown, facts_of_run, write_report
from benchmarks.ways import unseen
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback

MODES = ("eager", "compiled", "graphs")
COMPILING: dict[str, Any] = {"compiled": {}, "graphs": {"mode": "reduce-overhead"}}
DISTINCT_BATCHES = 8
UPDATES_WITHOUT_WAITING = 40  # losses are read every 64 updates, which waits for the device: warm_steps leaves room
VOCABULARY = 50_257


@dataclass(frozen=True)
class Workload:
    """A network and its batches.

    Attributes:
        name: the name in the tables.
        warm_steps: steps before the clock starts: enough for compiling.
        timed_steps: steps while the clock runs.
        new_model: creates the network.
        new_batch: creates a batch on a device.
        autocast: run the network in bfloat16.
        from_host: the batches lie in pinned memory of the host, and each is copied in time.
        at_most: upper limit for the ratio of our time to the raw loop's.
    """

    name: str
    warm_steps: int
    timed_steps: int
    new_model: Callable[[], nn.Module]
    new_batch: Callable[[torch.device], Batch]
    autocast: bool
    at_most: float
    from_host: bool = False

    def parts(self, device: torch.device) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        """Always with the same first weights."""
        torch.manual_seed(0)
        model = self.new_model().to(device)
        is_cuda = device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-4), fused=True, capturable=is_cuda)
        return model, CrossEntropy(), optimizer

    def batches(self, device: torch.device) -> Cycle:
        """Batches that were created beforehand: they cost neither loop anything but the way to the device."""
        torch.manual_seed(1)
        distinct = [self.new_batch(torch.device("cpu") if self.from_host else device) for _ in range(DISTINCT_BATCHES)]
        if self.from_host and device.type == "cuda":
            distinct = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in distinct]
        return Cycle(distinct, self.warm_steps + self.timed_steps)


class CrossEntropy(nn.Module):
    """Cross-entropy over the last dimension, for any leading dimensions."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


class Cycle:
    """A number of batches, only a few of which are different."""

    def __init__(self, distinct: list[Batch], number: int) -> None:
        self._distinct = distinct
        self._number = number

    def __iter__(self) -> Iterator[Batch]:
        return (self._distinct[index % len(self._distinct)] for index in range(self._number))

    def __len__(self) -> int:
        return self._number


class Stopwatch(TrainerCallback):
    """Measures the time between two updates on the device; on request, waiting for the device meanwhile is an error.

    Args:
        workload: says from which update to which.
        device: the device of the work.
        forbids_waiting: raise an error if the host waits for the GPU in the first updates that are timed.
    """

    def __init__(self, workload: Workload, device: torch.device, *, forbids_waiting: bool = False) -> None:
        self._first, self._last = workload.warm_steps, workload.warm_steps + workload.timed_steps
        self._device = device
        self._forbids_waiting = forbids_waiting and device.type == "cuda"
        self._marks: list[Any] = []

    def after_step(self, number: int) -> None:
        """Called after each step, numbered from 1."""
        if self._forbids_waiting and number in (self._first, self._first + UPDATES_WITHOUT_WAITING):
            torch.cuda.set_sync_debug_mode("error" if number == self._first else "default")
        if number not in (self._first, self._last):
            return
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """The same for a trainer."""
        self.after_step(trainer.run_state.updates)

    @property
    def seconds(self) -> float:
        """Between the two updates."""
        first, last = self._marks
        if self._device.type != "cuda":
            return float(last - first)
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def train_raw(workload: Workload, mode: str, device: torch.device, stopwatch: Stopwatch) -> nn.Module:
    """The hand-written loop."""
    model, loss_func, optimizer = workload.parts(device)
    model.train()

    def compute(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=workload.autocast):
            outputs = model(inputs)
        loss_func(outputs, targets).backward()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        compute(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()

    if mode in COMPILING:
        model.compile(**COMPILING[mode])
    for number, (inputs, targets) in enumerate(workload.batches(device), start=1):
        step(inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))
        stopwatch.after_step(number)
    return model


def train_ours(workload: Workload, mode: str, device: torch.device, stopwatch: Stopwatch) -> nn.Module:
    """The same with a trainer."""
    model, loss_func, optimizer = workload.parts(device)
    trainer = Trainer(
        model,
        loss_func,
        optimizer,
        callbacks=[stopwatch],
        mixed_precision="bf16" if workload.autocast else "no",
        compile_model=COMPILING.get(mode, False) or mode in COMPILING,
    )
    with unseen():
        trainer.train(workload.batches(device), num_epochs=1)
    return model


WAYS = {"raw loop": train_raw, "ours": train_ours}


def compare(workload: Workload, mode: str, device: torch.device, repeats: int) -> Result:
    """Raw loop and ours in turn, after checking that their weights are the same and that ours does not wait."""
    weights = {}
    for name, train in WAYS.items():
        stopwatch = Stopwatch(workload, device, forbids_waiting=True)
        weights[name] = [parameter.detach() for parameter in train(workload, mode, device, stopwatch).parameters()]
    pairs = list(zip(*weights.values(), strict=True))
    is_equal = all(torch.equal(raw, ours) for raw, ours in pairs)
    furthest = max((raw - ours).abs().max().item() for raw, ours in pairs)
    return Result(
        title=f"{workload.name}, {mode}",
        unit="µs per step",
        rounds=take_turns(
            {name: partial(_microseconds, train, workload, mode, device) for name, train in WAYS.items()}, repeats
        ),
        baseline="raw loop",
        targets=[Target("ours", at_most=workload.at_most)],
        note=f"Final weights: {'equal to the bit' if is_equal else f'differ by {furthest:.2g} at the most'}.",
        is_pictured=True,
    )


def _microseconds(train: Callable[..., Any], workload: Workload, mode: str, device: torch.device) -> float:
    stopwatch = Stopwatch(workload, device)
    train(workload, mode, device, stopwatch)
    return stopwatch.seconds / workload.timed_steps * 1e6


def graphs_against_eager(results: dict[str, Result]) -> Result:
    """The speed-up of our step in CUDA graphs over our eager one."""
    rounds = {mode: results[mode].rounds["ours"] for mode in ("eager", "graphs")}
    return Result(
        title="MLP: our step in CUDA graphs against our eager one",
        unit="µs per step",
        rounds=rounds,
        baseline="eager",
        targets=[Target("graphs", at_most=0.5)],
    )


# -------------------------------------------------------------------------------------------------------- the networks


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def mlp_batch(device: torch.device) -> Batch:
    return torch.randn(32, 32, device=device), torch.randint(10, (32,), device=device)


def resnet() -> nn.Module:
    """ResNet-18 in its usual form for 32×32 images."""
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def pictures(device: torch.device) -> Batch:
    return torch.randn(128, 3, 32, 32, device=device), torch.randint(10, (128,), device=device)


def resnet50() -> nn.Module:
    from torchvision.models import resnet50 as new_model

    model: nn.Module = new_model(num_classes=10)
    return model


def large_pictures(device: torch.device) -> Batch:
    return torch.randn(128, 3, 224, 224, device=device), torch.randint(10, (128,), device=device)


class LanguageModel(nn.Module):
    """A decoder of the size of GPT-2 small: 12 layers, 768 wide, 12 heads, 124 million parameters."""

    def __init__(self, *, layers: int = 12, width: int = 768, heads: int = 12, length: int = 512) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.tokens(tokens) + self.positions, mask=self.mask, is_causal=True)
        return nn.functional.linear(hidden, self.tokens.weight)


def text(device: torch.device) -> Batch:
    tokens = torch.randint(VOCABULARY, (8, 513), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


WORKLOADS = (
    Workload("MLP", 200, 500, mlp, mlp_batch, autocast=False, at_most=1.02),
    Workload("ResNet-18 at 32×32", 70, 150, resnet, pictures, autocast=False, at_most=1.005),
    Workload("Transformer of GPT-2 small's size, bf16", 20, 50, LanguageModel, text, autocast=True, at_most=1.005),
    Workload(
        "ResNet-50 from the host, bf16", 20, 40, resnet50, large_pictures, autocast=True, at_most=1.005, from_host=True
    ),
)
QUICK_WORKLOADS = (Workload("MLP", 5, 10, mlp, mlp_batch, autocast=False, at_most=1.02),)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.quick:
        parser.error("there is no CUDA device; --quick runs the script without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.deterministic = True  # otherwise even the weights of two raw loops would differ
    options.output.mkdir(parents=True, exist_ok=True)
    setting = Setting(options.repeats, is_quick=options.quick, peers=(), folder=options.output)
    repeats = setting.size(options.repeats, quick=1)
    modes = MODES if device.type == "cuda" else MODES[:1]
    facts = facts_of_run(
        command=shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]), repeats=repeats, left_out=()
    )
    facts["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    results: dict[str, list[Result]] = {}
    for workload in QUICK_WORKLOADS if options.quick else WORKLOADS:
        by_mode = {}
        for mode in modes[:1] if workload.from_host else modes:
            by_mode[mode] = compare(workload, mode, device, repeats)
            print("\n" + as_markdown(by_mode[mode]), flush=True)
            results[workload.name] = list(by_mode.values())
            write_report(options.output, results, facts)
        if workload.name == "MLP" and "graphs" in by_mode:
            results["graphs"] = [graphs_against_eager(by_mode)]
    write_report(options.output, results, facts)
    print(f"\nWritten to {options.output}")


if __name__ == "__main__":
    main()
