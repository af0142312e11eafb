"""The default callbacks."""

from __future__ import annotations

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.preparation import MoveModulesToDeviceCallback
from pytorch_accelerated.callbacks.progress import LogMetricsCallback, PrintProgressCallback, ProgressBarCallback
from pytorch_accelerated.callbacks.stopping import TerminateOnNaNCallback

#: The callbacks of a `Trainer` that is created without any.
DEFAULT_CALLBACKS: tuple[type[TrainerCallback], ...] = (
    MoveModulesToDeviceCallback,
    TerminateOnNaNCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    LogMetricsCallback,
)


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[TrainerCallback], ...]:
    """The default callbacks, to extend or reorder.

    Args:
        progress_bar: False to leave the progress bar out.
    """
    return tuple(callback for callback in DEFAULT_CALLBACKS if progress_bar or callback is not ProgressBarCallback)
