"""What a run has measured."""

from pytorch_accelerated.tracking.history import InMemoryRunHistory, MetricRecord, RunHistory
from pytorch_accelerated.tracking.loss import LossTracker

__all__ = ["InMemoryRunHistory", "LossTracker", "MetricRecord", "RunHistory"]
