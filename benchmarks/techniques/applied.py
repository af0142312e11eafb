"""The techniques, each as a function that trains with it."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import schedulefree
import torch
from torch import nn

from benchmarks.find_lr import Rows
from benchmarks.techniques.tasks import Task
from pytorch_accelerated import Trainer
from pytorch_accelerated.__main__ import main as command_line
from pytorch_accelerated.callbacks import ModelEmaCallback, SaveTrainingStateCallback, SWACallback, UnfreezeCallback
from pytorch_accelerated.extras.optimizers import param_groups
from pytorch_accelerated.extras.recipes import fine_tune
from pytorch_accelerated.schedulers import CosineLrScheduler, WSDLrScheduler, one_cycle


@dataclass
class Job:
    """What one training gets."""

    task: Task
    seed: int
    lr: float
    model: Any
    rows: Rows
    folder: Path = Path()

    def adamw(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr)

    def trainer(self, optimizer: Any = None, *callbacks: Any) -> Trainer:
        optimizer = self.adamw() if optimizer is None else optimizer
        return Trainer(self.model, nn.CrossEntropyLoss(), optimizer, callbacks, seed=self.seed)

    def train(self, optimizer: Any = None, *callbacks: Any, **settings: Any) -> Any:
        self.finish(self.trainer(optimizer, *callbacks), **settings)
        return self.model

    def finish(self, trainer: Trainer, **settings: Any) -> None:
        trainer.train(self.rows, self.task.epochs, per_device_batch_size=self.task.batch_size, **settings)

    @property
    def head(self) -> str:
        return rf"^{len(self.model) - 1}\."


def _ema(job: Job, decay: float) -> nn.Module:
    average = ModelEmaCallback(decay, evaluate_during_training=False, save_path=job.folder / "ema.pt")
    job.train(None, average)
    return average.ema_model.module


def _swa(job: Job) -> nn.Module:
    average = SWACallback(start=0.5, evaluate_during_training=False, save_path=job.folder / "swa.pt")
    job.train(None, average)
    return average.ema_model.module


def _mean_of_states(job: Job) -> nn.Module:
    states, output = job.folder / "states", job.folder / "average.pt"
    job.train(None, SaveTrainingStateCallback(states, save_every_n_epochs=1))
    with contextlib.redirect_stdout(io.StringIO()):
        assert command_line(["checkpoints", "average", str(states), "--last", "5", "--output", str(output)]) == 0
    job.trainer().load_checkpoint(output, load_optimizer=False, load_scheduler=False)
    return job.model


def _muon(job: Job) -> nn.Module:
    def is_hidden(name: str, parameter: torch.Tensor) -> bool:
        return parameter.ndim == 2 and name.endswith("weight") and not re.match(job.head, name)

    named = list(job.model.named_parameters())
    hidden = [parameter for name, parameter in named if is_hidden(name, parameter)]
    others = [parameter for name, parameter in named if not is_hidden(name, parameter)]
    muon = torch.optim.Muon(hidden, lr=job.lr, adjust_lr_fn="match_rms_adamw")
    return job.train([muon, torch.optim.AdamW(others, lr=job.lr)])


def _schedule_free(job: Job) -> nn.Module:
    warmup = len(job.rows[0]) // job.task.batch_size
    return job.train(schedulefree.AdamWScheduleFree(job.model.parameters(), lr=job.lr, warmup_steps=warmup))


def _suggested(job: Job) -> nn.Module:
    trainer = job.trainer()
    trainer.find_lr(job.rows, per_device_batch_size=job.task.batch_size).apply()
    job.finish(trainer)
    return job.model


def _from_scratch(job: Job) -> nn.Module:
    torch.manual_seed(job.seed)
    job.model = job.task.with_new_head(job.task.make(), job.seed)
    return job.train()


def _fine_tune(job: Job) -> nn.Module:
    settings = {"lr": job.lr, "per_device_batch_size": job.task.batch_size}
    fine_tune(job.model, nn.CrossEntropyLoss(), job.rows, job.task.epochs - 1, callbacks=(), seed=job.seed, **settings)
    return job.model


@dataclass(frozen=True)
class Technique:
    """`train` returns the trained model; `own_rate` says that its rate is tuned as that of plain training is."""

    train: Callable[[Job], nn.Module]
    own_rate: bool = False
    leaves_out: Sequence[str] = ()


PLAIN = "plain"
_WARM_COSINE = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1)
_WSD = WSDLrScheduler.create_scheduler_fn(num_warmup_epochs=1, decay_phase_ratio=0.2)


def _layer_wise(job: Job) -> nn.Module:
    return job.train(torch.optim.AdamW(param_groups(job.model, lr=job.lr, layer_decay=0.8)))


LAYER_WISE = {"`param_groups(model, lr=..., layer_decay=0.8)`": Technique(_layer_wise, own_rate=True)}
TECHNIQUES: dict[str, Technique] = {
    PLAIN: Technique(Job.train, own_rate=True),
    "`ModelEmaCallback(decay=0.98)`": Technique(lambda job: _ema(job, 0.98)),
    "`ModelEmaCallback(decay=0.9)`": Technique(lambda job: _ema(job, 0.9)),
    "`SWACallback(start=0.5)`": Technique(_swa),
    "`checkpoints average --last 5`": Technique(_mean_of_states),
    "`one_cycle()`": Technique(lambda job: job.train(create_scheduler_fn=one_cycle()), own_rate=True),
    "`CosineLrScheduler`, 1 epoch of warm-up": Technique(
        lambda job: job.train(create_scheduler_fn=_WARM_COSINE), own_rate=True
    ),
    "`WSDLrScheduler`, 1 epoch of warm-up, `decay_phase_ratio=0.2`": Technique(
        lambda job: job.train(create_scheduler_fn=_WSD), own_rate=True
    ),
    "`optimizer=[Muon(...), AdamW(...)]`": Technique(_muon, own_rate=True, leaves_out=["digits, CNN"]),
    "`schedulefree.AdamWScheduleFree`": Technique(_schedule_free, own_rate=True),
    **LAYER_WISE,
    "`gradient_clip_norm=1.0`": Technique(lambda job: job.train(gradient_clip_norm=1.0)),
    "`find_lr(...).apply()`": Technique(_suggested),
}
FINE_TUNING: dict[str, Technique] = {
    PLAIN: TECHNIQUES[PLAIN],
    "a model with random weights": Technique(_from_scratch, own_rate=True),
    "`fine_tune(...)`": Technique(_fine_tune, own_rate=True),
    '`UnfreezeCallback({1: HEAD, 4: "."})`': Technique(
        lambda job: job.train(None, UnfreezeCallback({1: job.head, 4: "."})), own_rate=True
    ),
    **LAYER_WISE,
}
ALL = {**TECHNIQUES, **FINE_TUNING}
