"""All exceptions that this library raises on purpose, in one hierarchy.

Each also inherits from the builtin exception that one would expect. `SignalExit` is not an error, so it is separate.
"""

from __future__ import annotations

import contextlib
import signal
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class PytorchAcceleratedError(Exception):
    """Base of all errors that this library raises on purpose."""


class MissingDependencyError(PytorchAcceleratedError, ImportError):
    """An optional package is not installed."""


class ConfigurationError(PytorchAcceleratedError, ValueError):
    """An argument has an invalid value, alone or in combination with another one."""


class ArgumentTypeError(PytorchAcceleratedError, TypeError):
    """An argument, or a value returned by user code, has an unsupported type."""


class LayerGroupIndexError(PytorchAcceleratedError, IndexError):
    """A model does not have that many layer groups."""


class DataError(PytorchAcceleratedError, ValueError):
    """A dataset, a loader or a batch cannot be used."""


class HookOutputError(PytorchAcceleratedError, TypeError):
    """An overridden hook returned something that the loop cannot use."""


class LaunchError(PytorchAcceleratedError, RuntimeError):
    """The processes of this run were not started as requested."""


class LostPeerError(PytorchAcceleratedError, RuntimeError):
    """Another process of the run has ended, cannot be reached, or kept this one waiting for too long."""


class UnknownMetricError(PytorchAcceleratedError, ValueError):
    """A metric of this name was not recorded."""


class MissingMetricError(UnknownMetricError, KeyError):
    """The metric that selects the best model is not among the metrics of an evaluation."""

    __str__ = Exception.__str__  # KeyError would show the message as a quoted string


class DuplicateCallbackError(PytorchAcceleratedError, ValueError):
    """Two callbacks could not be distinguished in a saved state."""


class NonFiniteLossError(PytorchAcceleratedError, ArithmeticError):
    """A loss or a parameter is NaN or infinite. Not a `StopTrainingError`: the run did not succeed."""


class CheckpointError(PytorchAcceleratedError, RuntimeError):
    """A checkpoint or training state cannot be written or read."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """The file of a checkpoint does not exist."""


class InvalidCheckpointError(CheckpointError):
    """A checkpoint is incomplete, damaged, or does not belong to these objects."""


class RunFileError(PytorchAcceleratedError, ValueError):
    """A file or folder is not a record of a run, or is damaged."""


class CallbackSetupError(ConfigurationError, AssertionError):
    """A callback needs an argument of the run that is missing or has an invalid value."""


class StopTrainingError(PytorchAcceleratedError):
    """Raise this in any hook or callback, on any rank, to end the run at the next safe point.

    `Trainer.train` then returns normally.
    """


class CallbackMethodNotImplementedError(PytorchAcceleratedError, AttributeError):
    """Raised by a callback's method that does not act at this event; the handler then skips it."""


class MissingMethodError(PytorchAcceleratedError, AttributeError):
    """A method that the object of the same name has in another library, but not here."""


class SignalExit(SystemExit):
    """A signal has ended the run. Unless it is caught, the process exits with status ``128 + signal_number``.

    Attributes:
        signal_number: of SIGTERM, SIGUSR1 or SIGHUP; after a SIGINT, `KeyboardInterrupt` is raised instead.
        saved_to: the training state that was saved at the end, or None.
    """

    def __init__(self, signal_number: int, saved_to: Path | None = None) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number
        self.saved_to = saved_to

    def __str__(self) -> str:
        where = "" if self.saved_to is None else f" It can be resumed from {self.saved_to}."
        return f"{signal.Signals(self.signal_number).name} has ended the run.{where}"


def __getattr__(name: str) -> type[RuntimeError]:
    """Names that will go."""
    if name != "LoaderTimeoutError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = "`LoaderTimeoutError` goes with version 2.0: a loader's `timeout` is torch's own RuntimeError."
    warnings.warn(message, FutureWarning, stacklevel=2)
    return RuntimeError


@contextlib.contextmanager
def explained_loading(what: str, source: object) -> Iterator[None]:
    """Turn any error of an object (`what`) that cannot load its state from `source` into `InvalidCheckpointError`."""
    try:
        yield
    except PytorchAcceleratedError:
        raise
    except Exception as error:
        raise InvalidCheckpointError(
            f"{what} cannot load its state from {source} ({type(error).__name__}: {error}). Nothing was changed. "
            "Make everything as it was when the state was saved, or use another one."
        ) from error


def require_kinds(state: Any, kinds: Mapping[str, tuple[type, ...]], *, of: str) -> None:
    """Refuse a state (`of` an object) that lacks an entry of `kinds`, or has one of another type than allowed there."""
    has = state if isinstance(state, Mapping) else {}
    wrong = [name for name, allowed in kinds.items() if name not in has or type(has[name]) not in allowed]
    if wrong:
        raise InvalidCheckpointError(
            f"The state of {of} was written by another class: {', '.join(wrong)} is missing or of another kind."
        )
