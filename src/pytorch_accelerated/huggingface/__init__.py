"""The shape of Hugging Face's Trainer, on the one native loop. `transformers` itself is not needed."""

from typing import TYPE_CHECKING, Any

from pytorch_accelerated.facts.seeding import set_seed
from pytorch_accelerated.huggingface import trainer_callback, trainer_utils, training_args
from pytorch_accelerated.huggingface.arguments.fields import IntervalStrategy, SaveStrategy, SchedulerType
from pytorch_accelerated.huggingface.events import (
    CallbackHandler,
    ExportableState,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from pytorch_accelerated.huggingface.knowledge import default_data_collator
from pytorch_accelerated.huggingface.trainer import Trainer
from pytorch_accelerated.huggingface.trainer_callback import (
    DEFAULT_CALLBACKS,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
)
from pytorch_accelerated.huggingface.trainer_seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
from pytorch_accelerated.huggingface.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    TrainOutput,
    get_last_checkpoint,
    speed_metrics,
)
from pytorch_accelerated.huggingface.training_args import TrainingArguments
from pytorch_accelerated.record.history import LoggedHistory

__all__ = [
    "DEFAULT_CALLBACKS",
    "CallbackHandler",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalLoopOutput",
    "EvalPrediction",
    "ExportableState",
    "IntervalStrategy",
    "LoggedHistory",
    "PredictionOutput",
    "PrinterCallback",
    "ProgressCallback",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "TensorBoardCallback",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "default_data_collator",
    "get_last_checkpoint",
    "set_seed",
    "speed_metrics",
    "trainer_callback",
    "trainer_utils",
    "training_args",
]

if TYPE_CHECKING:
    from pytorch_accelerated.extras.huggingface.trackers import TensorBoardCallback
else:

    def __getattr__(name: str) -> Any:
        if name == "TensorBoardCallback":  # in `extras`, and imported when it is used
            return trainer_callback.TensorBoardCallback
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
