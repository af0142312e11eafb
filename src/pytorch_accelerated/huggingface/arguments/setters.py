"""The methods of training arguments that set several of them at once, `set_training` for example."""

from __future__ import annotations

from typing import Any, TypeVar

from pytorch_accelerated.errors import ArgumentTypeError

T = TypeVar("T")

# Of each method: the parameters in their order, each with the argument that it sets and its default; then what else it
# sets. An argument that is left out gets that default, whatever it was before.
_SETTERS: dict[str, tuple[dict[str, tuple[str, Any]], dict[str, Any]]] = {
    "set_training": (
        {
            "learning_rate": ("learning_rate", 5e-5),
            "batch_size": ("per_device_train_batch_size", 8),
            "weight_decay": ("weight_decay", 0.0),
            "num_epochs": ("num_train_epochs", 3),
            "max_steps": ("max_steps", -1),
            "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
            "seed": ("seed", 42),
            "activation_checkpointing": ("gradient_checkpointing", False),
            "gradient_checkpointing": ("gradient_checkpointing", None),
        },
        {"do_train": True},
    ),
    "set_evaluate": (
        {
            "strategy": ("eval_strategy", "no"),
            "steps": ("eval_steps", 500),
            "batch_size": ("per_device_eval_batch_size", 8),
            "accumulation_steps": ("eval_accumulation_steps", None),
            "delay": ("eval_delay", None),
            "loss_only": ("prediction_loss_only", False),
        },
        {},
    ),
    "set_testing": (
        {"batch_size": ("per_device_eval_batch_size", 8), "loss_only": ("prediction_loss_only", False)},
        {"do_predict": True},
    ),
    "set_save": (
        {
            "strategy": ("save_strategy", "steps"),
            "steps": ("save_steps", 500),
            "total_limit": ("save_total_limit", None),
            "on_each_node": ("save_on_each_node", False),
        },
        {},
    ),
    "set_logging": (
        {
            "strategy": ("logging_strategy", "steps"),
            "steps": ("logging_steps", 500),
            "report_to": ("report_to", "none"),
            "level": ("log_level", "passive"),
            "first_step": ("logging_first_step", False),
            "nan_inf_filter": ("logging_nan_inf_filter", False),
            "on_each_node": ("log_on_each_node", False),
            "replica_level": ("log_level_replica", "passive"),
        },
        {},
    ),
    "set_optimizer": (
        {
            "name": ("optim", "adamw_torch"),
            "learning_rate": ("learning_rate", 5e-5),
            "weight_decay": ("weight_decay", 0.0),
            "beta1": ("adam_beta1", 0.9),
            "beta2": ("adam_beta2", 0.999),
            "epsilon": ("adam_epsilon", 1e-8),
            "args": ("optim_args", None),
        },
        {},
    ),
    "set_lr_scheduler": (
        {
            "name": ("lr_scheduler_type", "linear"),
            "num_epochs": ("num_train_epochs", 3.0),
            "max_steps": ("max_steps", -1),
            "warmup_steps": ("warmup_steps", 0),
        },
        {},
    ),
    "set_dataloader": (
        {
            "train_batch_size": ("per_device_train_batch_size", 8),
            "eval_batch_size": ("per_device_eval_batch_size", 8),
            "drop_last": ("dataloader_drop_last", False),
            "num_workers": ("dataloader_num_workers", 0),
            "pin_memory": ("dataloader_pin_memory", True),
            "persistent_workers": ("dataloader_persistent_workers", False),
            "prefetch_factor": ("dataloader_prefetch_factor", None),
            "multiprocessing_context": ("dataloader_multiprocessing_context", None),
            "in_order": ("dataloader_in_order", True),
            "auto_find_batch_size": ("auto_find_batch_size", False),
            "ignore_data_skip": ("ignore_data_skip", False),
            "sampler_seed": ("data_seed", None),
        },
        {},
    ),
    "set_push_to_hub": (
        {
            "model_id": ("hub_model_id", None),
            "strategy": ("hub_strategy", "every_save"),
            "token": ("hub_token", None),
            "private_repo": ("hub_private_repo", None),
            "always_push": ("hub_always_push", False),
            "revision": ("hub_revision", None),
        },
        {"push_to_hub": True},
    ),
}
_INSTEAD_OF_NONE = {"eval_delay": 0}


def with_setters(kind: type[T]) -> type[T]:
    """A class of arguments with these methods."""
    for name, (parameters, constants) in _SETTERS.items():
        setattr(kind, name, _setter(name, parameters, constants))
    return kind


def _setter(name: str, parameters: dict[str, tuple[str, Any]], constants: dict[str, Any]) -> Any:
    def setter(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        unknown = [repr(one) for one in (*args[len(parameters) :], *(set(given) - set(parameters)))]
        if unknown:
            raise ArgumentTypeError(f"`{name}` got {', '.join(unknown)}. It takes {', '.join(parameters)}.")
        for parameter, (field, default) in parameters.items():
            value = given.get(parameter, default)
            if value is None:
                value = _INSTEAD_OF_NONE.get(field)
            if value is not None or field != "gradient_checkpointing":  # of whose two names one suffices
                setattr(self, field, value)
        for field, value in constants.items():
            setattr(self, field, value)
        self._complete()
        return self

    setter.__name__ = name
    setter.__qualname__ = f"TrainingArguments.{name}"
    setter.__doc__ = (
        f"Set {', '.join(f'`{field}`' for field in (*dict(parameters.values()), *constants))}, and return the "
        "arguments. What is left out gets its default."
    )
    return setter
