"""The names that scripts import from here, wherever they are defined."""

from pytorch_accelerated.huggingface.arguments.strategies import (
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
)
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments

__all__ = [
    "HubStrategy",
    "IntervalStrategy",
    "OptimizerNames",
    "ParallelMode",
    "SaveStrategy",
    "SchedulerType",
    "TrainingArguments",
]
