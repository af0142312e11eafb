"""What a run has measured."""

from pytorch_accelerated.tracking.history import InMemoryRunHistory, RunHistory
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.tracking.step_records import EpochTiming, RankTimes, SlowRank, StepHistory, StepRecord
from pytorch_accelerated.tracking.values import MetricRecord, greater_is_better, hyperparameters_of, role_and_quantity

__all__ = [
    "EpochTiming",
    "InMemoryRunHistory",
    "LossTracker",
    "MetricRecord",
    "RankTimes",
    "RunHistory",
    "SlowRank",
    "StepHistory",
    "StepRecord",
    "greater_is_better",
    "hyperparameters_of",
    "role_and_quantity",
]
