"""Which hooks and events there are, in which order, and with which arguments."""

from typing import Any

import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    ModelEmaCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TrainerCallback,
)
from tests.differential.scenarios.common import attempt, dataset, train, trainer

HOOKS = """
    create_train_dataloader create_eval_dataloader create_scheduler training_run_start training_run_epoch_end
    training_run_end evaluation_run_start evaluation_run_end train_epoch_start calculate_train_batch_loss
    backward_step optimizer_step scheduler_step optimizer_zero_grad train_epoch_end eval_epoch_start
    calculate_eval_batch_loss eval_epoch_end _run_train_epoch _run_eval_epoch
""".split()
EVENTS = """
    on_init_end on_training_run_start on_train_epoch_start on_train_step_start on_train_step_end on_train_epoch_end
    on_eval_epoch_start on_eval_step_start on_eval_step_end on_eval_epoch_end on_training_run_epoch_end
    on_training_run_end on_evaluation_run_start on_evaluation_run_end on_stop_training_error
""".split()


def _recording(stop_in: str = "") -> tuple[Any, Any, list[str]]:
    calls: list[str] = []

    def hook(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if name == stop_in:
                raise StopTrainingError("asked for")
            return getattr(Trainer, name)(self, *args, **kwargs)

        return call

    def event(name: str) -> Any:
        def call(self: Any, trainer: Any, **kwargs: Any) -> None:
            calls.append(name)
            if name == stop_in:
                raise StopTrainingError("asked for")

        return call

    recorder = type("Recorder", (TrainerCallback,), {name: event(name) for name in EVENTS})
    return type("Recorded", (Trainer,), {name: hook(name) for name in HOOKS}), recorder, calls


def _run(*more: Any, stop_in: str = "", **kwargs: Any) -> Any:
    base, recorder, calls = _recording(stop_in)
    outcome = attempt(lambda: train(trainer(base, callbacks=[recorder, *more]), **kwargs).run_history.current_epoch)
    # Without the hooks that make things: how often those are called is nobody's business.
    shortened = [call for call in calls if call not in ("create_scheduler", "on_init_end", "scheduler_step")]
    return {"calls": shortened, "epoch at the end": outcome}


def scheduler_steps() -> Any:
    """How often `scheduler_step` is called, with a scheduler and without one."""

    def run(**kwargs: Any) -> int:
        base, recorder, calls = _recording()
        train(trainer(base, callbacks=[recorder]), num_epochs=1, **kwargs)
        return calls.count("scheduler_step")

    factory = {"create_scheduler_fn": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
    return {"with": run(**factory), "without": run(), "accumulation": run(**factory, gradient_accumulation_steps=2)}


def with_other_callbacks() -> Any:
    return {
        "limited": _run(LimitBatchesCallback(1), num_epochs=1),
        "limited evaluation": _run(
            LimitEvalStepsCallback(2, limit_intermediate_only=False), num_epochs=1, eval_rows=20
        ),
        "steps": _run(StepBasedEvaluationCallback(2), num_epochs=1),
        "steps, limited": _run(StepBasedEvaluationCallback(2), LimitEvalStepsCallback(1), num_epochs=1),
        "steps, accumulation": _run(StepBasedEvaluationCallback(1), num_epochs=1, gradient_accumulation_steps=3),
        "average": _run(ModelEmaCallback(decay=0.5), num_epochs=1),
    }


def stopping() -> Any:
    places = [
        *EVENTS[1:12],
        "calculate_train_batch_loss",
        "train_epoch_end",
        "eval_epoch_end",
        "training_run_epoch_end",
    ]
    return {place: attempt(lambda place=place: _run(stop_in=place, rows=8)) for place in places}


def arguments_of_events() -> Any:
    """The names of what each event gets."""
    seen: dict[str, Any] = {}

    def event(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            seen[name] = {"by position": len(args), **{key: type(value).__name__ for key, value in kwargs.items()}}

        return call

    recorder = type("Recorder", (TrainerCallback,), {name: event(name) for name in EVENTS if name != "on_init_end"})
    made = train(trainer(callbacks=[recorder, StepBasedEvaluationCallback(2)]), num_epochs=1)
    made.evaluate(dataset(5), 4, {"num_workers": 0})
    return seen
