"""The arguments of a run: a plain dataclass, also for command lines."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from pytorch_accelerated.huggingface.arguments.checks import check_kinds, check_values, reject_unknown
from pytorch_accelerated.huggingface.arguments.completing import complete, read_values
from pytorch_accelerated.huggingface.arguments.derived import DerivedValues
from pytorch_accelerated.huggingface.arguments.setters import Setters

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
        complete(self)
        self.check()

    def check(self) -> None:
        """Reject values that cannot work, and make strings members of their enums.

        The Trainer checks again, because arguments may change before it is made.
        """
        read_values(self)
        check_kinds(self)
        check_values(self)


def set_log_level(args: TrainingArguments) -> None:
    """Set the level of this package's Hugging Face logger in this process."""
    level = args.get_process_log_level()
    if level != logging.NOTSET:
        logger.setLevel(level)
