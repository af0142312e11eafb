"""What `Trainer.preflight`, `Trainer.find_lr` and `Trainer.summary` return."""

from pytorch_accelerated.looking.batch_facts import BatchFacts, EntryFacts
from pytorch_accelerated.looking.learning_rates import LearningRateTest
from pytorch_accelerated.looking.preflight import PreflightReport
from pytorch_accelerated.looking.summary import ModuleFacts, TrainingSummary

__all__ = ["BatchFacts", "EntryFacts", "LearningRateTest", "ModuleFacts", "PreflightReport", "TrainingSummary"]
