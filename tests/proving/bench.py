"""Faults of users' scripts, one each, and honest scripts, to measure whether `prove` names the ones and no others.

``python -m tests.proving.bench`` measures all of them, also in new processes; names as arguments choose some.
"""

import collections
import functools
import hashlib
import itertools
import os
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    StepBasedEvaluationCallback,
    TrainerCallback,
)
from tests.support.reference import regression_data, tiny_model

ROWS, EVAL_ROWS, BATCH_SIZE = 96, 16, 8  # an epoch has 12 updates, which a rehearsal cuts
INPUTS, TARGETS = regression_data(ROWS)
Run = tuple[Trainer, dict[str, Any]]


class Own(Trainer):
    """A trainer that other processes cannot copy, so that only those of a factory take part."""


def run(dataset: Any = None, *callbacks: Any, base: type[Trainer] = Own, **parts: Any) -> Run:
    """A run of eight epochs with evaluations, with `parts` of the trainer or arguments of `train`."""
    model = parts.pop("model", None) or tiny_model()
    make_optimizer = parts.pop("optimizer", functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9))
    trainer = base(
        model,
        parts.pop("loss", nn.MSELoss()),
        make_optimizer(model.parameters()),
        callbacks=callbacks,
        seed=3,
    )
    arguments = {"train_dataset": Rows() if dataset is None else dataset, "eval_dataset": regression_data(EVAL_ROWS)}
    return trainer, {**arguments, "num_epochs": 8, "per_device_batch_size": BATCH_SIZE, **parts}


# ------------------------------------------------------------------------------------------------------------ the data


class Rows(Dataset[Any]):
    """Rows that `change` may change."""

    def __init__(self, change: Callable[[torch.Tensor], Any] | None = None, size: int = ROWS) -> None:
        self.change, self.size = change, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        row = INPUTS[index]
        return (row if self.change is None else self.change(row)), TARGETS[index]


class WithNoise(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.noise_source = torch.Generator().manual_seed(0)
        self.num_read = 0

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        row, target = super().__getitem__(index)
        return row + torch.rand((), generator=self.noise_source), target


class NoisyCollate:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __call__(self, rows: list[Any]) -> Any:
        inputs, targets = torch.utils.data.default_collate(rows)
        return inputs * float(self.rng.uniform(0.9, 1.1)), targets


_source = random.Random(4)


def jittered(row: torch.Tensor) -> torch.Tensor:
    return row + _source.random()


class Growing:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return row * (1 + self.calls / 1000)


class Composed:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            row = transform(row)
        return row


class Levels(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.levels = itertools.cycle([0.9, 1.0, 1.1, 1.2, 1.3])

    def __getitem__(self, index: int) -> Any:
        row, target = super().__getitem__(index)
        return row * next(self.levels), target


_counts = {"reads": 0}


def counted(row: torch.Tensor) -> torch.Tensor:
    _counts["reads"] += 1
    return row * (1 + _counts["reads"] / 1000)


class OfClass(Rows):
    total = 0

    def __getitem__(self, index: int) -> Any:
        type(self).total += 1
        row, target = super().__getitem__(index)
        return row * (1 + self.total / 1000), target


def counting_collate() -> Any:
    batches = 0

    def collate(rows: list[Any]) -> Any:
        nonlocal batches
        batches += 1
        inputs, targets = torch.utils.data.default_collate(rows)
        return inputs * (1 + batches / 100), targets

    return collate


class Shuffled(Sampler[int]):
    def __init__(self) -> None:
        self.source = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(ROWS, generator=self.source).tolist())


class Passes(Shuffled):
    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.passes)).tolist())


class Batches(Sampler[list[int]]):
    def __init__(self) -> None:
        self.chooses = np.random.RandomState(0)

    def __len__(self) -> int:
        return ROWS // BATCH_SIZE

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.chooses.permutation(ROWS).reshape(-1, BATCH_SIZE).tolist())


