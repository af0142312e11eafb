"""The callbacks of `Trainer`, and their base class, handler and errors."""

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.evaluation import (
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    StepBasedEvaluationCallback,
)
from pytorch_accelerated.callbacks.handler import DEFAULT_CALLBACKS, CallbackHandler, get_default_callbacks
from pytorch_accelerated.callbacks.loggers import CSVLoggerCallback, JSONLoggerCallback, LearningRateMonitorCallback
from pytorch_accelerated.callbacks.metrics import MetricsCallback
from pytorch_accelerated.callbacks.preparation import ConvertSyncBatchNormCallback, MoveModulesToDeviceCallback
from pytorch_accelerated.callbacks.profiling import ProfilerCallback
from pytorch_accelerated.callbacks.progress import (
    LogMetricsCallback,
    PrintMetricsCallback,
    PrintProgressCallback,
    ProgressBarCallback,
)
from pytorch_accelerated.callbacks.report import ReportCallback
from pytorch_accelerated.callbacks.saving import SaveBestModelCallback, SaveTrainingStateCallback
from pytorch_accelerated.callbacks.spikes import LossSpikeCallback
from pytorch_accelerated.callbacks.stopping import EarlyStoppingCallback, StopAtCallback, TerminateOnNaNCallback
from pytorch_accelerated.callbacks.trackers import TrackerCallback
from pytorch_accelerated.callbacks.weights import ModelEmaCallback
from pytorch_accelerated.callbacks.wsd import WSDCheckpointCallback
from pytorch_accelerated.errors import (
    CallbackMethodNotImplementedError,
    DuplicateCallbackError,
    NonFiniteLossError,
    StopTrainingError,
)

__all__ = [
    "DEFAULT_CALLBACKS",
    "CSVLoggerCallback",
    "CallbackHandler",
    "CallbackMethodNotImplementedError",
    "ConvertSyncBatchNormCallback",
    "DuplicateCallbackError",
    "EarlyStoppingCallback",
    "JSONLoggerCallback",
    "LearningRateMonitorCallback",
    "LimitBatchesCallback",
    "LimitEvalStepsCallback",
    "LogMetricsCallback",
    "LossSpikeCallback",
    "MetricsCallback",
    "ModelEmaCallback",
    "MoveModulesToDeviceCallback",
    "NonFiniteLossError",
    "PrintMetricsCallback",
    "PrintProgressCallback",
    "ProfilerCallback",
    "ProgressBarCallback",
    "ReportCallback",
    "SaveBestModelCallback",
    "SaveTrainingStateCallback",
    "StepBasedEvaluationCallback",
    "StopAtCallback",
    "StopTrainingError",
    "TerminateOnNaNCallback",
    "TrackerCallback",
    "TrainerCallback",
    "WSDCheckpointCallback",
    "get_default_callbacks",
]
