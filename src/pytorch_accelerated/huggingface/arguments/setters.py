"""The methods of training arguments that set several of them at once, such as `set_training`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pytorch_accelerated.errors import ArgumentTypeError
from pytorch_accelerated.huggingface.arguments.completing import complete
from pytorch_accelerated.huggingface.arguments.fields import Arguments

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Arguments)}


def _setter(name: str, fields: str, defaults: dict[str, Any] | None = None, **constants: Any) -> Callable[..., Any]:
    """A method that sets arguments, and returns them all.

    Args:
        name: of the method.
        fields: its parameters in order, each with the argument that it sets where that has another name.
        defaults: of parameters; the others have the default of their argument.
        constants: further arguments that it sets.
    """
    field_of = {pair.partition(":")[0]: pair.rpartition(":")[2] for pair in fields.split()}

    def setter(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(field_of, args, strict=False)), **kwargs}
        unknown = [repr(one) for one in (*args[len(field_of) :], *(set(given) - set(field_of)))]
        if unknown:
            raise ArgumentTypeError(f"`{name}` got {', '.join(unknown)}. It takes {', '.join(field_of)}.")
        values: dict[str, Any] = {}
        for parameter, field in field_of.items():
            value = given.get(parameter, (defaults or {}).get(parameter, _DEFAULTS[field]))
            if value is not None or field not in values:  # of two parameters for one argument, the one that is given
                values[field] = _DEFAULTS[field] if value is None else value
        for field, value in {**values, **constants}.items():
            setattr(self, field, value)
        complete(self)
        self.check()
        return self

    setter.__name__, setter.__qualname__ = name, f"TrainingArguments.{name}"
    setter.__doc__ = (
        f"Set {', '.join(f'`{field}`' for field in (*dict.fromkeys(field_of.values()), *constants))}, and return the "
        "arguments. A parameter that is left out sets its default."
    )
    return setter


class Setters:
    """Base of `TrainingArguments` with these methods."""

    set_training = _setter(
        "set_training",
        "learning_rate batch_size:per_device_train_batch_size weight_decay num_epochs:num_train_epochs max_steps "
        "gradient_accumulation_steps seed activation_checkpointing:gradient_checkpointing gradient_checkpointing",
        {"gradient_checkpointing": None},
        do_train=True,
    )
    set_evaluate = _setter(
        "set_evaluate",
        "strategy:eval_strategy steps:eval_steps batch_size:per_device_eval_batch_size "
        "accumulation_steps:eval_accumulation_steps delay:eval_delay loss_only:prediction_loss_only",
        {"steps": 500},
    )
    set_testing = _setter(
        "set_testing", "batch_size:per_device_eval_batch_size loss_only:prediction_loss_only", do_predict=True
    )
    set_save = _setter(
        "set_save",
        "strategy:save_strategy steps:save_steps total_limit:save_total_limit on_each_node:save_on_each_node",
    )
    set_logging = _setter(
        "set_logging",
        "strategy:logging_strategy steps:logging_steps report_to level:log_level first_step:logging_first_step "
        "nan_inf_filter:logging_nan_inf_filter on_each_node:log_on_each_node replica_level:log_level_replica",
        {"report_to": "none", "nan_inf_filter": False, "on_each_node": False, "replica_level": "passive"},
    )
    set_optimizer = _setter(
        "set_optimizer",
        "name:optim learning_rate weight_decay beta1:adam_beta1 beta2:adam_beta2 epsilon:adam_epsilon args:optim_args",
        {"name": "adamw_torch"},
    )
    set_lr_scheduler = _setter(
        "set_lr_scheduler", "name:lr_scheduler_type num_epochs:num_train_epochs max_steps warmup_steps"
    )
    set_dataloader = _setter(
        "set_dataloader",
        "train_batch_size:per_device_train_batch_size eval_batch_size:per_device_eval_batch_size "
        "drop_last:dataloader_drop_last num_workers:dataloader_num_workers pin_memory:dataloader_pin_memory "
        "persistent_workers:dataloader_persistent_workers prefetch_factor:dataloader_prefetch_factor "
        "multiprocessing_context:dataloader_multiprocessing_context in_order:dataloader_in_order auto_find_batch_size "
        "ignore_data_skip sampler_seed:data_seed",
    )
    set_push_to_hub = _setter(
        "set_push_to_hub",
        "model_id:hub_model_id strategy:hub_strategy token:hub_token private_repo:hub_private_repo "
        "always_push:hub_always_push revision:hub_revision",
        push_to_hub=True,
    )
