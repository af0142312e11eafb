"""Errors for parts that a trainer cannot use, and for methods of `transformers`' Trainer that it does not have."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec

from torch import nn

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, MissingMethodError
from pytorch_accelerated.huggingface.arguments.deepspeed import check_parts
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy, SaveStrategy
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments
from pytorch_accelerated.training.settings import check_optimizer

Parameters = ParamSpec("Parameters")

_OLD_NAMES = {"tokenizer": "processing_class"}

# Methods of `transformers`' Trainer that scripts override or call. This trainer would never call them.
_HOOKS_ELSEWHERE = {
    "_clip_grad_norm": "Set `max_grad_norm` to 0, and change the gradients in `on_pre_optimizer_step` of a callback.",
    "_get_dataloader": "Override `get_train_dataloader`, `get_eval_dataloader` or `get_test_dataloader`.",
    "_get_grad_norm": "Override `log`, which gets it.",
    "_get_learning_rate": "Override `log`, which gets it, or call `get_learning_rates`.",
    "_get_num_items_in_batch": "Override `count_items`, which gets one batch.",
    "_get_output_dir": "Give `output_dir`, and read `args.output_dir`.",
    "_inner_training_loop": "Override `training_step`, or hooks of the native `pytorch_accelerated.Trainer`.",
    "_load_optimizer_and_scheduler": "Override `create_optimizer_and_scheduler`; their states are loaded afterwards.",
    "_load_rng_state": "Set generators in `on_train_begin` of a callback.",
    "_maybe_log_save_evaluate": "Override `log`, `evaluate` or `_save_checkpoint`, or set flags of the control in a "
    "callback.",
    "_move_model_to_device": "Call `model.to(args.device)`; the trainer does so with its own model.",
    "_prepare_for_training": "Override `create_optimizer_and_scheduler` or `get_train_dataloader`.",
    "_prepare_input": "Override or call `_prepare_inputs`, which gets the whole batch.",
    "_rotate_checkpoints": "Override `_save_checkpoint`, at the end of which the oldest are deleted, or call "
    "`rotate_checkpoints` of huggingface.checkpoints.",
    "_run_epoch": "Override `training_step`, or hooks of the native `pytorch_accelerated.Trainer`.",
    "_save_optimizer_and_scheduler": "Override `_save_checkpoint`.",
    "_save_rng_state": "Override `_save_checkpoint`.",
    "_track_num_input_tokens": "Set `main_input_name` of the model to what counts.",
    "_wrap_model": "Use accelerate's configuration, or hooks of the native `pytorch_accelerated.Trainer`.",
    "autocast_smart_context_manager": "Override `compute_loss_context_manager`.",
    "create_accelerator_and_postprocess": "Give the arguments, or configure accelerate by its variables.",
    "get_batch_samples": "Override `get_train_dataloader`, or `count_items`, which gets one batch.",
    "get_total_train_batch_size": "Give `per_device_train_batch_size` and `gradient_accumulation_steps`.",
    "prediction_loop": "Override or call `evaluation_loop`.",
    "set_initial_training_values": "Give `num_train_epochs` or `max_steps`.",
}

# Methods of `transformers`' Trainer that scripts call.
_METHODS_ELSEWHERE = {
    "hyperparameter_search": "Make a Trainer for each choice, in a loop, with `model_init` or a new model.",
    "init_hf_repo": "Call `huggingface_hub.create_repo(...)`.",
    "push_to_hub": "Call `trainer.model.push_to_hub(...)`, and the same of the `processing_class`; or, after "
    "`trainer.save_model()`, `huggingface_hub.upload_folder(...)`.",
}


def refusing_unknown(init: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Add a clear error for unknown arguments to `init`, including those that a subclass passes on."""

    @functools.wraps(init)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        known = list(inspect.signature(init).parameters)[1:]
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise ArgumentTypeError(" ".join(_explain_unknown(name, known) for name in unknown))
        init(*args, **kwargs)

    return checked


def _explain_unknown(name: str, known: Iterable[str]) -> str:
    if name in _OLD_NAMES:
        remedy = f"It was renamed: pass it as `{_OLD_NAMES[name]}`."
    elif name in (field.name for field in dataclasses.fields(TrainingArguments)):
        remedy = "It is one of the TrainingArguments: give it to these, and pass them as `args`."
    else:
        close = difflib.get_close_matches(name, known, n=1)
        remedy = f"Did you mean `{close[0]}`?" if close else f"It takes {', '.join(known)}."
    return f"The Trainer got `{name}`, but has no argument of that name. {remedy}"


def refuse_hooks_that_do_not_exist(kind: type[Any]) -> None:
    """Raise a ConfigurationError if a subclass overrides a method that would never be called."""
    for name, remedy in _HOOKS_ELSEWHERE.items():
        if hasattr(kind, name):
            raise ConfigurationError(
                f"{kind.__name__} defines `{name}`, which this trainer does not have, so it would never be called. "
                f"{remedy}"
            )


def refuse_method(kind: type[Any], name: str) -> None:
    """Raise a MissingMethodError, an AttributeError, if only the Trainer of `transformers` has a method `name`."""
    if name in _METHODS_ELSEWHERE:
        raise MissingMethodError(
            f"{kind.__name__} has no `{name}`: it trains, evaluates and predicts. {_METHODS_ELSEWHERE[name]}"
        )
    if name in _HOOKS_ELSEWHERE:
        raise MissingMethodError(
            f"{kind.__name__} has no `{name}`, which is a part of transformers' Trainer. {_HOOKS_ELSEWHERE[name]}"
        )


