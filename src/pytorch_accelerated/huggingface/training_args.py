"""The arguments of a run: a plain dataclass, also for command lines; how they are completed, read and checked."""

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
from fractions import Fraction
from numbers import Real
from os import PathLike, environ, fspath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.huggingface.arguments import argument as rules
from pytorch_accelerated.huggingface.arguments.fields import Arguments
from pytorch_accelerated.huggingface.arguments.fields import HubStrategy as HubStrategy
from pytorch_accelerated.huggingface.arguments.fields import IntervalStrategy as IntervalStrategy
from pytorch_accelerated.huggingface.arguments.fields import OptimizerNames as OptimizerNames
from pytorch_accelerated.huggingface.arguments.fields import ParallelMode as ParallelMode
from pytorch_accelerated.huggingface.arguments.fields import SaveStrategy as SaveStrategy
from pytorch_accelerated.huggingface.arguments.fields import SchedulerType as SchedulerType
from pytorch_accelerated.huggingface.arguments.parallel import check_fsdp, deepspeed
from pytorch_accelerated.ranks.accelerators import process_state
from pytorch_accelerated.states.disk import working_folder

logger = logging.getLogger("pytorch_accelerated.huggingface")
# Attributes of transformers' arguments that scripts read and that aren't arguments here.
_READ_BY_SCRIPTS: dict[str, Callable[[TrainingArguments], Any]] = {
    "_n_gpu": lambda args: args.n_gpu,  # unless a script has set it
    "_setup_devices": lambda args: args.device,
    "framework": lambda args: "pt",
    "fsdp_plugin_args": lambda args: None,
    "hf_deepspeed_config": lambda args: args.deepspeed_plugin and args.deepspeed_plugin.hf_ds_config,
    "mixed_precision": lambda args: "fp16" if args.fp16 else "bf16" if args.bf16 else "no",
}


