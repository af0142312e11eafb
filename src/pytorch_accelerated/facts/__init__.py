"""What every other package here may use. For extras: optional packages, walks over nested data, checks of numbers."""

from pytorch_accelerated.facts import trees
from pytorch_accelerated.facts.error_notes import described
from pytorch_accelerated.facts.names import is_users_class
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.seeding import generator_states
from pytorch_accelerated.facts.settings import LIMITS, TrainSettings, check_positive_count

__all__ = [
    "LIMITS",
    "TrainSettings",
    "check_positive_count",
    "described",
    "generator_states",
    "is_users_class",
    "require",
    "trees",
]
