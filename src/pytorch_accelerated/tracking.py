"""What a run has measured."""

from pytorch_accelerated.record.history import InMemoryRunHistory, RunHistory
from pytorch_accelerated.record.loss import LossTracker
from pytorch_accelerated.record.step_records import EpochTiming, RankTimes, SlowRank, StepRecord
from pytorch_accelerated.record.values import MetricRecord, greater_is_better, hyperparameters_of, role_and_quantity

__all__ = [
    "EpochTiming",
    "InMemoryRunHistory",
    "LossTracker",
    "MetricRecord",
    "RankTimes",
    "RunHistory",
    "SlowRank",
    "StepRecord",
    "greater_is_better",
    "hyperparameters_of",
    "role_and_quantity",
]
