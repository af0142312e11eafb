"""Names of transformers' Trainer that scripts use: what they read, and errors for what this trainer does not have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from torch import nn

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.facts.settings import check_optimizer
from pytorch_accelerated.huggingface.arguments.fields import SaveStrategy
from pytorch_accelerated.huggingface.arguments.parallel import deepspeed
from pytorch_accelerated.huggingface.events import is_ours
from pytorch_accelerated.huggingface.training_args import TrainingArguments
from pytorch_accelerated.ranks.accelerators import send_to_device

_GRADIENTS = "Set `max_grad_norm` to 0, and change gradients in `on_pre_optimizer_step`."
_SEARCH = "Override `call_model_init`, which gets the trial, or `hyperparameter_search`."
_SHARDED = "Shard the model with `fsdp`."
# Methods of `transformers`' Trainer that it calls itself, in any version. This trainer would never call them.
_HOOKS_ELSEWHERE = {
    **dict.fromkeys(("_clip_grad_norm", "_has_mixed_mesh_grads", "_mixed_mesh_grad_norm"), _GRADIENTS),
    **dict.fromkeys(("_finish_current_push", "_push_from_checkpoint"), "Upload in `on_save` of a callback."),
    **dict.fromkeys(("_hp_search_setup", "_report_to_hp_search", "_tune_save_checkpoint"), _SEARCH),
    **dict.fromkeys(("get_cp_size", "get_sp_size", "get_tp_size", "_prepare_context_parallel_inputs"), _SHARDED),
    **dict.fromkeys(("_defer_fsdp_gradient_reduction", "_sync_replicated_trainable_parameters"), _SHARDED),
    "_build_accelerator_args": "Give the arguments, or configure accelerate by its variables.",
    "_finalize_training": "Override `train`, which returns the result, or use `on_train_end` of a callback.",
    "_get_grad_norm": "Override `log`, which gets it.",
    "_get_learning_rate": "Override `log`, which gets it, or call `get_learning_rates`.",
    "_get_num_items_in_batch": "Override `count_items`, which gets one batch.",
    "_get_output_dir": "Give `output_dir`, and read `args.output_dir`.",
    "_init_training_state": "Change `state` in `on_train_begin` of a callback.",
    "_inner_training_loop": "Override `training_step`, or use the native Trainer.",
    "_issue_warnings_after_load": "Override `_load_from_checkpoint`.",
    "_load_rng_state": "Set generators in `on_train_begin` of a callback.",
    "_load_scaler": "Override `_load_optimizer_and_scheduler`, and call that of the base.",
    "_maybe_log_save_evaluate": "Override `log`, `evaluate` or `_save_checkpoint`.",
    "_prepare_for_training": "Override `create_optimizer_and_scheduler` or `get_train_dataloader`.",
    "_prepare_input": "Override or call `_prepare_inputs`, which gets the whole batch.",
    "_rotate_checkpoints": "Override `_save_checkpoint`, which deletes the oldest at its end.",
    "_run_epoch": "Override `training_step`, or use the native Trainer.",
    "_track_num_input_tokens": "Set `main_input_name` of the model to what counts.",
    "_update_auto_batch_size": "Override `get_train_dataloader`, and read `_train_batch_size` there.",
    "_validate_args": "Check them in `__init__`.",
    "_wrap_model": "Use accelerate's configuration, or the native Trainer.",
    "autocast_smart_context_manager": "Override `compute_loss_context_manager`.",
    "create_accelerator_and_postprocess": "Give the arguments, or configure accelerate by its variables.",
    "prediction_loop": "Override or call `evaluation_loop`.",
}

# Methods of `transformers`' Trainer that scripts call.
METHODS_ELSEWHERE = {
    **_HOOKS_ELSEWHERE,
    "init_hf_repo": "Call `huggingface_hub.create_repo(...)`.",
    "push_to_hub": "Call `trainer.model.push_to_hub(...)`, and the same of the `processing_class`.",
}


_LOADS = "_load_optimizer_and_scheduler"


def refuse_hooks_that_do_not_exist(kind: type[Any]) -> None:
    """Raise a ConfigurationError if a subclass overrides a method that would never be called."""
    for name, remedy in _HOOKS_ELSEWHERE.items():
        if hasattr(kind, name):
            raise ConfigurationError(f"{kind.__name__} defines `{name}`, which would never be called. {remedy}")
    for base in kind.__mro__:
        method = None if is_ours(base) else vars(base).get(_LOADS)
        if inspect.isfunction(method) and _LOADS not in inspect.unwrap(method).__code__.co_names:
            raise ConfigurationError(
                f"{base.__name__} defines `{_LOADS}` without calling that of the base. Here both are loaded with the "
                f"rest of the run before it is called, which it cannot change. Call `super().{_LOADS}(checkpoint)`."
            )


def complaints_about_parts(
    args: TrainingArguments, model: Any, model_init: Any, optimizers: tuple[Any, Any], optimizer_cls_and_kwargs: Any
) -> list[str]:
    """The reasons why a trainer cannot be made of what its constructor was given.

    Raises:
        ArgumentTypeError: for arguments, a model or an optimizer of the wrong type.
    """
    if not isinstance(args, TrainingArguments):
        name = f"{type(args).__module__}.{type(args).__qualname__}"
        raise ArgumentTypeError(f"`args` is a {name}: give TrainingArguments of pytorch_accelerated.huggingface.")
    complaints = []
    optimizer, scheduler = optimizers
    if (model is None) == (model_init is None):
        both = "both are given" if model is not None else "neither is given"
        complaints.append(f"a trainer needs either `model` or `model_init`, but {both}: give one")
    elif model is not None and not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"`model` is {model!r}, which is not an nn.Module. Give an instance of one.")
    if (optimizer is not None or scheduler is not None) and (model_init is not None or args.fsdp):
        complaints.append("`optimizers` don't go with `model_init` or `fsdp`: pass `optimizer_cls_and_kwargs`")
    if optimizer is not None and optimizer_cls_and_kwargs is not None:
        complaints.append("`optimizers` and `optimizer_cls_and_kwargs` both give an optimizer: leave one out")
    if optimizer is not None:
        check_optimizer(optimizer, (), has_own_step=True)  # its parameters are checked when it trains
    if args.deepspeed is not None:
        complaints += deepspeed().complaints_about_parts(args, *optimizers)
    if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
        complaints.append("`args.metric_for_best_model` must be provided, because `save_strategy` is 'best'")
    return complaints


def refuse(complaints: list[str]) -> NoReturn:
    """Raise one ConfigurationError with all complaints."""
    text = "; ".join(complaints)
    raise ConfigurationError(f"{text[0].upper()}{text[1:]}.")


# Attributes of features that aren't in use, and their values.
_NOT_IN_USE = {
    "hp_name": None,
    "hp_search_backend": None,
    "hub_model_id": None,
    "is_distributed_loading_by_transformers": False,
    "is_fsdp_xla_enabled": False,
    "is_fsdp_xla_v1_enabled": False,
    "is_fsdp_xla_v2_enabled": False,
    "is_model_parallel": False,
    "neftune_noise_alpha": None,
}


# Copies of `evaluate` in older scripts call it. Memory is not measured.
_NO_MEMORY_TRACKER = SimpleNamespace(start=lambda: None, stop_and_update_metrics=lambda metrics=None: None)


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda trainer: value


# A function of the trainer for each attribute; for a method, it returns the method.
READ_BY_SCRIPTS: dict[str, Callable[[Any], Any]] = {
    **{name: _always(value) for name, value in _NOT_IN_USE.items()},
    "current_flos": lambda trainer: trainer._engine.training.counter.flos if trainer.is_in_train else 0,
    "current_gradient_accumulation_steps": lambda trainer: trainer._engine.batches_of_update,
    "deepspeed": lambda trainer: (
        trainer.model_wrapped if trainer.is_deepspeed_enabled and trainer.is_in_train else None
    ),
    "is_deepspeed_enabled": lambda trainer: trainer.args.deepspeed is not None,
    "tokenizer": lambda trainer: trainer.processing_class,
    "_memory_tracker": _always(_NO_MEMORY_TRACKER),
    "_get_learning_rate": lambda trainer: lambda: trainer.get_learning_rates()[0],
    "_get_output_dir": lambda trainer: lambda trial=None: str(trainer.args.output_dir),
    "_prepare_input": lambda trainer: lambda data: send_to_device(data, trainer.args.device),
    "autocast_smart_context_manager": lambda trainer: lambda cache_enabled=True: trainer.accelerator.autocast(),
    "gather_function": lambda trainer: lambda data, use_gather_object=False: trainer._nested_gather(data),
    "get_cp_size": _always(lambda: 1),
    "get_sp_size": _always(lambda: 1),
    "get_tp_size": _always(lambda: 1),
}
