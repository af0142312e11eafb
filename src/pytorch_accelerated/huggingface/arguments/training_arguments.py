"""The arguments of a run: a plain dataclass, also for command lines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from numbers import Real
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.huggingface.arguments.argument import arguments_of, unsupported_names
from pytorch_accelerated.huggingface.arguments.checks import check_kinds, check_values, reject_unknown
from pytorch_accelerated.huggingface.arguments.fields import Arguments
from pytorch_accelerated.huggingface.arguments.setters import Setters
from pytorch_accelerated.huggingface.arguments.strategies import (
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SchedulerType,
)
from pytorch_accelerated.processes.accelerators import process_state

logger = logging.getLogger("pytorch_accelerated.huggingface")

# Attributes of transformers' arguments that scripts read and that aren't arguments here.
_READ_BY_SCRIPTS: dict[str, Callable[[TrainingArguments], Any]] = {
    "_n_gpu": lambda args: args.n_gpu,
    "_setup_devices": lambda args: args.device,
    "deepspeed_plugin": lambda args: None,
    "default_optim": lambda args: OptimizerNames.ADAMW_TORCH_FUSED.value,
    "framework": lambda args: "pt",
    "fsdp_plugin_args": lambda args: None,
    "hf_deepspeed_config": lambda args: None,
    "mixed_precision": lambda args: "fp16" if args.fp16 else "bf16" if args.bf16 else "no",
    "place_model_on_device": lambda args: True,
}


@dataclass
class TrainingArguments(Setters, Arguments):
    """All settings of a run. Subclass it to add your own arguments; change it until the Trainer is made.

    A step is an optimizer update. Numbers of steps may be shares in (0, 1) of the whole run. The help text of each
    field says what it means.

    Raises:
        ArgumentTypeError: for an unknown or unsupported argument; says what to use instead.
        ConfigurationError: for values that cannot work, alone or together. All complaints come in one error.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> TrainingArguments:
        """An instance, unless `__init__` would be given names that it doesn't have."""
        reject_unknown(cls, kwargs)
        return super().__new__(cls)

    if not TYPE_CHECKING:  # a type checker would take `__getattr__` to mean that every name exists

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

    def __post_init__(self) -> None:
        self._complete()

    def _complete(self) -> None:
        """Bring all values into one form, fill in those that follow from others, and check them."""
        if self.output_dir is None:
            self.output_dir = "trainer_output"
        self._apply_other_names()
        self._read()
        check_kinds(self)
        self._fill_in_what_follows()
        self.check()

    def _apply_other_names(self) -> None:
        """Move what was given under other names, so that a later `dataclasses.replace` can't contradict itself."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for other, argument in arguments_of(type(self)).items():
            if not (name := argument.same_as) or (given := getattr(self, other)) == defaults[other]:
                continue
            if argument.gives is not None and given is not True:
                continue  # no flag, which is reported with all other values of the wrong kind
            if argument.limit and isinstance(given, Real) and not argument.limit.holds(given):
                raise ConfigurationError(f"`{other}` is {given!r}: give {argument.limit.words}.")
            present, value = getattr(self, name), given if argument.gives is None else argument.gives
            if isinstance(value, list):
                value = [*present, *(item for item in value if item not in present)]
            elif present not in (defaults[name], value):
                raise ConfigurationError(
                    f"`{other}` is {given!r} and `{name}` is {present!r}, but they are two names of one argument: "
                    f"give `{name}` alone."
                )
            setattr(self, name, value)
            setattr(self, other, defaults[other])

    def _read(self) -> None:
        for name, argument in arguments_of(type(self)).items():
            if argument.kind and not (getattr(self, name) is None and argument.may_be_none):
                setattr(self, name, argument.kind.read(name, getattr(self, name)))

    def _fill_in_what_follows(self) -> None:
        """Fill in defaults that depend on other arguments."""
        if self.eval_strategy == IntervalStrategy.STEPS and self.eval_steps is None:
            self.eval_steps = self.logging_steps
        if self.eval_strategy != IntervalStrategy.NO:
            self.do_eval = True
        needs_metric = self.load_best_model_at_end or self.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
        if needs_metric and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        if self.torch_compile_backend is not None or self.torch_compile_mode is not None:
            self.torch_compile = True
        if self.report_to is None:
            self.report_to = [] if self.logging_dir is None else ["tensorboard"]
        if self.disable_tqdm is None:
            self.disable_tqdm = False

    def check(self) -> None:
        """Reject values that cannot work. The Trainer checks again, because arguments may change before it is made.

        Strings become members of their enums.

        Raises:
            ArgumentTypeError: if a value is of the wrong kind.
            ConfigurationError: if values cannot work, alone or together.
        """
        self._read()
        check_kinds(self)
        check_values(self)

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
        """The number of GPUs that this process uses: 1, or 0 on the CPU."""
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
        """Whether this process logs as a first one: of its machine, or of all if `log_on_each_node` is False."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as a `timedelta`."""
        return timedelta(seconds=self.ddp_timeout)


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