class Blended(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.previous = torch.zeros(3, dtype=torch.float64)

    def __getitem__(self, index: int) -> Any:
        row, target = super().__getitem__(index)
        blended = 0.9 * row + 0.1 * self.previous
        self.previous = row
        return blended, target


def by_the_clock(row: torch.Tensor) -> torch.Tensor:
    return row + time.perf_counter_ns() % 1000 / 1000


class Curriculum(Rows):
    """Rows are harder when many are known."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()

    def __getitem__(self, index: int) -> Any:
        self.known.add(index)
        row, target = super().__getitem__(index)
        return row * (1 + len(self.known) / 100), target


class BySet(Shuffled):
    def __init__(self) -> None:
        self.names = {f"row {index}" for index in range(ROWS)}

    def __iter__(self) -> Iterator[int]:
        return iter([int(name.split()[1]) for name in self.names])


# ----------------------------------------------------------------------------------------------------- the callbacks


def scale_rate(trainer: Trainer, factor: float) -> None:
    for group in trainer.optimizer.param_groups:
        group["lr"] *= factor


class EveryThirdEpoch(TrainerCallback):
    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.epochs += 1
        if self.epochs % 3 == 0:
            scale_rate(trainer, 0.5)


class EverySeventh(TrainerCallback):
    """Also keeps losses, for a plot."""

    def __init__(self) -> None:
        self.updates = 0
        self.losses: list[float] = []

    def on_train_step_end(self, trainer: Trainer, *, batch_output: Any, **kwargs: Any) -> None:
        self.losses.append(batch_output["loss"].item())

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.updates += 1
        if self.updates % 7 == 0:
            scale_rate(trainer, 0.5)


class Patience(TrainerCallback):
    def __init__(self) -> None:
        self.bad = 0

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.bad += 1
        if self.bad == 2:
            scale_rate(trainer, 0.5)
            self.bad = 0


class NoisyRate(TrainerCallback):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(2)

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] = float(self.rng.uniform(0.01, 0.05))


class RateByLoss(TrainerCallback):
    def __init__(self) -> None:
        self.average = 1.0
        self.seen = 0

    def on_train_step_end(self, trainer: Trainer, *, batch_output: Any, **kwargs: Any) -> None:
        self.seen += 1
        self.average = 0.9 * self.average + 0.1 * batch_output["loss"].item()
        trainer.optimizer.param_groups[0]["lr"] = 0.05 / (1 + self.average)


class Window(TrainerCallback):
    def __init__(self) -> None:
        self.window: Any = collections.deque(maxlen=4)

    def on_train_step_end(self, trainer: Trainer, *, batch_output: Any, **kwargs: Any) -> None:
        self.window.append(batch_output["loss"].item())
        trainer.optimizer.param_groups[0]["lr"] = 0.02 / (1 + sum(self.window) / len(self.window))


class Lazy(TrainerCallback):
    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.done = getattr(self, "done", 0) + 1
        if self.done == 5:
            scale_rate(trainer, 0.1)


class MeanGradient(TrainerCallback):
    def __init__(self) -> None:
        self.mean = torch.zeros(2, dtype=torch.float64)

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        gradient = trainer.get_model()[-1].bias.grad
        self.mean = 0.5 * self.mean + 0.5 * gradient
        gradient.copy_(self.mean)


class Perturbs(TrainerCallback):
    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(1)

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        with torch.no_grad():
            bias = trainer.get_model()[-1].bias
            bias.add_(torch.rand(2, dtype=torch.float64, generator=self.noise))


class TenthEvaluation(TrainerCallback):
    def __init__(self) -> None:
        self.evaluations = 0

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.evaluations += 1
        if self.evaluations == 10:
            scale_rate(trainer, 0.1)


class LateUnfreeze(TrainerCallback):
    def __init__(self) -> None:
        self.epochs_frozen = 0

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.get_model()[0].requires_grad_(self.epochs_frozen >= 30)
        self.epochs_frozen += 1


def half_frozen() -> nn.Module:
    model = tiny_model()
    next(model.children()).requires_grad_(False)  # here, since DDP would not notice a callback that does so
    return model


class Policy:
    def __init__(self) -> None:
        self.level = 1.0

    def step(self) -> float:
        self.level *= 0.95
        return self.level


class ByPolicy(TrainerCallback):
    def __init__(self) -> None:
        self.policy = Policy()

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.05 * self.policy.step()


class RunningMetric(TrainerCallback):
    def __init__(self) -> None:
        self.total = self.batches = 0.0

    def on_eval_step_end(self, trainer: Trainer, *, batch_output: Any, **kwargs: Any) -> None:
        self.total += batch_output["loss"].item()
        self.batches += 1

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("mean_so_far", self.total / self.batches)


class Tally(TrainerCallback):
    """Keeps its numbers in a tuple, and the time of its beginning, which is nobody's concern."""

    def __init__(self) -> None:
        self.began, self.tally = time.time(), (0, 0.0)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.tally = (self.tally[0] + 1, time.time())
        if self.tally[0] == 6:
            scale_rate(trainer, 0.5)


# ------------------------------------------------------------------------------------------------ model, loss, trainer


class Around(nn.Module):
    """A model around another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.changed(self.inner(inputs))

    def changed(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs


class Warm(Around):
    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def changed(self, outputs: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        return outputs * min(1.0, self.forwards / 10)


class Centred(Around):
    def __init__(self) -> None:
        super().__init__()
        self.centre: torch.Tensor
        self.register_buffer("centre", torch.zeros(2, dtype=torch.float64), persistent=False)

    def changed(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.centre.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        return outputs - self.centre


class OwnDropout(Around):
    def __init__(self) -> None:
        super().__init__()
        self.masks = torch.Generator().manual_seed(0)

    def changed(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs * (torch.rand(outputs.shape, generator=self.masks) > 0.3) if self.training else outputs


class Depth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.coin = random.Random(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.layer(inputs) * (self.coin.random() > 0.3)


def with_depth() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4).double(), Depth(), nn.Linear(4, 2).double())


class Scaled(Around):
    """Keeps a running scale in a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones((), dtype=torch.float64)

    def changed(self, outputs: torch.Tensor) -> torch.Tensor:
        self.scale = 0.9 * self.scale + 0.1 * outputs.detach().abs().mean()
        return outputs / self.scale


class Stepped(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Stepped.calls += 1
        return gradient * (1 + Stepped.calls / 100)


class WithFunction(Around):
    def changed(self, outputs: torch.Tensor) -> torch.Tensor:
        return Stepped.apply(outputs)  # type: ignore[no-any-return]


def with_forward_hook() -> nn.Module:
    model, calls = tiny_model(), 0

    def grow(module: nn.Module, inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return outputs * (1 + calls / 100)

    next(model.children()).register_forward_hook(grow)
    return model


def with_parameter_hook() -> nn.Module:
    model, calls = tiny_model(), 0

    def shrink(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient / calls

    model.get_parameter("2.weight").register_hook(shrink)
    return model


class GradientNoise:
    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(0)

    def __call__(self, module: nn.Module, gradients: Any, of_outputs: Any) -> Any:
        return tuple(each if each is None else each + torch.rand((), generator=self.noise) for each in gradients)


def with_backward_hook() -> nn.Module:
    model = tiny_model()
    model.get_submodule("2").register_full_backward_hook(GradientNoise())
    return model


class Memory(Around):
    def __init__(self) -> None:
        super().__init__()
        self.bank: list[torch.Tensor] = []

    def changed(self, outputs: torch.Tensor) -> torch.Tensor:
        self.bank = [*self.bank[-3:], outputs.detach().mean(0)]
        return outputs + 0.1 * torch.stack(self.bank).mean(0)


class ScaledLoss:
    def __init__(self) -> None:
        self.average = 1.0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(outputs, targets)
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss / self.average


class CentreLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre: torch.Tensor
        self.register_buffer("centre", torch.zeros(2, dtype=torch.float64), persistent=False)

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.centre.mul_(0.9).add_(targets.mean(0), alpha=0.1)
        return (outputs - targets + self.centre).square().mean()


def counting_loss() -> Any:
    steps = 0

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return nn.functional.mse_loss(outputs, targets) * (1 + 1 / steps)

    return loss


def sum_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().sum() / 100


def hardest_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean(1).max()


class Harder(Trainer):
    difficulty = 0.5

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        self.difficulty = min(1.0, self.difficulty * 1.05)
        return {**output, "loss": output["loss"] * self.difficulty}


class Lookahead(Trainer):
    """Pulls the weights to slow ones, which it keeps itself."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        weight = self.get_model()[0].weight
        with torch.no_grad():
            self.slow = 0.5 * getattr(self, "slow", weight.detach().clone()) + 0.5 * weight
            weight.copy_(self.slow)


class ByEvaluation(Trainer):
    """Trains with a weight that each evaluation changes."""

    penalty = 1.0

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.penalty *= 1.1
        return super().calculate_eval_batch_loss(batch)

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        return {**output, "loss": output["loss"] * self.penalty}


class Warming(torch.optim.SGD):
    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = min(0.05, 0.01 * self.taken)
        return super().step(closure)


class Forgetful(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}}


class Waves(torch.optim.lr_scheduler.LRScheduler):
    """A schedule with a phase, which its state leaves out."""

    def __init__(self, optimizer: Any) -> None:
        self.phase = 0.0
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.phase += 0.3
        return [rate * (1.1 + float(np.sin(self.phase))) for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "phase"}


# ------------------------------------------------------------------------------------------------------ the evaluation


class CountedRows(Rows):
    def __init__(self) -> None:
        super().__init__(size=EVAL_ROWS)
        self.served = 0

    def __getitem__(self, index: int) -> Any:
        self.served += 1
        row, target = super().__getitem__(index)
        return row * (1 + self.served / 100), target


class NoisyEvaluation(Rows):
    def __init__(self) -> None:
        super().__init__(size=EVAL_ROWS)
        self.noise_source = np.random.RandomState(0)

    def __getitem__(self, index: int) -> Any:
        row, target = super().__getitem__(index)
        return row + float(self.noise_source.rand()), target


_of_evaluation = random.Random(6)


def jittered_evaluation(row: torch.Tensor) -> torch.Tensor:
    return row + _of_evaluation.random()


class DropsInEvaluation(Around):
    """Draws from a generator of its own in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled = torch.Generator().manual_seed(0)

    def changed(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs if self.training else outputs + torch.rand((), generator=self.sampled)


def sampled(sampler: Any) -> Run:
    return run(train_dataloader_kwargs={"sampler": sampler})


#: The 54 faults by their names: what makes the run, and what must be named.
FAULTS: dict[str, tuple[Callable[[], Run], str]] = {
    "dataset: torch generator": (lambda: run(WithNoise()), "`noise_source` of the dataset WithNoise is a generator"),
    "collate function: numpy generator": (lambda: run(collate_fn=NoisyCollate()), "`rng` of the collate function"),
    "transform: generator of a module": (lambda: run(Rows(jittered)), "`_source`, a variable of the module"),
    "transform: counter in a list": (lambda: run(Rows(Composed(Growing()))), "`calls` of Growing in the dataset"),
    "dataset: cycle of levels": (lambda: run(Levels()), "`levels` of the dataset Levels"),
    "transform: counter in a dict of a module": (lambda: run(Rows(counted)), "`_counts`, a variable of the module"),
    "dataset: counter of its class": (lambda: run(OfClass()), "`total` of the dataset OfClass"),
    "collate function: counter in a closure": (lambda: run(collate_fn=counting_collate()), "`batches`, a variable of"),
    "sampler: torch generator": (lambda: sampled(Shuffled()), "`source` of the sampler Shuffled is a generator"),
    "sampler: counter of passes": (lambda: sampled(Passes()), "`passes` of the sampler Passes"),
    "batch sampler: numpy generator": (
        lambda: run(train_dataset=DataLoader(Rows(), batch_sampler=Batches())),
        "`chooses` of the batch_sampler Batches is a generator",
    ),
    "dataset: the row before": (lambda: run(Blended()), "`previous` of the dataset Blended"),
    "transform: clock": (lambda: run(Rows(by_the_clock)), "the rows depend on a clock, a file, "),
    "dataset: set that grows": (lambda: run(Curriculum()), "`known` of the dataset Curriculum"),
    "sampler: order of a set": (lambda: sampled(BySet()), "`names` of the sampler BySet"),
    "callback: counts epochs": (lambda: run(None, EveryThirdEpoch()), "`epochs` of the callback EveryThirdEpoch"),
    "callback: counts updates": (lambda: run(None, EverySeventh()), "`updates` of the callback EverySeventh"),
    "callback: patience": (lambda: run(None, Patience()), "`bad` of the callback Patience"),
    "callback: generator": (lambda: run(None, NoisyRate()), "`rng` of the callback NoisyRate is a generator"),
    "callback: average loss": (lambda: run(None, RateByLoss()), "`average` of the callback RateByLoss"),
    "callback: window of losses": (lambda: run(None, Window()), "`window` of the callback Window"),
    "callback: attribute made later": (lambda: run(None, Lazy()), "`done` of the callback Lazy"),
    "callback: mean gradient": (lambda: run(None, MeanGradient()), "`mean` of the callback MeanGradient"),
    "callback: noise after evaluations": (lambda: run(None, Perturbs()), "`noise` of the callback Perturbs is a gen"),
    "callback: acts at the tenth evaluation": (
        lambda: run(None, TenthEvaluation(), num_epochs=20),
        "`evaluations` of the callback TenthEvaluation",
    ),
    "callback: unfreezes in epoch 30": (
        lambda: run(None, LateUnfreeze(), model=half_frozen()),
        "`epochs_frozen` of the callback LateUnfr",
    ),
    "callback: level of a policy": (lambda: run(None, ByPolicy()), "`level` of Policy in the callback ByPolicy"),
    "callback: metric over all evaluations": (
        lambda: run(None, RunningMetric()),
        "`(total|batches)` of the callback RunningM",
    ),
    "callback: numbers in a tuple": (lambda: run(None, Tally()), "`tally` of the callback Tally"),
    "model: counter": (lambda: run(model=Warm()), "`forwards` of the model Warm"),
    "model: non-persistent buffer": (lambda: run(model=Centred()), "`centre`, a non-persistent buffer of the model C"),
    "model: torch generator": (lambda: run(model=OwnDropout()), "`masks` of the model OwnDropout is a generator"),
    "model: random.Random in a part": (lambda: run(model=with_depth()), "`coin` of the model Depth is a generator"),
    "model: plain tensor": (lambda: run(model=Scaled()), "`scale` of the model Scaled"),
    "model: counter of an autograd function": (
        lambda: run(model=WithFunction()),
        "`calls` of the autograd function Stepped",
    ),
    "model: forward hook": (lambda: run(model=with_forward_hook()), "`calls`, a variable of the forward hook"),
    "model: gradient hook of a parameter": (
        lambda: run(model=with_parameter_hook()),
        "`calls`, a variable of the gradient hook .* of the parameter 2.weight",
    ),
    "model: gradient hook of a module": (lambda: run(model=with_backward_hook()), "`noise` of the gradient hook Grad"),
    "model: list of outputs": (lambda: run(model=Memory()), "`bank` of the model Memory|`bank`.*Memory"),
    "loss: average": (lambda: run(loss=ScaledLoss()), "`average` of the loss function ScaledLoss"),
    "loss: non-persistent buffer": (
        lambda: run(loss=CentreLoss()),
        "`centre`, a non-persistent buffer of the loss function CentreLoss",
    ),
    "loss: counter in a closure": (lambda: run(loss=counting_loss()), "`steps`, a variable of counting_loss"),
    "loss: a sum": (lambda: run(loss=sum_loss), "the loss is not a mean over the rows"),
    "loss: the hardest row": (lambda: run(loss=hardest_loss), "the loss is not a mean over the rows"),
    "trainer: difficulty": (lambda: run(base=Harder), "`difficulty` of the trainer Harder"),
    "trainer: slow weights": (lambda: run(base=Lookahead), "`slow` of the trainer Lookahead"),
    "trainer: penalty of evaluations": (lambda: run(base=ByEvaluation), "`penalty` of the trainer ByEvaluation"),
    "optimizer: counter": (lambda: run(optimizer=functools.partial(Warming, lr=0.05)), "`taken` of the optimizer War"),
    "optimizer: forgets its state": (
        lambda: run(optimizer=functools.partial(Forgetful, lr=0.01)),
        "`(exp_avg|exp_avg_sq|step)` in the state of the optimizer Forgetful",
    ),
    "schedule: phase": (lambda: run(create_scheduler_fn=Waves), "`phase` of the scheduler Waves"),
    "evaluation: numpy generator": (
        lambda: run(eval_dataset=NoisyEvaluation()),
        "`noise_source` of the evaluation dataset NoisyEvaluation is a generator",
    ),
    "evaluation: counter": (lambda: run(eval_dataset=CountedRows()), "`served` of the evaluation dataset CountedRows"),
    "evaluation: generator of a module": (
        lambda: run(eval_dataset=Rows(jittered_evaluation, EVAL_ROWS)),
        "`_of_evaluation`, a variable of the module",
    ),
    "evaluation: generator of the model": (
        lambda: run(model=DropsInEvaluation()),
        "`sampled` of the model DropsInEvaluation is a generator",
    ),
}


# ------------------------------------------------------------------------------------------------------- honest scripts


def seeded(*layers: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(layer() for layer in layers)).double()


def linear(inputs: int, outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs)


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return seeded(lambda: norm(nn.Linear(3, 4)), nn.Tanh, linear(4, 2))


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, which recommends another function
        return nn.utils.weight_norm(layer)


def torch_noise(row: torch.Tensor) -> torch.Tensor:
    return row + torch.rand(())


def numpy_noise(row: torch.Tensor) -> torch.Tensor:
    return row + float(np.random.normal())


def python_noise(row: torch.Tensor) -> torch.Tensor:
    return row + random.random()


def mixed_up(rows: list[Any]) -> Any:
    inputs, targets = torch.utils.data.default_collate(rows)
    share, order = torch.rand(()), torch.randperm(len(inputs))
    return share * inputs + (1 - share) * inputs[order], share * targets + (1 - share) * targets[order]


class Cached(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class ByEpoch(Shuffled):
    epoch = 0

    def __init__(self) -> None:
        pass

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(INPUTS, TARGETS, strict=True)


class SavedPatience(Patience):
    def state_dict(self) -> dict[str, Any]:
        return {"bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bad = state["bad"]


class Plots(TrainerCallback):
    """Keeps losses and times for a plot, which decide nothing."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_step_end(self, trainer: Trainer, *, batch_output: Any, **kwargs: Any) -> None:
        self.losses.append(batch_output["loss"].item())
        self.seconds.append(time.perf_counter())


class ByNumberOfEpoch(TrainerCallback):
    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.05 / trainer.run_history.current_epoch


class Timed(TrainerCallback):
    """Records how long epochs take."""

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("pace", time.perf_counter() - self.began)


class SavedCentre(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2, dtype=torch.float64))


class Positions(Around):
    """Has constants that no state needs."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: torch.Tensor
        self.register_buffer("positions", torch.arange(2).double() / 10, persistent=False)

    def changed(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs + self.positions


class OfDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        outputs = self.inner(inputs)
        return {**({} if labels is None else {"loss": nn.functional.mse_loss(outputs, labels)}), "logits": outputs}


class OwnHook(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        outputs = self.model(inputs)
        return {"loss": nn.functional.mse_loss(outputs, targets), "model_outputs": outputs, "batch_size": len(inputs)}


class SavedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.average: torch.Tensor
        self.register_buffer("average", torch.ones((), dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(outputs, targets)
        self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss / self.average


def with_clamps(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return model


@functools.lru_cache
def factor(index: int) -> float:
    return int(hashlib.md5(str(index).encode()).hexdigest()[:4], 16) / 2**16


class Weighted(Rows):
    def __getitem__(self, index: int) -> Any:
        row, target = super().__getitem__(index)
        return row * factor(index), target


def two_optimizers(parameters: Any) -> Any:
    parameters = list(parameters)
    return [torch.optim.SGD(parameters[:2], 0.05), torch.optim.AdamW(parameters[2:], 0.01)]


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200)


HONEST: dict[str, Callable[[], Run]] = {
    "nothing special": lambda: run(),
    "dropout": lambda: run(model=seeded(linear(3, 4), nn.Dropout, linear(4, 2))),
    "batch norm": lambda: run(model=seeded(linear(3, 4), lambda: nn.BatchNorm1d(4), nn.Tanh, linear(4, 2))),
    "spectral norm": lambda: run(model=normed(nn.utils.spectral_norm)),
    "spectral norm as a parametrization": lambda: run(model=normed(nn.utils.parametrizations.spectral_norm)),
    "weight norm": lambda: run(model=normed(old_weight_norm)),
    "noise of torch": lambda: run(Rows(torch_noise)),
    "noise of numpy": lambda: run(Rows(numpy_noise)),
    "noise of random": lambda: run(Rows(python_noise)),
    "mixup": lambda: run(collate_fn=mixed_up),
    "a cache": lambda: run(Cached()),
    "a function with a cache": lambda: run(Weighted()),
    "a sampler with `set_epoch`": lambda: sampled(ByEpoch()),
    "a weighted sampler": lambda: sampled(WeightedRandomSampler([1.0, 2.0] * (ROWS // 2), ROWS)),
    "a loader": lambda: run(DataLoader(TensorDataset(INPUTS, TARGETS), BATCH_SIZE, shuffle=True)),
    "a stream": lambda: run(Stream()),
    "a callback with a state": lambda: run(None, SavedPatience()),
    "early stopping": lambda: run(None, EarlyStoppingCallback(early_stopping_patience=2)),
    "an average of the weights": lambda: run(None, ModelEmaCallback(decay=0.9)),
    "a plot": lambda: run(None, Plots()),
    "times as metrics": lambda: run(None, Timed()),
    "evaluations by steps": lambda: run(None, StepBasedEvaluationCallback(2)),
    "several evaluation sets": lambda: run(eval_dataset={"a": regression_data(8), "b": regression_data(5)}),
    "a rate by the number of the epoch": lambda: run(None, ByNumberOfEpoch()),
    "a plateau": lambda: run(create_scheduler_fn=plateau, step_scheduler="epoch"),
    "accumulation, clipping, one cycle": lambda: run(
        create_scheduler_fn=one_cycle, gradient_accumulation_steps=2, gradient_clip_norm=0.1
    ),
    "buffers that are saved": lambda: run(model=SavedCentre(), loss=SavedLoss()),
    "constants, and clamped gradients": lambda: run(model=with_clamps(Positions())),
    "dicts and the model's own loss": lambda: run(
        {"inputs": INPUTS, "labels": TARGETS},
        model=OfDicts(),
        loss=None,
        eval_dataset={"inputs": INPUTS[:8], "labels": TARGETS[:8]},
    ),
    "two optimizers, and an own hook": lambda: run(base=OwnHook, optimizer=two_optimizers),
}


# ------------------------------------------------------------------------------------------------------- the measuring


def made(name: str) -> Run:
    """The run of a name."""
    return FAULTS[name][0]() if name in FAULTS else HONEST[name]()


def judged(name: str, *, in_new_processes: bool) -> tuple[str, list[str]]:
    """What `prove` makes of a run: "right", "vague", "wrong" or "missed"; "quiet", "note", "alarm" if it is honest."""
    trainer, arguments = made(name)
    place = f"{__spec__.name if __spec__ else __name__}:made({name!r})"
    proof = trainer.prove(**arguments, factory=place if in_new_processes else None)
    found = [row for row in proof.rows if row.verdict == "difference"]
    notes = [row for row in proof.rows if row.verdict == "same bits" and row.culprit]
    lines = [f"{row.check}: {row.verdict} {row.update or ''} {row.culprit}" for row in [*found, *notes]]
    if name in HONEST:
        return ("alarm" if found else "note" if notes else "quiet"), lines
    pattern = FAULTS[name][1]
    said = [row.culprit for row in (found or notes)]
    if not said:
        return "missed", lines
    are_right = [re.search(pattern, each) is not None for each in said]
    if all(are_right):
        return "right", lines
    names_another = any(
        "`" in each.partition(":")[2] for each, is_right in zip(said, are_right, strict=True) if not is_right
    )
    return ("wrong" if names_another else "vague"), lines


def main(names: list[str]) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for name in names or [*FAULTS, *HONEST]:
        began = time.perf_counter()
        verdict, lines = judged(name, in_new_processes="BENCH_ALONE" not in os.environ)
        counts[f"{'fault' if name in FAULTS else 'honest'}: {verdict}"] += 1
        print(f"{verdict:<7} {name} ({time.perf_counter() - began:.1f} s)", flush=True)
        for line in lines if verdict not in ("right", "quiet") else ():
            print(f"          {line}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
