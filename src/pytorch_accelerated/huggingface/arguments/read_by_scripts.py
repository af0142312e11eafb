"""Attributes and methods of transformers' Trainer that only scripts use.

A subclass must not override these methods, because nothing here calls them; see `engine/refusing.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pytorch_accelerated.huggingface.models.knowledge import returns_loss_by_itself
from pytorch_accelerated.processes.accelerators import send_to_device

# Attributes of features that aren't in use, and their values.
_NOT_IN_USE = {
    "do_grad_scaling": False,
    "fsdp": None,
    "hp_name": None,
    "hp_search_backend": None,
    "hub_model_id": None,
    "is_distributed_loading_by_transformers": False,
    "is_fsdp_xla_enabled": False,
    "is_fsdp_xla_v1_enabled": False,
    "is_fsdp_xla_v2_enabled": False,
    "is_model_parallel": False,
    "is_tp_enabled": False,
    "loss_is_scaled_for_ga": None,
    "neftune_noise_alpha": None,
    "place_model_on_device": True,
    "sharded_ddp": None,
    "use_amp": False,
    "use_apex": False,
    "use_cpu_amp": False,
    "use_cuda_amp": False,
}


# Copies of `evaluate` in older scripts call it; here `evaluate` itself measures memory.
_NO_MEMORY_TRACKER = SimpleNamespace(start=lambda: None, stop_and_update_metrics=lambda metrics=None: None)


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda trainer: value


# A function of the trainer for each attribute; for a method, it returns the method.
READ_BY_SCRIPTS: dict[str, Callable[[Any], Any]] = {
    **{name: _always(value) for name, value in _NOT_IN_USE.items()},
    "deepspeed": lambda trainer: trainer.model_wrapped if trainer.is_deepspeed_enabled else None,
    "can_return_loss": lambda trainer: returns_loss_by_itself(trainer.model, {}),
    "current_flos": lambda trainer: trainer._training.counter.flos if trainer.is_in_train else 0,
    "current_gradient_accumulation_steps": lambda trainer: trainer._engine.batches_of_update,
    "tokenizer": lambda trainer: trainer.processing_class,
    "_memory_tracker": _always(_NO_MEMORY_TRACKER),
    "_get_learning_rate": lambda trainer: lambda: trainer._engine.learning_rate,
    "_get_output_dir": lambda trainer: lambda trial=None: str(trainer.args.output_dir),
    "_move_model_to_device": lambda trainer: lambda model, device: model.to(device),
    "_prepare_input": lambda trainer: lambda data: send_to_device(data, trainer.args.device),
    "autocast_smart_context_manager": lambda trainer: lambda cache_enabled=True: trainer.accelerator.autocast(),
    "gather_function": lambda trainer: lambda data, use_gather_object=False: trainer._nested_gather(data),
    "get_cp_size": _always(lambda: 1),
    "get_sp_size": _always(lambda: 1),
    "get_tp_size": _always(lambda: 1),
    "get_total_train_batch_size": lambda trainer: (
        lambda args: trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size
    ),
    "prediction_loop": lambda trainer: trainer.evaluation_loop,
}
