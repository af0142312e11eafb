"""The base class of callbacks, whose methods are the events of a run and do nothing."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from pytorch_accelerated.facts.order import EVENTS as EVENTS
from pytorch_accelerated.states.disk import working_folder

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer as Trainer

P = ParamSpec("P")


def _takes_anything(event: Callable[P, None]) -> Callable[P, None]:
    """Let the empty `event` be called with arguments other than those in its signature.

    Overrides in existing scripts call ``super()`` with positional arguments, or without arguments added later.
    """

    @functools.wraps(event)
    def take(*args: Any, **kwargs: Any) -> None:
        pass

    return take


class TrainerCallback:
    """Reacts to the events of a run. Override the events you need; the others cost nothing.

    ::

        class Norm(TrainerCallback):
            def on_train_epoch_end(self, trainer, **kwargs):
                trainer.run_history.update_metric("norm", trainer.get_model().weight.norm())

    Every event is called on every rank, after the trainer's method for the same moment, with the trainer first and all
    other arguments by keyword; accept ``**kwargs``. `docs/events.md` has the order for every way a run can end.
    Fire events of your own with ``trainer.callback_handler.call_event("on_my_event", trainer=trainer, ...)``. If
    their names resemble built-in ones, list them in the trainer's class attribute ``custom_events``, so that they are
    not mistaken for misspelt ones.
    """

    #: Set it to False for callbacks that print or write files, so that `Trainer.preflight` leaves them out.
    takes_part_in_preflight: bool = True

    #: Set it to True for callbacks that a run needs to work, for example because they change the model or move
    #: something to the device: only these run in `Trainer.find_lr` and `Trainer.summary`.
    prepares_run: bool = False

    #: Whether ranks exchange a message after each update, because this callback may stop the run at the events of a
    #: batch or an update. Set it to False for callbacks that do not stop the run there. Subclasses do not inherit the
    #: False, because they may do more than their base.
    ranks_agree_after_each_update: bool = True

    #: Whether a second callback of the very same class is left out without an error.
    counts_once: bool = False

    #: Names of the metrics that it records. None: unknown; subclasses outside this library count as that.
    recorded_names: Iterable[str] | None = None

    _made_in = ""
    _told_apart_by = ""  # the attribute in which callbacks of one class differ

    def on_init_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """The trainer has been created."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training run begins: its loaders, scheduler and run config exist."""

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training epoch begins."""

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A batch is about to be used for training."""

    @_takes_anything
    def on_train_step_end(
        self, trainer: Trainer, *, batch: Any, batch_output: dict[str, Any], step: int, **kwargs: Any
    ) -> None:
        """The loss of a batch has been computed; the backward pass comes next and uses ``batch_output["loss"]``.

        Args:
            trainer: the trainer.
            batch: the batch, on the trainer's device.
            batch_output: the output of `Trainer.calculate_train_batch_loss`; its loss is neither scaled nor weighted.
            step: the number of the batch on this rank in this epoch, from 0.
            kwargs: arguments that may be added later.
        """

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """The gradients of an update are complete, unscaled and weighted, and not yet clipped."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """An update is complete and the gradients are None. The whole state is consistent here."""

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training epoch has ended, and its loss is in the run history."""

    @_takes_anything
    def on_eval_epoch_start(self, trainer: Trainer, *, is_intermediate: bool, **kwargs: Any) -> None:
        """An evaluation begins; `is_intermediate` is True within a training epoch."""

    def on_eval_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A batch is about to be evaluated."""

    @_takes_anything
    def on_eval_step_end(self, trainer: Trainer, *, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """A batch has been evaluated; `Trainer.gather` may be called here."""

    @_takes_anything
    def on_eval_epoch_end(self, trainer: Trainer, *, is_intermediate: bool, **kwargs: Any) -> None:
        """An evaluation has ended, and its loss is in the run history."""

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training epoch and its evaluation have ended."""

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training run has ended, completely or early."""

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """`Trainer.evaluate` begins."""

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """`Trainer.evaluate` ends."""

    @_takes_anything
    def on_prediction_run_start(self, trainer: Trainer, *, num_batches: int | None = None, **kwargs: Any) -> None:
        """`Trainer.predict` begins; `num_batches` is the number of batches on each rank, None if it is unknown."""

    @_takes_anything
    def on_prediction_step_end(self, trainer: Trainer, *, batch: Any, predictions: Any, **kwargs: Any) -> None:
        """The predictions of a batch have been computed; they are on the trainer's device."""

    def on_prediction_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """`Trainer.predict` ends."""

    def on_step_records(self, trainer: Trainer, **kwargs: Any) -> None:
        """There are new step records in the run history, up to 64: ``trainer.run_history.read_new_step_records``.

        Within a training epoch this follows a finished update, so that what it writes is a curve that grows during the
        epoch. It is also called at the end of the epoch, before `on_train_epoch_end`.
        """

    @_takes_anything
    def on_non_finite_loss(self, trainer: Trainer, *, metric_name: str, epoch: int, step: int, **kwargs: Any) -> None:
        """A loss is NaN or infinite on some rank.

        Losses are read from the device in bulk, so up to 64 updates may have followed that loss.

        Args:
            trainer: the trainer.
            metric_name: the name under which the loss would have been recorded.
            epoch: counted from 1.
            step: the first such batch, counted from 0 in the epoch or evaluation, on the rank where it occurred.
            kwargs: arguments that may be added later.
        """

    @_takes_anything
    def on_loss_spike(
        self,
        trainer: Trainer,
        *,
        loss: float,
        median: float,
        epoch: int,
        first_update: int,
        last_update: int,
        samples: Sequence[int] | None,
        **kwargs: Any,
    ) -> None:
        """The training loss was far above those before it; fired by a `LossSpikeCallback`, at `on_step_records`.

        Args:
            trainer: the trainer.
            loss: the mean over the updates.
            median: of the losses before.
            epoch: counted from 1.
            first_update: of the updates that the loss belongs to, as counted by the run history, from 1.
            last_update: of these.
            samples: their indices in the training dataset, over all ranks; None if they are not known, as with a stream
                or a sampler of your own.
            kwargs: arguments that may be added later.
        """

    @_takes_anything
    def on_stop_training_error(
        self, trainer: Trainer, *, reason: str = "", failure: Exception | None = None, **kwargs: Any
    ) -> None:
        """The run will end early, because `StopTrainingError` was raised or a loss was not finite.

        Args:
            trainer: the trainer.
            reason: the message of the error, which may come from another rank.
            failure: the error that will be raised once the run has ended, because a loss was not finite; else None.
            kwargs: arguments that may be added later.
        """

    @_takes_anything
    def on_exception(self, trainer: Trainer, *, exception: BaseException, **kwargs: Any) -> None:
        """The run ends with an exception, which is raised again after this event. Close open files and displays."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save in training states: plain values and tensors that a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned in the run that is being resumed."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Note the working folder, to which relative paths belong. It may change, or go, during the run."""
        made = super().__new__(cls)
        made._made_in = working_folder()
        return made

    def _absolute(self, path: str | os.PathLike[str]) -> Path:
        """A path that the callback was given."""
        return Path(self._made_in, path)

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a training state; two callbacks of one class need different keys."""
        kind, name = type(self).__name__, self._told_apart_by
        return f"{kind}({getattr(self, name)})" if name else kind

    @property
    def is_told_apart_by_path(self) -> bool:
        """Whether only the path to which it writes distinguishes it from others of its class."""
        return self._told_apart_by in ("path", "save_dir", "save_path")


class StateSaver(TrainerCallback):
    """A callback that saves training states. The loop goes back to them, and looks for them when a run resumes.

    Attributes:
        save_dir: the folder of the states, or the URL that they are uploaded to.
        policy: when states are saved besides the end of the run.
        storage_timeout: seconds until a stalled storage counts as failed.
    """

    save_dir: Any
    policy: Any
    storage_timeout: Any

    @property
    def folder(self) -> Path:
        """The local folder of the states."""
        raise NotImplementedError


class PassLimit(TrainerCallback):
    """A callback that ends each pass over the training data after a number of batches, so that plans count fewer.

    Attributes:
        num_batches: the number, on each rank.
    """

    num_batches: int


def savers_among(callbacks: Iterable[Any]) -> list[StateSaver]:
    """The callbacks that save training states."""
    return [callback for callback in callbacks if isinstance(callback, StateSaver)]