def refuse_arguments(args: Any) -> None:
    """Reject training arguments of another class.

    Raises:
        ArgumentTypeError: names the class, and what to pass.
    """
    if not isinstance(args, TrainingArguments):
        kind = type(args)
        raise ArgumentTypeError(
            f"`args` is of the class {kind.__module__}.{kind.__qualname__}, whose settings this trainer does not know. "
            f"Give TrainingArguments of {TrainingArguments.__module__.rpartition('.')[0]}, for example "
            "TrainingArguments('results')."
        )


def complaints_about_parts(
    args: TrainingArguments,
    *,
    model: Any,
    model_init: Any,
    optimizer: Any,
    scheduler: Any,
    optimizer_cls_and_kwargs: Any,
    compute_metrics: Any,
) -> list[str]:
    """The reasons why a trainer cannot be made of what its constructor was given.

    Raises:
        ArgumentTypeError: for a model, an optimizer or a function of the wrong type.
    """
    complaints = []
    if (model is None) == (model_init is None):
        both = "both are given" if model is not None else "neither is given"
        complaints.append(f"a trainer needs either `model` or `model_init`, but {both}: give one")
    elif model is not None and not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"`model` is {model!r}, which is not an nn.Module. Give an instance of one, or a function that makes it as "
            "`model_init`."
        )
    has_optimizers = optimizer is not None or scheduler is not None
    if model_init is not None and has_optimizers:
        complaints.append(
            "`optimizers` belong to the parameters of one model, but `model_init` makes another one for each training: "
            "pass `optimizer_cls_and_kwargs`, or override `create_optimizer`"
        )
    if optimizer is not None and optimizer_cls_and_kwargs is not None:
        complaints.append("`optimizers` and `optimizer_cls_and_kwargs` both give an optimizer: leave one out")
    complaints += check_parts(
        args,
        has_optimizer=optimizer is not None or optimizer_cls_and_kwargs is not None,
        has_scheduler=scheduler is not None,
    )
    if args.fsdp and has_optimizers:
        complaints.append(
            "`optimizers` were made of whole parameters, but `fsdp` shards them: pass `optimizer_cls_and_kwargs`, or "
            "override `create_optimizer`"
        )
    if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
        complaints.append(
            "`args.metric_for_best_model` must be provided, because `save_strategy` is 'best': nothing else tells what "
            "that is"
        )
    if compute_metrics is not None and not callable(compute_metrics):
        raise ArgumentTypeError(
            f"`compute_metrics` is {compute_metrics!r}, which cannot be called. Give a function of an "
            "EvalPrediction that returns a dict."
        )
    if optimizer is not None:
        check_optimizer(optimizer, (), has_own_step=True)  # its parameters are checked when it trains
    computes_by_batch = args.batch_eval_metrics and compute_metrics is not None
    if computes_by_batch and "compute_result" not in inspect.signature(compute_metrics).parameters:
        complaints.append(
            "`batch_eval_metrics` is True, so `compute_metrics` is called after each batch, but it has no parameter "
            "`compute_result`, which says that the last batch has come: add it, and return the metrics when it is True"
        )
    return complaints


def complaints_about_data(args: TrainingArguments, train_dataset: Any, *, lacks_eval_dataset: bool) -> list[str]:
    """The reasons why a run cannot use these datasets."""
    complaints = []
    if args.eval_strategy != IntervalStrategy.NO and lacks_eval_dataset:
        complaints.append(
            f"`eval_strategy` is {str(args.eval_strategy)!r}, but there is no `eval_dataset` to evaluate: pass one, or "
            "set it to 'no'"
        )
    if train_dataset is not None and not hasattr(train_dataset, "__len__") and args.max_steps <= 0:
        complaints.append(
            f"the training set, a {type(train_dataset).__name__}, has no length, so it is unknown when to stop: set "
            "`max_steps`"
        )
    return complaints


def complaints_about_training(args: TrainingArguments, model: nn.Module, *, makes_optimizer: bool) -> list[str]:
    """The reasons why a training would change nothing."""
    complaints = []
    if not args.num_train_epochs and args.max_steps <= 0:
        complaints.append(
            f"`num_train_epochs` is {args.num_train_epochs!r}, so there is nothing to train: give a number above 0, or "
            "`max_steps`"
        )
    parameters = list(model.parameters())
    if makes_optimizer and parameters and not any(parameter.requires_grad for parameter in parameters):
        complaints.append(
            f"all parameters of the {type(model).__name__} are frozen, so nothing could be learnt: set "
            "`requires_grad` of those that training should change to True"
        )
    return complaints


def refuse(complaints: list[str]) -> None:
    """Raise one ConfigurationError with all complaints, if there are any."""
    if complaints:
        text = "; ".join(complaints)
        raise ConfigurationError(f"{text[0].upper()}{text[1:]}.")


def refuse_foreign_schedule(optimizer: Any, schedule: Any) -> None:
    """Reject a schedule that belongs to another optimizer, if it says so: it would change nothing.

    Raises:
        ConfigurationError: says how to make both.
    """
    scheduled = getattr(schedule, "optimizer", None)
    # Either may be inside accelerate's wrapper.
    if scheduled is not None and getattr(scheduled, "optimizer", scheduled) is not getattr(
        optimizer, "optimizer", optimizer
    ):
        raise ConfigurationError(
            f"The schedule, a {type(schedule).__name__}, belongs to another optimizer than the one that trains, so the "
            "learning rate would never change. Make it of the optimizer that stands before it in `optimizers`; for "
            "that of the trainer, override `create_scheduler`, which gets it."
        )
