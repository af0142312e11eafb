"""The order of a run. For extras: what a trainer overrides, whether it is at work, and an update."""

from pytorch_accelerated.loop.checks import refuse_within_a_run
from pytorch_accelerated.loop.hooks import overrides
from pytorch_accelerated.loop.step import Step

__all__ = ["Step", "overrides", "refuse_within_a_run"]
