"""What a run has measured."""

from pytorch_accelerated.tracking.history import InMemoryRunHistory, RunHistory
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.tracking.step_records import StepRecord
from pytorch_accelerated.tracking.timing import EpochTiming
from pytorch_accelerated.tracking.values import MetricRecord

__all__ = ["EpochTiming", "InMemoryRunHistory", "LossTracker", "MetricRecord", "RunHistory", "StepRecord"]