def _setter(fields: str, defaults: Mapping[str, Any] | None = None, **constants: Any) -> Callable[..., Any]:
    """A method that sets arguments, and returns all. A parameter that is left out sets its default.

    Args:
        fields: its parameters, each with the argument that it sets, unless that has the same name.
        defaults: of parameters, where they differ from the arguments'.
        constants: further arguments that it sets.
    """
    field_of = {pair.partition(":")[0]: pair.rpartition(":")[2] for pair in fields.split()}
    default_of = {name: getattr(Arguments, field) for name, field in field_of.items()} | dict(defaults or {})
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind, default=value) for name, value in default_of.items()])

    def setter(self: TrainingArguments, *args: Any, **kwargs: Any) -> TrainingArguments:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        values = {field_of[name]: value for name, value in given.arguments.items()} | constants
        for field, value in values.items():
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
        self._made_in = working_folder()  # to which relative paths belong, whatever becomes of it
        complete(self)
        self.check()
        # Models that are made from now on, before there is a Trainer, look for it.
        self.deepspeed_plugin: Any = None if self.deepspeed is None else deepspeed().plugin_of(self)

    def check(self) -> None:
        """Reject values that cannot work, and make strings members of their enums, unless nothing has changed.

        The Trainer checks again, because arguments may change before it is made.
        """
        # A hash, because the values may hold a token, which must not be in a second place.
        if vars(self).get("_checked") != hash(repr({**vars(self), "_checked": 0})):
            read_values(self)
            _refuse(self, _about_values(self), ConfigurationError)
            self._checked = hash(repr({**vars(self), "_checked": 0}))

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
        "strategy:save_strategy steps:save_steps total_limit:save_total_limit on_each_node:save_on_each_node"
    )
    set_logging = _setter(
        "strategy:logging_strategy steps:logging_steps report_to level:log_level first_step:logging_first_step "
        "nan_inf_filter:logging_nan_inf_filter on_each_node:log_on_each_node replica_level:log_level_replica",
        {"report_to": "none", "nan_inf_filter": False, "on_each_node": False, "replica_level": "passive"},
    )
    set_push_to_hub = _setter(
        "model_id:hub_model_id strategy:hub_strategy token:hub_token private_repo:hub_private_repo "
        "always_push:hub_always_push revision:hub_revision",
        push_to_hub=True,
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
        "ignore_data_skip sampler_seed:data_seed"
    )

    @property
    def distributed_state(self) -> Any:
        """accelerate's state of this process, which has its device and its place among all processes."""
        return process_state(cpu=self.use_cpu, backend=self.ddp_backend, timeout=self.ddp_timeout_delta)

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
        left_out = rules.unsupported_names(type(self))
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
        """Rows of a training batch on this process, over all of its devices."""
        return self.per_device_train_batch_size * max(1, self.n_gpu)

    @property
    def eval_batch_size(self) -> int:
        """Rows of an evaluation batch on this process, over all of its devices."""
        return self.per_device_eval_batch_size * max(1, self.n_gpu)

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
        """The number of GPUs that this process uses: 0 on the CPU, 1 if a launcher started it, else all that it sees.

        Scripts set `_n_gpu` to use fewer.
        """
        if "_n_gpu" in vars(self):
            return int(vars(self)["_n_gpu"])
        kind, is_alone = self.device.type, self.distributed_state.distributed_type.value == "NO"
        uses_all = is_alone and self.deepspeed is None and self.device.index is None and kind not in ("cpu", "mps")
        return torch.accelerator.device_count() if uses_all else int(kind != "cpu")

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether this process trains alone or with others, and on multiple devices."""
        if self.world_size > 1:
            return ParallelMode.DISTRIBUTED
        return ParallelMode.NOT_DISTRIBUTED if self.n_gpu > 1 else ParallelMode.NOT_PARALLEL

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
    raise ArgumentTypeError(f"`{name}` is {value!r}, which JSON cannot represent: keep plain values in the arguments.")


def complete(args: Arguments) -> None:
    """Bring all values into one form, and fill in those that follow from others.

    Raises:
        ArgumentTypeError: if a value is of the wrong kind.
        ConfigurationError: if a value cannot be read, or two names of one argument contradict each other.
    """
    if args.output_dir is None:
        args.output_dir = "trainer_output"
    _apply_other_names(args)
    read_values(args)
    if args.deepspeed is None and environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        args.deepspeed = deepspeed().config_of_launcher()
    if args.accelerator_config is None:
        args.accelerator_config = rules.AcceleratorConfig()  # type: ignore[assignment]  # which scripts read and change
    if args.eval_strategy == IntervalStrategy.STEPS and args.eval_steps is None:
        args.eval_steps = args.logging_steps
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    needs_metric = args.load_best_model_at_end or args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    if needs_metric and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.metric_for_best_model is not None and args.greater_is_better is None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.report_to is None:
        args.report_to = [] if args.logging_dir is None else ["tensorboard"]
    if args.disable_tqdm is None:
        args.disable_tqdm = False


def _apply_other_names(args: Arguments) -> None:
    """Move what was given under other names, so that a later `dataclasses.replace` can't contradict itself."""
    defaults = {field.name: rules.default_of(field) for field in dataclasses.fields(args)}
    for other, argument in rules.arguments_of(type(args)).items():
        if not (name := argument.same_as) or (given := getattr(args, other)) == argument.default:
            continue
        if argument.gives is not None and given is not True:
            continue  # no flag, which is reported with all other values of the wrong kind
        if argument.limit and isinstance(given, Real) and not argument.limit.holds(given):
            raise ConfigurationError(f"`{other}` is {given!r}: give {argument.limit.words}.")
        present, value = getattr(args, name), given if argument.gives is None else argument.gives
        if isinstance(value, list):
            value = [*present, *(item for item in value if item not in present)]
        elif present not in (defaults[name], value):
            values = f"`{other}` is {given!r} and `{name}` is {present!r}"
            raise ConfigurationError(f"{values}, but they are two names of one argument: give `{name}` alone.")
        setattr(args, name, value)
        setattr(args, other, argument.default)


def read_values(args: Arguments) -> None:
    """Bring values into the form that is checked, strings to members of their enums for example.

    Raises:
        ArgumentTypeError: for all values of the wrong kind, and unsupported arguments.
    """
    for name in args._VALID_DICT_FIELDS:
        value = getattr(args, name, None)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            setattr(args, name, rules.A_DICT.read(name, value))
    for name, argument in rules.arguments_of(type(args)).items():
        if argument.kind and not (getattr(args, name) is None and argument.may_be_none):
            setattr(args, name, argument.kind.read(name, getattr(args, name)))
    _refuse(args, _about_kinds(args), ArgumentTypeError)


