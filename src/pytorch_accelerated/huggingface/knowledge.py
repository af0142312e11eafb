"""What a trainer knows of its model and its own class, and what it refuses because of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, DataError
from pytorch_accelerated.huggingface.arguments import TrainingArguments
from pytorch_accelerated.huggingface.strategies import IntervalStrategy, SaveStrategy

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.trainer import Trainer

# What wraps the loop elsewhere; here the loop is the native trainer's.
_HOOKS_ELSEWHERE = {
    "_inner_training_loop": "`training_step`, or the hooks of the native `pytorch_accelerated.Trainer`",
    "_wrap_model": "accelerate's configuration, or `_prepare_model_optimizer_and_dataloaders` of the native `Trainer`",
    "_maybe_log_save_evaluate": "`log`, `evaluate` or `_save_checkpoint`, or set flags of the control in a callback",
}


def accepts_loss_kwargs(model: Any) -> bool:
    """Whether the model takes ``num_items_in_batch`` and divides its loss by it."""
    own_word = getattr(model, "accepts_loss_kwargs", None)
    if own_word is not None:
        return bool(own_word)
    parameters = inspect.signature(model.forward).parameters
    return "num_items_in_batch" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def predicts_next_token(model: Any) -> bool:
    """Whether the logits of a position are about the label of the next one."""
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def returns_loss_by_itself(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether a model that has no labels at all returns a loss, as those do that compare pairs."""
    asked = inputs.get("return_loss")
    if asked is None:
        parameter = inspect.signature(model.forward).parameters.get("return_loss")
        asked = parameter is not None and parameter.default is True
    return bool(asked)


def own_loss(outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The loss that a model has returned: "loss" of a mapping, or the first of a tuple.

    Raises:
        DataError: if there is none; names what there is.
    """
    if isinstance(outputs, Mapping):
        if outputs.get("loss") is None:
            raise DataError(
                f"The model returned no loss, only {', '.join(map(repr, outputs)) or 'nothing'}. The inputs were "
                f"{', '.join(map(repr, inputs))}. Put labels into the rows, under a name that its forward takes, or "
                "pass `compute_loss_func`."
            )
        return outputs["loss"]  # type: ignore[no-any-return]
    first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    if not isinstance(first, torch.Tensor):
        raise DataError(
            f"The model returned a {type(outputs).__name__}, in which there is no loss. Return a dict with 'loss', or "
            "a tuple that begins with it, or pass `compute_loss_func`."
        )
    return first


def refuse_hooks_that_do_not_exist(kind: type[Any]) -> None:
    """Refuse a subclass that overrides what would never be called.

    Raises:
        ConfigurationError: names what to override instead.
    """
    for name, remedy in _HOOKS_ELSEWHERE.items():
        if hasattr(kind, name):
            raise ConfigurationError(
                f"{kind.__name__} defines `{name}`, which this trainer does not have, so it would never be called. "
                f"Override {remedy}."
            )


def refuse_arguments(args: Any) -> None:
    """Refuse arguments that are none of ours.

    Raises:
        ArgumentTypeError: says what they are.
    """
    if not isinstance(args, TrainingArguments):
        kind = type(args)
        raise ArgumentTypeError(
            f"`args` is of the class {kind.__module__}.{kind.__qualname__}, whose settings this trainer does not know. "
            f"Give TrainingArguments of {TrainingArguments.__module__.rpartition('.')[0]}, for example "
            "TrainingArguments('results')."
        )


def refuse_construction(trainer: Trainer, model: Any) -> None:
    """Refuse what a trainer cannot be made of. All complaints come in one error.

    Raises:
        ArgumentTypeError: for a model that is none.
        ConfigurationError: for all else.
    """
    args, complaints = trainer.args, []
    if (model is None) == (trainer.model_init is None):
        both = "both are given" if model is not None else "neither is given"
        complaints.append(f"a trainer needs either `model` or `model_init`, but {both}: give one")
    elif model is not None and not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"`model` is {model!r}, which is no nn.Module. Give an instance of one, or a function that makes it as "
            "`model_init`."
        )
    has_optimizers = trainer.optimizer is not None or trainer.lr_scheduler is not None
    if trainer.model_init is not None and has_optimizers:
        complaints.append(
            "`optimizers` belong to the parameters of one model, but `model_init` makes another one for each training: "
            "pass `optimizer_cls_and_kwargs`, or override `create_optimizer`"
        )
    if trainer.optimizer is not None and trainer.optimizer_cls_and_kwargs is not None:
        complaints.append("`optimizers` and `optimizer_cls_and_kwargs` both give an optimizer: leave one out")
    if args.fsdp and has_optimizers:
        complaints.append(
            "`optimizers` were made of whole parameters, but `fsdp` cuts them: pass `optimizer_cls_and_kwargs`, or "
            "override `create_optimizer`"
        )
    if trainer.train_dataset is not None:
        complaints += _complaints_about_datasets(trainer)
    if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
        complaints.append(
            "`args.metric_for_best_model` must be provided, because `save_strategy` is 'best': nothing else tells what "
            "that is"
        )
    if args.batch_eval_metrics and not _takes_result_flag(trainer.compute_metrics):
        complaints.append(
            "`batch_eval_metrics` is True, so `compute_metrics` is called after each batch, but it has no parameter "
            "`compute_result` to be told when the last one has come: add it, and return the metrics when it is True"
        )
    _refuse(complaints)


def refuse_training(trainer: Trainer) -> None:
    """Refuse to train without what a training needs.

    Raises:
        ConfigurationError: names what is missing.
    """
    _refuse(_complaints_about_datasets(trainer))


def _complaints_about_datasets(trainer: Trainer) -> list[str]:
    args, complaints = trainer.args, []
    if args.eval_strategy != IntervalStrategy.NO and trainer.eval_dataset is None and not _overrides_eval(trainer):
        complaints.append(
            f"`eval_strategy` is {str(args.eval_strategy)!r}, but there is no `eval_dataset` to evaluate: pass one, or "
            "set it to 'no'"
        )
    dataset = trainer.train_dataset
    if dataset is not None and not hasattr(dataset, "__len__") and args.max_steps <= 0:
        complaints.append(
            f"the training set, a {type(dataset).__name__}, has no length, so nobody knows when to stop: set "
            "`max_steps`"
        )
    return complaints


def _takes_result_flag(compute_metrics: Any) -> bool:
    return compute_metrics is None or "compute_result" in inspect.signature(compute_metrics).parameters


def _overrides_eval(trainer: Trainer) -> bool:
    """Whether a method of the user's own knows what to evaluate on."""
    package = __name__.partition(".")[0]
    homes = [
        next(base.__module__ for base in type(trainer).__mro__ if name in vars(base))
        for name in ("evaluate", "get_eval_dataloader", "_evaluate")
    ]
    return any(not home.startswith(f"{package}.") for home in homes)


def _refuse(complaints: list[str]) -> None:
    if complaints:
        text = "; ".join(complaints)
        raise ConfigurationError(f"{text[0].upper() if text[0].isalpha() else text[0]}{text[1:]}.")
