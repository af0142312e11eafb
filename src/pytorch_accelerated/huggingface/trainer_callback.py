"""The names that scripts import from here, wherever they are defined."""

from pytorch_accelerated.huggingface.events.callbacks import (
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    TrainerCallback,
)
from pytorch_accelerated.huggingface.events.progress import ProgressCallback
from pytorch_accelerated.huggingface.events.state import ExportableState, TrainerControl, TrainerState

__all__ = [
    "CallbackHandler",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "ExportableState",
    "PrinterCallback",
    "ProgressCallback",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
]
