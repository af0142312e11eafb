"""The names that scripts import from here, wherever they are defined."""

from pytorch_accelerated.huggingface.arguments import TrainingArguments
from pytorch_accelerated.huggingface.strategies import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
)

__all__ = [
    "HubStrategy",
    "IntervalStrategy",
    "OptimizerNames",
    "ParallelMode",
    "SaveStrategy",
    "SchedulerType",
    "TrainingArguments",
]
