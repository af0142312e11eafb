"""What `Trainer.preflight`, `Trainer.find_lr` and `Trainer.summary` return."""

from typing import TYPE_CHECKING, Any

from pytorch_accelerated.extras.looking.learning_rates import LearningRateTest
from pytorch_accelerated.extras.looking.preflight import BatchFacts, EntryFacts, PreflightReport

if TYPE_CHECKING:
    from pytorch_accelerated.extras.looking.summary import ModuleFacts, ScaleFacts, TrainingSummary

__all__ = [
    "BatchFacts",
    "EntryFacts",
    "LearningRateTest",
    "ModuleFacts",
    "PreflightReport",
    "ScaleFacts",
    "TrainingSummary",
]


def __getattr__(name: str) -> Any:
    if name not in ("ModuleFacts", "ScaleFacts", "TrainingSummary"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytorch_accelerated.extras.looking import summary

    return getattr(summary, name)


def __dir__() -> list[str]:
    return __all__
