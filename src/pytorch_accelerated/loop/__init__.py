"""The order of a run. For extras: what a trainer overrides, and whether it is at work."""

from pytorch_accelerated.loop.checks import refuse_within_a_run
from pytorch_accelerated.loop.hooks import overrides

__all__ = [
    "overrides",
    "refuse_within_a_run",
]