def _refuse(args: Arguments, complaints: Iterator[str], kind: type[Exception]) -> None:
    """Raise one error for all complaints, if there are any."""
    if listed := list(complaints):
        raise kind(f"{type(args).__name__} cannot work: {'; '.join(listed)}.")


def _about_kinds(args: Arguments) -> Iterator[str]:
    known = rules.arguments_of(type(args))
    for field in dataclasses.fields(args):
        argument, default = known.get(field.name), rules.default_of(field)
        value = vars(args).get(field.name, default)
        if argument is not None and rules.is_rejected(field.name, argument, value):
            why = argument.why_unsupported.removesuffix(".")
            yield f"`{field.name}` is {value!r}, but this argument is unsupported. {why}"
        kind = argument.kind if argument else rules.A_FLAG if isinstance(default, bool) else None
        may_be_none = default is None or (argument is not None and argument.may_be_none)
        if kind and not kind.holds(value) and not (value is None and may_be_none):
            yield f"`{field.name}` is {value!r}: give {kind.words}"


def _about_values(args: Arguments) -> Iterator[str]:
    for name, argument in rules.arguments_of(type(args)).items():
        value = None if argument.why_unsupported else getattr(args, name)
        if value is None:
            continue
        if argument.limit and not argument.limit.holds(value):
            yield f"`{name}` is {value!r}: give {argument.limit.words}"
        if argument.choices and not set([value] if isinstance(value, str) else value) <= set(argument.choices):
            yield f"`{name}` is {value!r}: choose among {', '.join(map(repr, argument.choices))}"
    yield from _about_steps(args)
    yield from _about_best_model(args)
    yield from _about_pairs(args)


def _about_steps(args: Arguments) -> Iterator[str]:
    for event in ("logging", "eval", "save"):
        name = f"{event}_steps"
        steps = getattr(args, name)
        if steps is None:
            continue
        never = steps < 0 or (steps == 0 and getattr(args, f"{event}_strategy") == IntervalStrategy.STEPS)
        if never or not math.isfinite(steps) or (steps > 1 and steps != int(steps)):
            yield f"`{name}` is {steps!r}: give a whole number of updates, or a share of the run in (0, 1)"


def _about_best_model(args: Arguments) -> Iterator[str]:
    never = args.eval_strategy == IntervalStrategy.NO
    goes_by_evaluations = {"lr_scheduler_type": SchedulerType.REDUCE_ON_PLATEAU, "save_strategy": SaveStrategy.BEST}
    for name, value in goes_by_evaluations.items():
        if never and getattr(args, name) == value:
            yield f"`{name}` is '{value}', but `eval_strategy` is 'no': choose 'steps' or 'epoch'"
    if args.load_best_model_at_end and args.save_strategy != SaveStrategy.BEST:
        eval_strategy, save_strategy = str(args.eval_strategy), str(args.save_strategy)
        if never or eval_strategy != save_strategy:
            yield (
                f"`load_best_model_at_end` needs a checkpoint of each evaluated model, but `eval_strategy` is "
                f"{eval_strategy!r} and `save_strategy` is {save_strategy!r}: give the same, or save_strategy='best'"
            )
        elif eval_strategy == IntervalStrategy.STEPS and not _is_multiple(args.save_steps, args.eval_steps):
            yield (
                f"`load_best_model_at_end` needs an evaluation of each checkpoint, but `save_steps` is "
                f"{args.save_steps}, which is not a multiple of `eval_steps`, {args.eval_steps}: give one that is"
            )


def _about_pairs(args: Arguments) -> Iterator[str]:
    if args.fp16 and args.bf16:
        yield "`fp16` and `bf16` are both True, but only one of them can be used: choose one"
    for name, needed in ((name, argument.needs) for name, argument in rules.arguments_of(type(args)).items()):
        if needed and getattr(args, name) and not getattr(args, needed):
            yield (
                f"`{name}` is {getattr(args, name)!r}, but `{needed}` is {getattr(args, needed)!r}, so it would have "
                f"no effect: set `{needed}`, or leave `{name}` out"
            )
    yield from check_fsdp(args)
    if args.deepspeed is not None:
        yield from deepspeed().complaints(args)


def _is_multiple(larger: float, smaller: float | None) -> bool:
    if not smaller or (larger < 1) != (smaller < 1):
        return False
    return (Fraction(str(larger)) / Fraction(str(smaller))).denominator == 1
