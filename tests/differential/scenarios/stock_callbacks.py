"""The callbacks that the package brings, and the handler."""

import os
from typing import Any

import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    CallbackHandler,
    EarlyStoppingCallback,
    LogMetricsCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    StepBasedEvaluationCallback,
    TerminateOnNaNCallback,
    TrainerCallback,
    WSDCheckpointCallback,
)
from pytorch_accelerated.schedulers import WSDLrScheduler
from tests.differential.scenarios.common import attempt, dataset, grid, history_of, plain, train, trainer, weights_of


def _scripted(values: list[float], metric: str = "scripted") -> Any:
    """A callback that records `values` as a metric, one an epoch."""

    class Scripted(TrainerCallback):
        def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            trainer.run_history.update_metric(metric, values[trainer.run_history.current_epoch - 1])

    return Scripted()


def early_stopping() -> Any:
    """After how many epochs a run ends."""

    def run(values: list[float], **arguments: Any) -> Any:
        made = trainer(callbacks=[_scripted(values), EarlyStoppingCallback(watch_metric="scripted", **arguments)])
        train(made, num_epochs=len(values), rows=4)
        return len(made.run_history.get_metric_values("train_loss_epoch"))

    falling, flat, back = [5.0, 4.0, 3.0, 2.0, 1.0, 0.5], [1.0] * 6, [3.0, 2.0, 2.5, 2.6, 1.0, 0.5]
    nan = float("nan")
    return grid(
        run,
        {
            "falling": {"values": falling},
            "flat": {"values": flat},
            "flat, patience 2": {"values": flat, "early_stopping_patience": 2},
            "flat, patience 3": {"values": flat, "early_stopping_patience": 3},
            "back": {"values": back},
            "back, patience 2": {"values": back, "early_stopping_patience": 2},
            "back, patience 3": {"values": back, "early_stopping_patience": 3},
            "threshold": {"values": [3.0, 2.9, 2.0, 1.9, 1.8, 1.0], "early_stopping_threshold": 0.5},
            "slow": {"values": [3.0, 2.995, 2.99, 2.985, 2.98, 2.975]},
            "greater is better": {"values": [1.0, 2.0, 3.0, 2.0, 1.0, 0.0], "greater_is_better": True},
            "of its own": {"values": falling, "greater_is_better": True},
            "nan": {"values": [3.0, nan, 2.0, nan, nan, 1.0], "early_stopping_patience": 2},
            "nan at first": {"values": [nan, nan, 2.0, 1.0, 0.5, 0.2], "early_stopping_patience": 3},
        },
    )


def saving_the_best() -> Any:
    """Which epoch's weights a run ends with, and what the file has."""

    def run(values: list[float], **arguments: Any) -> Any:
        callback = SaveBestModelCallback(save_path="best.pt", watch_metric="scripted", **arguments)
        made = trainer(callbacks=[_scripted(values), callback])
        train(made, num_epochs=len(values), rows=4)
        saved = torch.load("best.pt", weights_only=True)
        return {
            "keys": sorted(saved),
            "file": {name: round(value.double().sum().item(), 9) for name, value in saved["model_state_dict"].items()},
            "model": weights_of(made.get_model()),
            "rest": {key: plain(value) for key, value in saved.items() if not key.endswith("state_dict")},
            "best": plain(callback.best_metric),
        }

    return grid(
        run,
        {
            "falling": {"values": [3.0, 2.0, 1.0]},
            "back": {"values": [3.0, 1.0, 2.0]},
            "rising": {"values": [1.0, 2.0, 3.0]},
            "equal": {"values": [1.0, 1.0, 1.0]},
            "greater is better": {"values": [1.0, 3.0, 2.0], "greater_is_better": True},
            "nan": {"values": [2.0, float("nan"), 3.0]},
            "without optimizer": {"values": [3.0, 1.0, 2.0], "save_optimizer": False},
            "without scheduler": {"values": [3.0, 1.0, 2.0], "save_scheduler": False},
            "not loaded": {"values": [3.0, 1.0, 2.0], "load_saved_checkpoint": False},
        },
    )


