"""What `Trainer.preflight`, `find_lr`, `summary`, `show_batch` and `show_predictions` return."""

from pytorch_accelerated.extras.looking.learning_rates import LearningRateTest
from pytorch_accelerated.extras.looking.preflight import BatchFacts, EntryFacts, PreflightReport
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
