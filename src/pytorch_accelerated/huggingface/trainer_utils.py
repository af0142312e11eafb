"""The names that scripts import from here, wherever they are defined."""

from pytorch_accelerated.huggingface.arguments.parallel import enable_full_determinism
from pytorch_accelerated.huggingface.arguments.strategies import (
    HubStrategy,
    IntervalStrategy,
    SaveStrategy,
    SchedulerType,
)
from pytorch_accelerated.huggingface.checkpoints.folders import (
    PREFIX_CHECKPOINT_DIR,
    get_last_checkpoint,
    rotate_checkpoints,
    sort_checkpoints,
)
from pytorch_accelerated.huggingface.engine.measuring import speed_metrics
from pytorch_accelerated.huggingface.evaluation.evaluating import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    TrainOutput,
)
from pytorch_accelerated.huggingface.models.collating import RemoveColumnsCollator
from pytorch_accelerated.seeding import set_seed

__all__ = [
    "PREFIX_CHECKPOINT_DIR",
    "EvalLoopOutput",
    "EvalPrediction",
    "HubStrategy",
    "IntervalStrategy",
    "PredictionOutput",
    "RemoveColumnsCollator",
    "SaveStrategy",
    "SchedulerType",
    "TrainOutput",
    "enable_full_determinism",
    "get_last_checkpoint",
    "rotate_checkpoints",
    "set_seed",
    "sort_checkpoints",
    "speed_metrics",
]
