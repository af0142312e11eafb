"""The callbacks of `Trainer`, and their base class, handler and errors."""

from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.defaults import DEFAULT_CALLBACKS, get_default_callbacks
from pytorch_accelerated.callbacks.evaluation import (
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    StepBasedEvaluationCallback,
)
from pytorch_accelerated.callbacks.functions import FunctionCallback, on
from pytorch_accelerated.callbacks.loggers import CSVLoggerCallback, JSONLoggerCallback
from pytorch_accelerated.callbacks.measuring import LearningRateMonitorCallback, ProfilerCallback, RecordMeansCallback
from pytorch_accelerated.callbacks.metrics import MetricsCallback
from pytorch_accelerated.callbacks.preparation import (
    ConvertSyncBatchNormCallback,
    MoveModulesToDeviceCallback,
    UnfreezeCallback,
)
from pytorch_accelerated.callbacks.progress import (
    LogMetricsCallback,
    PrintMetricsCallback,
    PrintProgressCallback,
    ProgressBarCallback,
)
from pytorch_accelerated.callbacks.saving import SaveBestModelCallback, SaveTrainingStateCallback, WSDCheckpointCallback
from pytorch_accelerated.callbacks.stopping import EarlyStoppingCallback, StopAtCallback, TerminateOnNaNCallback
from pytorch_accelerated.callbacks.tasks import Asked, Task, is_known_loss, kind_of_task, predicts_next
from pytorch_accelerated.callbacks.weights import ModelEmaCallback, SWACallback
from pytorch_accelerated.errors import (
    CallbackMethodNotImplementedError,
    DuplicateCallbackError,
    NonFiniteLossError,
    StopTrainingError,
)
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.loop.handler import CallbackHandler
from pytorch_accelerated.record.warning import never_ends_a_run
from pytorch_accelerated.record.watching import watched_metrics

if TYPE_CHECKING:
    from pytorch_accelerated.extras.beside import EvaluateBesideCallback
    from pytorch_accelerated.extras.optuna import OptunaCallback
    from pytorch_accelerated.extras.ray_train import RayTrainCallback, ray_checkpoint
    from pytorch_accelerated.extras.report.callback import ReportCallback
    from pytorch_accelerated.extras.report.result import ResultCallback
    from pytorch_accelerated.extras.spikes import LossSpikeCallback
    from pytorch_accelerated.extras.trackers import TrackerCallback


# In `extras`, and imported when they are used: by the module that has them.
_LATER = {
    "EvaluateBesideCallback": "beside",
    "LossSpikeCallback": "spikes",
    "OptunaCallback": "optuna",
    "RayTrainCallback": "ray_train",
    "ReportCallback": "report.callback",
    "ResultCallback": "report.result",
    "TrackerCallback": "trackers",
    "ray_checkpoint": "ray_train",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(require(f"pytorch_accelerated.extras.{_LATER[name]}", needed_by=name), name)


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "Asked",
    "DEFAULT_CALLBACKS",
    "CSVLoggerCallback",
    "CallbackHandler",
    "CallbackMethodNotImplementedError",
    "ConvertSyncBatchNormCallback",
    "DuplicateCallbackError",
    "EarlyStoppingCallback",
    "EvaluateBesideCallback",
    "FunctionCallback",
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
    "OptunaCallback",
    "PrintMetricsCallback",
    "PrintProgressCallback",
    "ProfilerCallback",
    "ProgressBarCallback",
    "RayTrainCallback",
    "RecordMeansCallback",
    "ReportCallback",
    "ResultCallback",
    "SWACallback",
    "SaveBestModelCallback",
    "SaveTrainingStateCallback",
    "StepBasedEvaluationCallback",
    "StopAtCallback",
    "StopTrainingError",
    "Task",
    "TerminateOnNaNCallback",
    "TrackerCallback",
    "TrainerCallback",
    "UnfreezeCallback",
    "WSDCheckpointCallback",
    "get_default_callbacks",
    "is_known_loss",
    "kind_of_task",
    "predicts_next",
    "never_ends_a_run",
    "on",
    "ray_checkpoint",
    "watched_metrics",
]
