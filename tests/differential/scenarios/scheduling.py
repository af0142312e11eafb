"""Schedulers in a run: which rate each update is made with, and how long the schedule is."""

import functools
from typing import Any

import torch

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.schedulers import CosineLrScheduler, StatefulSchedulerBase
from pytorch_accelerated.trainer import Trainer, TrainerPlaceholderValues, TrainerWithTimmScheduler
from tests.differential.scenarios.common import attempt, grid, train, trainer, weights_of


class _Rates(TrainerCallback):
    """The learning rate at each batch, and at the end of each epoch."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.epochs: list[float] = []

    def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
        self.steps.append(trainer.optimizer.param_groups[0]["lr"])

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self.epochs.append(trainer.optimizer.param_groups[0]["lr"])


def _run(base: Any = Trainer, **arguments: Any) -> Any:
    rates = _Rates()
    made = train(trainer(base, callbacks=[rates]), **arguments)
    return {
        "batches": rates.steps,
        "epochs": rates.epochs,
        "last": made.optimizer.param_groups[0]["lr"],
        "weights": weights_of(made.model),
        "kind": type(made.scheduler).__name__ if made.scheduler is None else "a scheduler",
    }


def _with(factory: Any, **arguments: Any) -> dict[str, Any]:
    return {"create_scheduler_fn": factory, **arguments}


def of_torch() -> Any:
    schedulers = torch.optim.lr_scheduler
    p = TrainerPlaceholderValues
    cycle = {"max_lr": 0.5, "epochs": p.NUM_EPOCHS, "steps_per_epoch": p.NUM_UPDATE_STEPS_PER_EPOCH}
    length = p.NUM_EPOCHS * p.NUM_UPDATE_STEPS_PER_EPOCH
    return grid(
        _run,
        {
            "step": _with(functools.partial(schedulers.StepLR, step_size=2)),
            "lambda": _with(functools.partial(schedulers.LambdaLR, lr_lambda=lambda n: 0.9**n)),
            "a lambda as factory": _with(lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9)),
            "one cycle": _with(functools.partial(schedulers.OneCycleLR, **cycle)),
            "arithmetic": _with(functools.partial(schedulers.CosineAnnealingLR, T_max=length)),
            "accumulation": _with(functools.partial(schedulers.StepLR, step_size=1), gradient_accumulation_steps=2),
            "none": {},
        },
    )


def _run_twice(factory: Any, rate: float | None = None) -> Any:
    made = trainer(callbacks=[rates := _Rates()])
    train(made, create_scheduler_fn=factory)
    if rate is not None:
        made.optimizer.param_groups[0]["lr"] = rate
    train(made, create_scheduler_fn=factory)
    return rates.steps


def in_a_second_run() -> Any:
    step = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    cosine = CosineLrScheduler.create_scheduler_fn()
    return {
        "of torch": attempt(lambda: _run_twice(step)),
        "of the library": attempt(lambda: _run_twice(cosine)),
        "after a new rate": attempt(lambda: _run_twice(cosine, 0.5)),
    }


class _Halving(StatefulSchedulerBase):
    def get_updated_values(self, num_updates: int) -> Any:
        return [0.1 * 0.5**num_updates]


class _OwnScheduler(Trainer):
    def create_scheduler(self) -> Any:
        assert self.run_config.num_epochs
        return torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)


class _StepsOnceAnEpoch(Trainer):
    def scheduler_step(self) -> None:
        pass

    def training_run_epoch_end(self) -> None:
        self.scheduler.step()


def of_ones_own() -> Any:
    exponential = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    return {
        "subclass": attempt(lambda: _run(create_scheduler_fn=_Halving)),
        "overridden": attempt(lambda: _run(_OwnScheduler)),
        "once an epoch": attempt(lambda: _run(_StepsOnceAnEpoch, create_scheduler_fn=exponential)),
    }


def of_timm() -> Any:
    from timm.scheduler import CosineLRScheduler, StepLRScheduler

    p = TrainerPlaceholderValues
    cosine = functools.partial(CosineLRScheduler, lr_min=1e-5)
    length = p.NUM_EPOCHS * p.NUM_UPDATE_STEPS_PER_EPOCH
    warmup = {"warmup_t": 1, "warmup_lr_init": 1e-4}
    counted = functools.partial(cosine, t_initial=8, t_in_epochs=False)
    return grid(
        functools.partial(_run, TrainerWithTimmScheduler, num_epochs=4),
        {
            "per epoch": _with(functools.partial(cosine, t_initial=p.NUM_EPOCHS, **warmup)),
            "per update": _with(functools.partial(cosine, t_initial=length, t_in_epochs=False)),
            "steps": _with(functools.partial(StepLRScheduler, decay_t=2, decay_rate=0.5)),
            "accumulation": _with(counted, gradient_accumulation_steps=2),
            "without evaluation": _with(functools.partial(CosineLRScheduler, t_initial=p.NUM_EPOCHS), eval_rows=None),
        },
    )


def placeholders() -> Any:
    """The values that a factory gets."""
    p = TrainerPlaceholderValues
    asked: dict[str, Any] = {}
    for name, expression in {
        "NUM_EPOCHS": lambda: p.NUM_EPOCHS,
        "NUM_UPDATE_STEPS_PER_EPOCH": lambda: p.NUM_UPDATE_STEPS_PER_EPOCH,
        "TRAIN_DATALOADER_LEN": lambda: p.TRAIN_DATALOADER_LEN,
        "EVAL_DATALOADER_LEN": lambda: p.EVAL_DATALOADER_LEN,
        "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH": lambda: p.PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH,
        "times a number": lambda: p.NUM_EPOCHS * 3,
        "a number times": lambda: 3 * p.NUM_EPOCHS,
        "sum": lambda: p.NUM_EPOCHS + 1,
        "a number plus": lambda: 1 + p.NUM_EPOCHS,
        "difference": lambda: p.NUM_EPOCHS - 1,
        "a number minus": lambda: 10 - p.NUM_EPOCHS,
        "quotient": lambda: p.NUM_UPDATE_STEPS_PER_EPOCH / 2,
        "whole quotient": lambda: p.NUM_UPDATE_STEPS_PER_EPOCH // 2,
    }.items():
        try:
            asked[name] = expression()
        except (TypeError, NotImplementedError):
            asked[name] = None
    possible = {name: value for name, value in asked.items() if value is not None}
    seen: dict[str, Any] = {"expressions": {name: name in possible for name in asked}}
    for case, arguments in {
        "plain": {},
        "accumulation": {"gradient_accumulation_steps": 2},
        "short last batch": {"rows": 10},
        "no evaluation": {"eval_rows": None},
        "step limit": {"max_num_train_steps": 4},
    }.items():
        got: dict[str, Any] = {}

        def make(optimizer: Any, got: Any = got, **values: Any) -> Any:
            for name, value in values.items():
                got[name] = {"value": value, "is an int": isinstance(value, int)}
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)

        values = {name: value for name, value in possible.items() if "EVAL" not in name or case != "no evaluation"}
        train(trainer(), create_scheduler_fn=functools.partial(make, **values), **arguments)
        seen[case] = got
    product = p.NUM_EPOCHS * p.NUM_UPDATE_STEPS_PER_EPOCH
    factory = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=product)
    seen["product"] = attempt(lambda: train(trainer(), create_scheduler_fn=factory).scheduler.T_max)
    without = functools.partial(make, length=p.EVAL_DATALOADER_LEN)
    seen["no evaluation, its length"] = attempt(
        lambda: type(train(trainer(), eval_rows=None, create_scheduler_fn=without)).__name__
    )
    return seen
