"""Learning-rate schedulers that step once per optimizer update, and base classes for your own."""

from pytorch_accelerated.schedulers.cosine_scheduler import CosineLrScheduler, one_cycle
from pytorch_accelerated.schedulers.preview import plot_schedule, scheduled_values
from pytorch_accelerated.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase
from pytorch_accelerated.schedulers.warmup_scheduler import (
    ConstantLrScheduler,
    InverseSqrtLrScheduler,
    LinearLrScheduler,
    PolynomialLrScheduler,
)
from pytorch_accelerated.schedulers.wsd_scheduler import PeriodInfo, WSDLrScheduler, estimate_checkpoint_steps

__all__ = [
    "ConstantLrScheduler",
    "CosineLrScheduler",
    "InverseSqrtLrScheduler",
    "LinearLrScheduler",
    "PeriodInfo",
    "PolynomialLrScheduler",
    "SchedulerBase",
    "StatefulSchedulerBase",
    "WSDLrScheduler",
    "estimate_checkpoint_steps",
    "one_cycle",
    "plot_schedule",
    "scheduled_values",
]
