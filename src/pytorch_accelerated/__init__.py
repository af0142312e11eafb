"""A trainer for any PyTorch model: training, evaluation, prediction and saving, on a CPU, a GPU or many."""

from pytorch_accelerated.facts.placeholders import TrainerPlaceholderValues
from pytorch_accelerated.facts.seeding import set_seed
from pytorch_accelerated.ranks.launching import notebook_launcher
from pytorch_accelerated.trainer import Trainer

__version__ = "1.1.0"

__all__ = ["Trainer", "TrainerPlaceholderValues", "__version__", "notebook_launcher", "set_seed"]
