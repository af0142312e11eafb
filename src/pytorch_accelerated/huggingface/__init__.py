"""The shape of Hugging Face's Trainer, on the one native loop. `transformers` itself is not needed."""

from pytorch_accelerated.huggingface import trainer_callback, trainer_utils, training_args
from pytorch_accelerated.huggingface.arguments.strategies import IntervalStrategy, SaveStrategy, SchedulerType
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments
from pytorch_accelerated.huggingface.checkpoints.folders import get_last_checkpoint
from pytorch_accelerated.huggingface.engine.measuring import speed_metrics
from pytorch_accelerated.huggingface.evaluation.evaluating import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    TrainOutput,
)
from pytorch_accelerated.huggingface.events.callbacks import (
    DEFAULT_CALLBACKS,
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    TrainerCallback,
)
from pytorch_accelerated.huggingface.events.progress import LossSpikeCallback, ProgressCallback
from pytorch_accelerated.huggingface.events.state import ExportableState, TrainerControl, TrainerState
from pytorch_accelerated.huggingface.events.trackers import TensorBoardCallback
from pytorch_accelerated.huggingface.models.collating import default_data_collator
from pytorch_accelerated.huggingface.trainer import Trainer
from pytorch_accelerated.huggingface.trainer_seq2seq import Seq2SeqTrainer
from pytorch_accelerated.huggingface.training_args_seq2seq import Seq2SeqTrainingArguments
from pytorch_accelerated.seeding import set_seed
from pytorch_accelerated.tracking.history import LoggedHistory

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
    "LossSpikeCallback",
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