def averaging() -> Any:
    """Metrics and weights of a run with an average of the model."""

    def run(decay: float = 0.5, more: Any = (), train_arguments: Any = None, **arguments: Any) -> Any:
        callback = ModelEmaCallback(decay=decay, **arguments)
        made = train(trainer(callbacks=[callback, *more]), num_epochs=3, **(train_arguments or {}))
        return {
            "history": history_of(made),
            "average": weights_of(callback.ema_model.module),
            "model": weights_of(made.get_model()),
            "files": sorted(os.listdir()),
        }

    return grid(
        run,
        {
            "plain": {},
            "another decay": {"decay": 0.9},
            "not evaluated": {"evaluate_during_training": False},
            "accumulation": {"train_arguments": {"gradient_accumulation_steps": 3}},
            "without evaluation": {"train_arguments": {"eval_rows": None}, "evaluate_during_training": False},
            "a metric of its own": {"more": [_scripted([3.0, 2.0, 1.0])]},
        },
    )


def average_file() -> Any:
    train(trainer(callbacks=[ModelEmaCallback(decay=0.5)]), num_epochs=2)
    saved = torch.load("ema_model.pt", weights_only=True)
    return {"keys": sorted(saved), "model": sorted(saved["model_state_dict"])}


def logging() -> Any:
    """What `log_metrics` gets."""
    logged: list[Any] = []

    class Logs(LogMetricsCallback):
        def log_metrics(self, trainer: Any, metrics: Any) -> None:
            logged.append({name: float(value) for name, value in metrics.items()})

    class Records(TrainerCallback):
        def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            trainer.run_history.update_metric("train_extra", 1.0)

        def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            trainer.run_history.update_metric("accuracy", 2.0)

    seen = {}
    for name, callbacks, arguments in (
        ("plain", [Logs], {}),
        ("metrics before", [Records, Logs], {}),
        ("metrics after", [Logs, Records], {}),
        ("no evaluation", [Records, Logs], {"eval_rows": None}),
    ):
        logged.clear()
        train(trainer(callbacks=callbacks), **arguments)
        seen[name] = plain([*logged])
    logged.clear()
    trainer(callbacks=[Logs]).evaluate(dataset(5), 4, {"num_workers": 0})
    seen["evaluation"] = plain([*logged])
    return seen


def not_a_number() -> Any:
    """What a loss of NaN does."""

    def run(base: Any, callbacks: Any) -> Any:
        made = trainer(base, callbacks=callbacks)
        outcome = attempt(lambda: train(made).run_history.current_epoch)
        return {"outcome": outcome, "epochs": len(list(made.run_history.get_metric_values("train_loss_epoch")))}

    class BadInTraining(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> Any:
            result = super().calculate_train_batch_loss(batch)
            return {**result, "loss": result["loss"] * float("nan")}

    class BadInEvaluation(Trainer):
        def calculate_eval_batch_loss(self, batch: Any) -> Any:
            result = super().calculate_eval_batch_loss(batch)
            return {**result, "loss": result["loss"] * float("nan")}

    return {
        "in training": attempt(lambda: run(BadInTraining, [TerminateOnNaNCallback])),
        "in evaluation": attempt(lambda: run(BadInEvaluation, [TerminateOnNaNCallback])),
        "without the callback": attempt(lambda: run(BadInTraining, [])),
    }


def evaluating_by_steps() -> Any:
    def run(every: int, **arguments: Any) -> Any:
        made = train(trainer(callbacks=[StepBasedEvaluationCallback(every)]), **arguments)
        return {"history": history_of(made), "weights": weights_of(made.model)}

    return grid(
        run,
        {
            "every": {"every": 1},
            "every second": {"every": 2},
            "every fifth": {"every": 5},
            "accumulation": {"every": 1, "gradient_accumulation_steps": 3},
            "without evaluation": {"every": 1, "eval_rows": None},
        },
    )


def warmup_stable_decay() -> Any:
    """The files of a run with checkpoints before and after the decay."""

    def run(folder: str, num_checkpoints: int) -> Any:
        factory = WSDLrScheduler.create_scheduler_fn(num_checkpoints=num_checkpoints, num_warmup_epochs=0)
        made = trainer(callbacks=[WSDCheckpointCallback(save_dir=folder)])
        train(made, num_epochs=4, rows=40, eval_rows=None, create_scheduler_fn=factory)
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))

    return grid(run, {name: {"folder": name, "num_checkpoints": n} for n, name in enumerate(("one", "two"), 1)})


def handlers() -> Any:
    """What `CallbackHandler` takes for a callback."""
    return {
        "no class at all": {"outcome": attempt(lambda: CallbackHandler([3]).call_event("on_train_epoch_end", None))}
    }
