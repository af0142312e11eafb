"""The arguments of a run: a plain dataclass, also for command lines."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from numbers import Real
from typing import Any

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface.arguments.argument import arguments_of
from pytorch_accelerated.huggingface.arguments.checks import check_kinds, check_values, reject_unknown
from pytorch_accelerated.huggingface.arguments.derived import DerivedValues
from pytorch_accelerated.huggingface.arguments.setters import Setters
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy, SchedulerType

logger = logging.getLogger("pytorch_accelerated.huggingface")


@dataclass
class TrainingArguments(Setters, DerivedValues):
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


def set_log_level(args: TrainingArguments) -> None:
    """Set the level of this package's Hugging Face logger in this process."""
    level = args.get_process_log_level()
    if level != logging.NOTSET:
        logger.setLevel(level)
