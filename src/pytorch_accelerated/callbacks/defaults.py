"""The callbacks of a trainer that is created without any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pytorch_accelerated.callbacks.evaluation import OuterLimit
from pytorch_accelerated.callbacks.metrics import MetricsCallback
from pytorch_accelerated.callbacks.preparation import MoveModulesToDeviceCallback
from pytorch_accelerated.callbacks.progress import LogMetricsCallback, PrintProgressCallback, ProgressBarCallback
from pytorch_accelerated.callbacks.stopping import TerminateOnNaNCallback
from pytorch_accelerated.data.building import LIMIT_BATCHES_ENV_VAR, batch_limit_from_environment
from pytorch_accelerated.errors import ArgumentTypeError
from pytorch_accelerated.loop.callback import TrainerCallback

#: The callbacks of a `Trainer` that is created without any.
DEFAULT_CALLBACKS: tuple[type[TrainerCallback], ...] = (
    MoveModulesToDeviceCallback,
    TerminateOnNaNCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    LogMetricsCallback,
)


def chosen_callbacks(callbacks: Iterable[Any], metrics: Any = None) -> list[Any]:
    """The callbacks of a trainer: metrics first, the default ones in place of ``...``, a limit from the environment.

    An object of a default class takes the place of the class.
    """
    chosen: list[Any] = []
    if metrics is not None:
        chosen.append(MetricsCallback(metrics))
        chosen[0].measures_averages = True
    if not isinstance(callbacks, Iterable):
        kind = callbacks if isinstance(callbacks, type) else type(callbacks)
        raise ArgumentTypeError(
            f"`callbacks` is one {kind.__name__}: pass a list of callbacks, such as `[..., callback]`, where "
            "`...` stands for the default ones."
        )
    given = list(callbacks)
    others = [each for each in DEFAULT_CALLBACKS if not any(type(callback) is each for callback in given)]
    for callback in given:
        chosen += others if callback is ... else [callback]
    limit = batch_limit_from_environment()
    return chosen if limit is None else [*chosen, OuterLimit(limit, source=LIMIT_BATCHES_ENV_VAR)]


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[TrainerCallback], ...]:
    """The default callbacks, to extend or reorder.

    Args:
        progress_bar: False to leave the progress bar out.
    """
    return tuple(callback for callback in DEFAULT_CALLBACKS if progress_bar or callback is not ProgressBarCallback)
