"""The arguments of a run: a plain dataclass, also for command lines."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import math
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from importlib.util import find_spec
from numbers import Real
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.huggingface.arguments.checks import TRACKERS, check_arguments
from pytorch_accelerated.huggingface.arguments.setters import with_setters
from pytorch_accelerated.huggingface.arguments.strategies import (
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SamplingStrategy,
    SaveStrategy,
    SchedulerType,
)
from pytorch_accelerated.huggingface.arguments.unsupported import (
    asks_for_nothing,
    explain_unknown,
    names_not_taken_over,
    with_names_not_taken_over,
)
from pytorch_accelerated.processes.accelerators import process_state

logger = logging.getLogger("pytorch_accelerated.huggingface")

_WORDS: dict[str, type[Enum]] = {
    "logging_strategy": IntervalStrategy,
    "eval_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
    "train_sampling_strategy": SamplingStrategy,
}
# Of each other name, the argument that it stands for and, for a flag, the value that it gives.
_OTHER_NAMES: dict[str, tuple[str, Any]] = {
    "activation_checkpointing": ("gradient_checkpointing", None),
    "activation_checkpointing_kwargs": ("gradient_checkpointing_kwargs", None),
    "adafactor": ("optim", OptimizerNames.ADAFACTOR),
    "evaluation_strategy": ("eval_strategy", None),
    "group_by_length": ("train_sampling_strategy", SamplingStrategy.GROUP_BY_LENGTH),
    "include_tokens_per_second": ("include_num_input_tokens_seen", "all"),
    "no_cuda": ("use_cpu", None),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size", None),
    "per_gpu_train_batch_size": ("per_device_train_batch_size", None),
    "torchdynamo": ("torch_compile_backend", None),
    "warmup_ratio": ("warmup_steps", None),
}
_FLAGS: dict[str, Any] = {"": None, "false": None, "true": True}
# Attributes of the arguments of transformers that are none of these.
_READ_BY_SCRIPTS: dict[str, Callable[[TrainingArguments], Any]] = {
    "_n_gpu": lambda args: args.n_gpu,
    "_setup_devices": lambda args: args.device,
    "deepspeed_plugin": lambda args: None,
    "default_optim": lambda args: OptimizerNames.ADAMW_TORCH_FUSED.value,
    "distributed_state": lambda args: args._process,
    "framework": lambda args: "pt",
    "fsdp_plugin_args": lambda args: None,
    "hf_deepspeed_config": lambda args: None,
    "mixed_precision": lambda args: "fp16" if args.fp16 else "bf16" if args.bf16 else "no",
    "place_model_on_device": lambda args: True,
}
_DICTS = ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "fsdp_config", "deepspeed")
_MAY_BE_FILES = ("fsdp_config", "deepspeed")


def _argument(default: Any, help: str) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


class _RefusingUnknown(ABCMeta):
    """Stands before the `__init__` of all subclasses: each that is a dataclass gets another one.

    With the metaclass of abstract classes as its base it can be mixed with these.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance.

        Raises:
            ArgumentTypeError: for a name that `__init__` does not have, or one that is not taken over and asks for
                something.
        """
        parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]  # of the class, not its instances
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            refused = names_not_taken_over(cls)
            unknown = [
                name
                for name, value in kwargs.items()
                if name not in parameters or (name in refused and not asks_for_nothing(name, value))
            ]
            if unknown:
                raise ArgumentTypeError(" ".join(explain_unknown(name, kwargs[name], parameters) for name in unknown))
        return super().__call__(*args, **kwargs)


@with_setters
@dataclass
@with_names_not_taken_over
class TrainingArguments(metaclass=_RefusingUnknown):
    """Everything that a run is told. Subclass it for arguments of your own; change it until the Trainer is made.

    A step is an optimizer update. Numbers of steps may be shares in (0, 1) of the whole run. The help text of each
    field says what it means.

    Raises:
        ArgumentTypeError: for an argument that does not exist; says what to use instead.
        ConfigurationError: for values that cannot work, alone or together. All complaints come in one error.
    """

    # What comes out
    output_dir: str | None = _argument(None, "Folder for checkpoints and logs. Default: trainer_output.")
    do_train: bool = _argument(False, "For your script to read: whether to train.")
    do_eval: bool = _argument(False, "For your script to read: whether to evaluate. True if eval_strategy is given.")
    do_predict: bool = _argument(False, "For your script to read: whether to predict.")
    resume_from_checkpoint: str | None = _argument(
        None, "For your script to pass to train(): the checkpoint to go on from."
    )

    # How long, and with what
    per_device_train_batch_size: int = _argument(8, "Rows of a training batch on one device.")
    per_device_eval_batch_size: int = _argument(8, "Rows of an evaluation batch on one device.")
    gradient_accumulation_steps: int = _argument(1, "Batches per update; the update equals that of one large batch.")
    num_train_epochs: float = _argument(3.0, "Passes over the training set; may end inside one.")
    max_steps: int = _argument(-1, "Updates of the run, if above 0: overrides num_train_epochs.")
    auto_find_batch_size: bool = _argument(False, "Begin anew with half the batch size when memory runs out.")
    seed: int = _argument(42, "Seeds every generator when the Trainer is made.")
    data_seed: int | None = _argument(None, "Seed of the order of rows. Default: seed.")
    full_determinism: bool = _argument(False, "Use deterministic algorithms only, which may be slow.")

    # Optimizer and schedule
    learning_rate: float = _argument(5e-5, "The peak of the schedule.")
    optim: OptimizerNames | str = _argument(
        "adamw_torch_fused", "The optimizer by name: of torch, transformers (adafactor), bitsandbytes (8-bit, paged)."
    )
    optim_args: str | None = _argument(None, "Further arguments of the optimizer: name=value,name=value.")
    weight_decay: float = _argument(0.0, "For all parameters but biases and those of norm layers.")
    adam_beta1: float = _argument(0.9, "AdamW: how much of the mean gradient stays at an update.")
    adam_beta2: float = _argument(0.999, "AdamW: how much of the mean squared gradient stays at an update.")
    adam_epsilon: float = _argument(1e-8, "AdamW: added to the denominator.")
    max_grad_norm: float | None = _argument(1.0, "Limit of the gradient's norm. 0: no limit.")
    lr_scheduler_type: SchedulerType | str = _argument("linear", "The shape of the learning rate over the run.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = _argument(None, "Further arguments of the schedule, as JSON.")
    warmup_steps: float = _argument(0, "Updates in which the learning rate rises from 0, or a share of the run.")
    label_smoothing_factor: float = _argument(0.0, "How much of each label goes to all classes alike, in [0, 1).")
    average_tokens_across_devices: bool = _argument(
        True, "Where the loss is a mean over tokens, take it over those of all devices."
    )

    # Precision, memory, compilation
    bf16: bool = _argument(False, "Mixed precision in bfloat16.")
    fp16: bool = _argument(False, "Mixed precision in float16, with loss scaling.")
    gradient_checkpointing: bool = _argument(False, "Compute activations twice instead of keeping them.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = _argument(
        None, "For the model's gradient_checkpointing_enable, as JSON."
    )
    torch_compile: bool = _argument(False, "Compile the model. True if a backend or a mode is given.")
    torch_compile_backend: str | None = _argument(None, "The backend of torch.compile.")
    torch_compile_mode: str | None = _argument(None, "The mode of torch.compile.")
    use_cpu: bool = _argument(False, "Train on the CPU, whatever else there is.")

    # Data
    remove_unused_columns: bool = _argument(True, "Leave out columns that the model's forward does not name.")
    label_names: list[str] | None = _argument(
        None,
        "Columns that are labels. Default: parameters of forward with 'label' in their name; if there are none, labels "
        "where a compute_loss_func or label smoothing takes them.",
    )
    train_sampling_strategy: SamplingStrategy | str = _argument("random", "The order of the training rows.")
    length_column_name: str = _argument("length", "Column with the length of a row, for group_by_length.")
    dataloader_drop_last: bool = _argument(False, "Leave out a last batch that is not full.")
    dataloader_num_workers: int = _argument(0, "Processes that fetch data.")
    dataloader_pin_memory: bool = _argument(True, "Copy to the device from pinned memory.")
    dataloader_persistent_workers: bool = _argument(False, "Keep the workers from epoch to epoch.")
    dataloader_prefetch_factor: int | None = _argument(None, "Batches that each worker fetches ahead.")
    dataloader_multiprocessing_context: str | None = _argument(None, "How workers start: fork, spawn or forkserver.")
    ignore_data_skip: bool = _argument(False, "On a resume, begin the epoch's data anew.")

    # Logging
    logging_strategy: IntervalStrategy | str = _argument("steps", "When to log.")
    logging_steps: float = _argument(500, "Log every so many updates, or at every such share of the run.")
    logging_first_step: bool = _argument(False, "Log the first update too.")
    logging_nan_inf_filter: bool = _argument(True, "Keep losses that are not finite out of the logged mean.")
    logging_dir: str | None = _argument(None, "Folder for TensorBoard, which is then used. Default: below output_dir.")
    report_to: None | str | list[str] = _argument(None, "none, tensorboard, or all that are installed.")
    run_name: str | None = _argument(None, "Name of this run's folder of TensorBoard. Default: time and host.")
    disable_tqdm: bool | None = _argument(None, "Print the logs instead of showing progress bars.")
    log_level: str = _argument("passive", "Level of this package's logger on the first process; passive: leave it.")
    log_level_replica: str = _argument("warning", "The same on all other processes.")
    log_on_each_node: bool = _argument(True, "The first process of each machine counts as a first one for logging.")
    include_num_input_tokens_seen: str = _argument("no", "Count the tokens of the input: no, all, non_padding.")
    skip_memory_metrics: bool = _argument(True, "Do not measure memory.")

    # Evaluation
    eval_strategy: IntervalStrategy | str = _argument("no", "When to evaluate.")
    eval_steps: float | None = _argument(None, "Evaluate every so many updates, or at such a share. As logging_steps.")
    eval_delay: float = _argument(0, "Updates or epochs, as eval_strategy says, before the first evaluation.")
    eval_on_start: bool = _argument(False, "Evaluate before the first update, too.")
    eval_accumulation_steps: int | None = _argument(None, "Batches whose predictions stay on the device together.")
    eval_do_concat_batches: bool = _argument(True, "Join predictions to arrays; else they stay lists of batches.")
    prediction_loss_only: bool = _argument(False, "Keep the loss only.")
    include_for_metrics: list[str] = _argument([], "What compute_metrics gets besides: inputs, loss.")
    batch_eval_metrics: bool = _argument(False, "Call compute_metrics after each batch.")

    # Checkpoints and the best model
    save_strategy: SaveStrategy | str = _argument("steps", "When to save a checkpoint.")
    save_steps: float = _argument(500, "Save every so many updates, or at every such share of the run.")
    save_total_limit: int | None = _argument(None, "Checkpoints that stay: the oldest go, the best never.")
    save_only_model: bool = _argument(False, "Leave out all that a resume needs.")
    load_best_model_at_end: bool = _argument(False, "End with the best weights.")
    metric_for_best_model: str | None = _argument(None, "What tells the best, with or without eval_ before it.")
    greater_is_better: bool | None = _argument(None, "Default: True, unless the metric ends with loss.")
    restore_callback_states_from_checkpoint: bool = _argument(False, "On a resume, restore callbacks and control.")

    # Several processes
    ddp_backend: str | None = _argument(None, "What the processes talk through: nccl, gloo, ...")
    ddp_timeout: int = _argument(1800, "Seconds that a process waits for the others.")
    ddp_find_unused_parameters: bool | None = _argument(
        None, "Look for parameters without a gradient. Default: True, unless gradients are checkpointed."
    )
    ddp_bucket_cap_mb: int | None = _argument(None, "Megabytes of gradients that are exchanged together.")
    ddp_broadcast_buffers: bool | None = _argument(None, "Send the first process's buffers before each forward.")
    ddp_static_graph: bool | None = _argument(None, "Every step uses the same parameters.")
    fsdp: str | None = _argument(
        None, "Cut the model over the processes: true, or words among full_shard, shard_grad_op and auto_wrap."
    )
    fsdp_config: dict[str, Any] | str | None = _argument(
        None,
        "How: transformer_layer_cls_to_wrap or min_num_params, reshard_after_forward; as JSON or the path of a file.",
    )
    deepspeed: dict[str, Any] | str | None = _argument(
        None, "Train with DeepSpeed, ZeRO stage 0 to 2: its config, as JSON or the path of a file; see huggingface.md."
    )

    # Other names, most of them from older scripts; what they say goes to the arguments that they stand for.
    activation_checkpointing: bool = _argument(False, "The same as gradient_checkpointing.")
    activation_checkpointing_kwargs: dict[str, Any] | str | None = _argument(
        None, "The same as gradient_checkpointing_kwargs."
    )
    adafactor: bool = _argument(False, "The same as optim adafactor.")
    evaluation_strategy: IntervalStrategy | str | None = _argument(None, "The same as eval_strategy.")
    group_by_length: bool = _argument(False, "The same as train_sampling_strategy group_by_length.")
    include_inputs_for_metrics: bool = _argument(False, "The same as include_for_metrics inputs.")
    include_tokens_per_second: bool = _argument(False, "The same as include_num_input_tokens_seen all.")
    no_cuda: bool = _argument(False, "The same as use_cpu.")
    per_gpu_eval_batch_size: int | None = _argument(None, "The same as per_device_eval_batch_size.")
    per_gpu_train_batch_size: int | None = _argument(None, "The same as per_device_train_batch_size.")
    torchdynamo: str | None = _argument(None, "The same as torch_compile_backend.")
    warmup_ratio: float | None = _argument(None, "The same as a warmup_steps below 1.")

    if not TYPE_CHECKING:  # to a type checker it would mean that every name is there

        def __getattr__(self, name: str) -> Any:
            """What scripts read that is no argument."""
            if name in _READ_BY_SCRIPTS:
                return _READ_BY_SCRIPTS[name](self)
            return super().__getattribute__(name)  # raises what has led here, from inside of a property too

    def __post_init__(self) -> None:
        self._complete()

    def _complete(self) -> None:
        """Bring what was given into one form, fill in what follows from it, and check it."""
        if self.output_dir is None:
            self.output_dir = "trainer_output"
        for name in ("output_dir", "logging_dir", "resume_from_checkpoint"):
            if isinstance(getattr(self, name), PathLike):
                setattr(self, name, fspath(getattr(self, name)))
        self._take_over_other_names()
        for name in _DICTS:
            setattr(self, name, _dict_from(name, getattr(self, name)))
        for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
            setattr(self, name, _whole_if_possible(getattr(self, name)))
        self._fill_in_what_follows()
        self.check()

    def _take_over_other_names(self) -> None:
        """Only one of two names speaks afterwards, or a later `dataclasses.replace` would contradict itself."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        if isinstance(self.warmup_ratio, Real) and not 0 <= self.warmup_ratio < 1:
            raise ConfigurationError(
                f"`warmup_ratio` is {self.warmup_ratio!r}, which is no share of the run: give a number in [0, 1)."
            )
        for other, (name, constant) in _OTHER_NAMES.items():
            given, present = getattr(self, other), getattr(self, name)
            if given == defaults[other]:
                continue
            value = given if constant is None else constant
            if present not in (defaults[name], value):
                raise ConfigurationError(
                    f"`{other}` is {given!r} and `{name}` is {present!r}, but they are two names of one argument: "
                    f"give `{name}` alone."
                )
            setattr(self, name, value)
            setattr(self, other, defaults[other])
        if self.include_inputs_for_metrics:
            self.include_for_metrics = [*self.include_for_metrics, *{"inputs"}.difference(self.include_for_metrics)]
            self.include_inputs_for_metrics = False

    def _fill_in_what_follows(self) -> None:
        """Defaults that depend on other arguments."""
        if self.eval_strategy == IntervalStrategy.STEPS and self.eval_steps is None:
            self.eval_steps = self.logging_steps
        if self.eval_strategy != IntervalStrategy.NO:
            self.do_eval = True
        goes_by_metric = self.load_best_model_at_end or self.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
        if goes_by_metric and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        if self.torch_compile_backend is not None or self.torch_compile_mode is not None:
            self.torch_compile = True
        # A command line has words only, and older scripts have True and False.
        if isinstance(self.include_num_input_tokens_seen, bool):
            self.include_num_input_tokens_seen = "all" if self.include_num_input_tokens_seen else "no"
        self.fsdp = _FLAGS.get(str(self.fsdp or "").lower(), self.fsdp)
        if self.report_to is None and self.logging_dir is not None:
            self.report_to = ["tensorboard"]
        self.report_to = _trackers(self.report_to)
        if self.disable_tqdm is None:
            self.disable_tqdm = False
        if self.warmup_steps is None:  # the default of subclasses, sentence-transformers' for one
            self.warmup_steps = 0

    def check(self) -> None:
        """Refuse values that cannot work. Done at once, and again by the Trainer for what was changed since.

        Words become members of their enums.

        Raises:
            ArgumentTypeError: if a value is of the wrong kind.
            ConfigurationError: if values cannot work, alone or together.
        """
        for name, words in _WORDS.items():
            setattr(self, name, _word(name, getattr(self, name), words))
        check_arguments(self)

    @property
    def _process(self) -> Any:
        return process_state(
            cpu=self.use_cpu,
            deepspeed=self.deepspeed is not None,
            backend=self.ddp_backend,
            timeout=self.ddp_timeout_delta,
        )

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """The updates of the warmup, of a run of so many: a share is rounded up."""
        return math.ceil(num_training_steps * self.warmup_steps) if self.warmup_steps < 1 else int(self.warmup_steps)

    def get_process_log_level(self) -> int:
        """The level of this package's Hugging Face logger in this process, as a number of `logging`; 0: leave it."""
        level = self.log_level if self.should_log else self.log_level_replica
        return logging.NOTSET if level == "passive" else int(getattr(logging, level.upper()))

    def to_dict(self) -> dict[str, Any]:
        """All arguments as plain JSON values: enums by value, dtypes by name; of a token only that there is one.

        Raises:
            ArgumentTypeError: if an argument of a subclass is of a kind that JSON has no place for.
        """
        refused = names_not_taken_over(type(self))
        names = [field.name for field in dataclasses.fields(self) if field.name not in refused]
        values = {name: getattr(self, name) for name in names}
        return {
            name: f"<{name.upper()}>" if name.endswith("_token") else _plain(name, value)
            for name, value in values.items()
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
        """What stands inside is done by the first process, then by the others. All processes must come by.

        Args:
            local: the first process of each machine, instead of the first one of all.
            desc: what it is, for the log at level DEBUG.
        """
        logger.debug("The first process goes first: %s", desc)
        with self._process.local_main_process_first() if local else self._process.main_process_first():
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
        """Processes of the run."""
        return int(self._process.num_processes)

    @property
    def process_index(self) -> int:
        """The number of this process among all, from 0."""
        return int(self._process.process_index)

    @property
    def local_process_index(self) -> int:
        """The number of this process on its machine, from 0."""
        return int(self._process.local_process_index)

    @property
    def device(self) -> torch.device:
        """Where this process trains."""
        device: torch.device = self._process.device
        return device

    @property
    def n_gpu(self) -> int:
        """Devices of this process: 1, or 0 on the CPU."""
        return int(self.device.type != "cpu")

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether this process trains together with others."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def should_save(self) -> bool:
        """Whether this process writes checkpoints: the first one of all."""
        return self.process_index == 0

    @property
    def should_log(self) -> bool:
        """Whether this process counts as a first one for logging, see `log_on_each_node`."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as a `timedelta`."""
        return timedelta(seconds=self.ddp_timeout)


def _local_rank(args: TrainingArguments) -> int:
    """What `local_rank` gives, whatever it was set to: -1 of a command line says nothing about the launcher's place."""
    return args.local_process_index


def _note_local_rank(args: TrainingArguments, value: Any) -> None:
    vars(args)["local_rank"] = value  # to be checked with the others


TrainingArguments.local_rank = property(_local_rank, _note_local_rank)  # type: ignore[attr-defined]  # made by name


def set_log_level(args: TrainingArguments) -> None:
    """Have this package's Hugging Face logger say as much as the arguments want of this process."""
    level = args.get_process_log_level()
    if level != logging.NOTSET:
        logger.setLevel(level)


def _word(name: str, value: Any, words: type[Enum]) -> Enum:
    try:
        return words(value)
    except ValueError as error:
        remedy = (
            " Make any other one yourself: see `optimizer_cls_and_kwargs` of the Trainer." if name == "optim" else ""
        )
        raise ConfigurationError(f"`{name}` cannot work: {error}{remedy}") from None


def _dict_from(name: str, value: Any) -> Any:
    """`value`, read from JSON or from a file of it where it is a string, as on a command line."""
    if not isinstance(value, str):
        return value
    is_path = name in _MAY_BE_FILES and not value.lstrip().startswith("{")
    try:
        read = json.loads(Path(value).read_text(encoding="utf-8") if is_path else value)
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigurationError(
            f"`{name}` is {value!r}, from which no JSON can be read ({error}). Give a dict, or one as JSON"
            f"{', or the path of a file of it' if name in _MAY_BE_FILES else ''}."
        ) from error
    if not isinstance(read, dict):
        raise ConfigurationError(f"`{name}` is {value!r}, which is JSON, but not of a dict. Give one, as {{...}}.")
    return read


def _whole_if_possible(steps: Any) -> Any:
    """Command lines have floats only."""
    return int(steps) if isinstance(steps, float) and steps.is_integer() else steps


def _trackers(report_to: Any) -> Any:
    names = [report_to] if isinstance(report_to, str) else report_to
    if names is None or names == ["none"]:
        return []
    return [name for name in TRACKERS if find_spec(name)] if names == ["all"] else names


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
        f"`{name}` is {value!r}, which JSON has no place for. Keep numbers, strings, lists and dicts in the arguments, "
        "and make other objects from them in your script."
    )
