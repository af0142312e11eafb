"""What `Trainer.preflight`, `find_lr`, `summary`, `show_batch` and `show_predictions` return."""

from typing import TYPE_CHECKING, Any

from pytorch_accelerated.extras.looking.learning_rates import LearningRateTest
from pytorch_accelerated.extras.looking.preflight import BatchFacts, EntryFacts, PreflightReport

if TYPE_CHECKING:
    from pytorch_accelerated.extras.looking.showing import Shown
    from pytorch_accelerated.extras.looking.summary import ModuleFacts, ScaleFacts, TrainingSummary

__all__ = [
    "BatchFacts",
    "EntryFacts",
    "LearningRateTest",
    "ModuleFacts",
    "PreflightReport",
    "ScaleFacts",
    "Shown",
    "TrainingSummary",
]


def __getattr__(name: str) -> Any:
    if name not in ("ModuleFacts", "ScaleFacts", "Shown", "TrainingSummary"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytorch_accelerated.extras.looking import showing, summary

    return getattr(showing if name == "Shown" else summary, name)


def __dir__() -> list[str]:
    return __all__
