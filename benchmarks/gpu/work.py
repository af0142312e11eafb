"""Networks and batches that the loops train on a GPU, and the clock that times their steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.data import Batch
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback

DISTINCT_BATCHES = 8
UPDATES_WITHOUT_WAITING = 40  # losses are read every 64 updates, which waits for the device: warm_steps leaves room
VOCABULARY = 30_522  # BERT's


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


def bert() -> nn.Module:
    """BERT-base with a head for two classes: 12 layers, 768 wide, 110 million parameters. Without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertForSequenceClassification(BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.bert(tokens).logits
            return logits

    return Logits()


def texts(device: torch.device) -> Batch:
    return torch.randint(VOCABULARY, (32, 128), device=device), torch.randint(2, (32,), device=device)


WORKLOADS = (
    Workload("MLP", 200, 500, mlp, mlp_batch, autocast=False, at_most=1.02),
    Workload("ResNet-18 at 32×32", 70, 100, resnet, pictures, autocast=False, at_most=1.005),
    Workload("BERT-base, bf16", 20, 50, bert, texts, autocast=True, at_most=1.005),
    Workload(
        "ResNet-50 from the host, bf16", 20, 40, resnet50, large_pictures, autocast=True, at_most=1.005, from_host=True
    ),
)
QUICK_WORKLOADS = (Workload("MLP", 5, 10, mlp, mlp_batch, autocast=False, at_most=1.02),)
