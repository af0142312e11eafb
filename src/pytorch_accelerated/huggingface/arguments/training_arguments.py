"""The arguments of a run: a plain dataclass, also for command lines, and what follows from them and the process."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytorch_accelerated.errors import ArgumentTypeError
from pytorch_accelerated.huggingface.arguments.argument import unsupported_names
from pytorch_accelerated.huggingface.arguments.checks import check_kinds, check_values, complete, read_values
from pytorch_accelerated.huggingface.arguments.fields import Arguments
from pytorch_accelerated.huggingface.arguments.strategies import ParallelMode
from pytorch_accelerated.processes.accelerators import process_state

logger = logging.getLogger("pytorch_accelerated.huggingface")


# Attributes of transformers' arguments that scripts read and that aren't arguments here.
_READ_BY_SCRIPTS: dict[str, Callable[[TrainingArguments], Any]] = {
    "_n_gpu": lambda args: args.n_gpu,
    "_setup_devices": lambda args: args.device,
    "deepspeed_plugin": lambda args: None,
    "framework": lambda args: "pt",
    "fsdp_plugin_args": lambda args: None,
    "hf_deepspeed_config": lambda args: None,
    "mixed_precision": lambda args: "fp16" if args.fp16 else "bf16" if args.bf16 else "no",
}


def _setter(fields: str, defaults: Mapping[str, Any] | None = None, **constants: Any) -> Callable[..., Any]:
    """A method that sets arguments, and returns them all. A parameter that is left out sets its default.

    Args:
        fields: its parameters in order, each with the argument that it sets where that has another name.
        defaults: of parameters; the others have the default of their argument.
        constants: further arguments that it sets.
    """
    field_of = {pair.partition(":")[0]: pair.rpartition(":")[2] for pair in fields.split()}
    default_of = {name: getattr(Arguments, field) for name, field in field_of.items()} | dict(defaults or {})
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind, default=default_of[name]) for name in field_of])

    def setter(self: TrainingArguments, *args: Any, **kwargs: Any) -> TrainingArguments:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        values = {field_of[name]: value for name, value in given.arguments.items()}
        for field, value in {**values, **constants}.items():
            setattr(self, field, value)
        complete(self)
        self.check()
        return self

    setter.__doc__ = f"Set {', '.join(f'`{field}`' for field in (*field_of.values(), *constants))}, and return all."
    return setter


@dataclass
class TrainingArguments(Arguments):
    """All settings of a run. Subclass it to add your own arguments; change it until the Trainer is made.

    A step is an optimizer update. Numbers of steps may be shares in (0, 1) of the whole run. The help text of each
    field says what it means.

    Raises:
        ArgumentTypeError: for a value of the wrong kind, or an unsupported argument; says what to use instead.
        ConfigurationError: for values that cannot work, alone or together. All complaints come in one error.
    """

    def __post_init__(self) -> None:
        complete(self)
        self.check()

    def check(self) -> None:
        """Reject values that cannot work, and make strings members of their enums.

        The Trainer checks again, because arguments may change before it is made.
        """
        read_values(self)
        check_kinds(self)
        check_values(self)

    set_training = _setter(
        "learning_rate batch_size:per_device_train_batch_size weight_decay num_epochs:num_train_epochs max_steps "
        "gradient_accumulation_steps seed activation_checkpointing gradient_checkpointing",
        do_train=True,
    )
    set_evaluate = _setter(
        "strategy:eval_strategy steps:eval_steps batch_size:per_device_eval_batch_size "
        "accumulation_steps:eval_accumulation_steps delay:eval_delay loss_only:prediction_loss_only",
        {"steps": 500},
    )
    set_testing = _setter("batch_size:per_device_eval_batch_size loss_only:prediction_loss_only", do_predict=True)
    set_save = _setter(
        "strategy:save_strategy steps:save_steps total_limit:save_total_limit on_each_node:save_on_each_node",
    )
    set_logging = _setter(
        "strategy:logging_strategy steps:logging_steps report_to level:log_level first_step:logging_first_step "
        "nan_inf_filter:logging_nan_inf_filter on_each_node:log_on_each_node replica_level:log_level_replica",
        {"report_to": "none", "nan_inf_filter": False, "on_each_node": False, "replica_level": "passive"},
    )
    set_optimizer = _setter(
        "name:optim learning_rate weight_decay beta1:adam_beta1 beta2:adam_beta2 epsilon:adam_epsilon args:optim_args",
        {"name": "adamw_torch"},
    )
    set_lr_scheduler = _setter("name:lr_scheduler_type num_epochs:num_train_epochs max_steps warmup_steps")
    set_dataloader = _setter(
        "train_batch_size:per_device_train_batch_size eval_batch_size:per_device_eval_batch_size "
        "drop_last:dataloader_drop_last num_workers:dataloader_num_workers pin_memory:dataloader_pin_memory "
        "persistent_workers:dataloader_persistent_workers prefetch_factor:dataloader_prefetch_factor "
        "multiprocessing_context:dataloader_multiprocessing_context in_order:dataloader_in_order auto_find_batch_size "
        "ignore_data_skip sampler_seed:data_seed",
    )

    @property
    def distributed_state(self) -> Any:
        """accelerate's state of this process, which has its device and its place among all processes."""
        return process_state(
            cpu=self.use_cpu,
            deepspeed=self.deepspeed is not None,
            backend=self.ddp_backend,
            timeout=self.ddp_timeout_delta,
        )

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """The number of warmup updates in a run of `num_training_steps` updates; a share is rounded up."""
        return math.ceil(num_training_steps * self.warmup_steps) if self.warmup_steps < 1 else int(self.warmup_steps)

    def get_process_log_level(self) -> int:
        """The level for this package's Hugging Face logger in this process, as a number of `logging`; 0 leaves it."""
        level = self.log_level if self.should_log else self.log_level_replica
        return logging.NOTSET if level == "passive" else int(getattr(logging, level.upper()))

    def to_dict(self) -> dict[str, Any]:
        """All supported arguments as plain JSON values: enums by value, dtypes by name, tokens as placeholders.

        Raises:
            ArgumentTypeError: if JSON cannot represent an argument of a subclass.
        """
        left_out = unsupported_names(type(self))
        names = [field.name for field in dataclasses.fields(self) if field.name not in left_out]
        return {
            name: f"<{name.upper()}>" if name.endswith("_token") else _plain(name, getattr(self, name))
            for name in names
        }

    def to_json_string(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, bool | int | float | str]:
        """All arguments as numbers, bools and strings, for trackers that take nothing else."""
        plain = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {
            name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in plain.items()
        }

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the body of a `with` in the first process, then in all others. Every process must enter it.

        Args:
            local: whether each machine has its own first process.
            desc: of the work, for the log at level DEBUG.
        """
        logger.debug("The first process goes first: %s", desc)
        state = self.distributed_state
        with state.local_main_process_first() if local else state.main_process_first():
            yield

    @property
    def train_batch_size(self) -> int:
        """Rows of a training batch on this process, which has one device."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Rows of an evaluation batch on this process, which has one device."""
        return self.per_device_eval_batch_size

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return int(self.distributed_state.num_processes)

    @property
    def process_index(self) -> int:
        """The rank of this process among all, from 0."""
        return int(self.distributed_state.process_index)

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine, from 0."""
        return int(self.distributed_state.local_process_index)

    @property
    def device(self) -> torch.device:
        """The device on which this process trains."""
        device: torch.device = self.distributed_state.device
        return device

    @property
    def n_gpu(self) -> int:
        """The number of GPUs that this process uses, 1, or 0 on the CPU."""
        return int(self.device.type != "cpu")

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether this process trains alone or with others."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def should_save(self) -> bool:
        """Whether this process writes checkpoints; the first of all does."""
        return self.process_index == 0

    @property
    def should_log(self) -> bool:
        """Whether this process logs as a first one, of its machine, or of all if `log_on_each_node` is False."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as a `timedelta`."""
        return timedelta(seconds=self.ddp_timeout)

    if not TYPE_CHECKING:  # hidden from type checkers, to which `__getattr__` would mean that every name exists

        def __getattr__(self, name: str) -> Any:
            """Find what scripts read besides arguments."""
            if name in _READ_BY_SCRIPTS:
                return _READ_BY_SCRIPTS[name](self)
            return super().__getattribute__(name)  # raises what has led here, also from inside a property

        @property
        def local_rank(self) -> int:
            """`local_process_index`, no matter what a command line has set; that is only checked."""
            return self.local_process_index

        @local_rank.setter
        def local_rank(self, value: int) -> None:
            vars(self)["local_rank"] = value


def set_log_level(args: TrainingArguments) -> None:
    """Set the level of this package's Hugging Face logger in this process."""
    level = args.get_process_log_level()
    if level != logging.NOTSET:
        logger.setLevel(level)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(name, value.value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {str(key): _plain(name, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, np.generic):
        return value.item()
    if callable(getattr(value, "to_dict", None)):  # a GenerationConfig
        return _plain(name, value.to_dict())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ArgumentTypeError(
        f"`{name}` is {value!r}, which JSON cannot represent. Keep numbers, strings, lists and dicts in the arguments, "
        "and make other objects from them in your script."
    )
