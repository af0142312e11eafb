"""Words that arguments take: enums that equal their strings."""

from __future__ import annotations

import difflib
from enum import Enum
from typing import NoReturn

from pytorch_accelerated.errors import ConfigurationError


class _Word(str, Enum):
    """A string out of a few."""

    __str__ = str.__str__

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        words = [word.value for word in cls]
        close = difflib.get_close_matches(str(value).lower(), words, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(f"{value!r} is no {cls.__name__}.{hint} Choose among {', '.join(map(repr, words))}.")


class IntervalStrategy(_Word):
    """When to log or evaluate."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class SaveStrategy(_Word):
    """When to save; "best": whenever an evaluation is better than all before it."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"
    BEST = "best"


class SchedulerType(_Word):
    """The shape of the learning rate over a run."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    REDUCE_ON_PLATEAU = "reduce_lr_on_plateau"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"


class OptimizerNames(_Word):
    """The optimizers that are made by name, all of them torch's own."""

    ADAMW_TORCH = "adamw_torch"
    ADAMW_TORCH_FUSED = "adamw_torch_fused"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"


class SamplingStrategy(_Word):
    """The order in which training rows are used."""

    RANDOM = "random"
    SEQUENTIAL = "sequential"
    GROUP_BY_LENGTH = "group_by_length"


class ParallelMode(_Word):
    """Whether this process trains alone, or together with others."""

    NOT_PARALLEL = "not_parallel"
    DISTRIBUTED = "distributed"
