"""The events of a run, as the no-op methods of `TrainerCallback`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

from pytorch_accelerated.training.order import EVENTS as EVENTS

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer

P = ParamSpec("P")


def _takes_anything(event: Callable[P, None]) -> Callable[P, None]:
    """Let the empty `event` be called with other arguments than those it names.

    Overrides pass on what they know with ``super()``: without an argument that came later, or by position.
    """

    @functools.wraps(event)
    def take(*args: Any, **kwargs: Any) -> None:
        pass

    return take


class TrainerCallback:
    """Watches a run. Override the events you need; the others cost nothing.

    Every event is called on every rank, after the trainer's method of the same moment, with the trainer first and
    everything else by keyword; accept ``**kwargs``. `docs/events.md` has the order for every way a run can end.
    A subclass may define events of its own, fired with
    ``trainer.callback_handler.call_event("on_my_event", trainer=trainer, ...)``; list their names in the trainer's
    class attribute ``custom_events``, so that a misspelt event can be told from a new one.
    """

    #: False for callbacks that print or write files: a rehearsal (`Trainer.preflight`) leaves them out.
    takes_part_in_preflight: bool = True

    #: Whether all ranks agree after each update on what this callback asked for at the events of a batch or an update,
    #: a stop for example. With several ranks this costs a message for each update. Set it to False for callbacks that
    #: ask for nothing there. A subclass does not inherit the False, because it may do more than its base.
    ranks_agree_after_each_update: bool = True

    def on_init_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """The trainer has been constructed."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training run begins: loaders, scheduler and run config exist."""

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training epoch begins."""

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A batch is about to be used for training."""

    @_takes_anything
    def on_train_step_end(
        self, trainer: Trainer, *, batch: Any, batch_output: dict[str, Any], step: int, **kwargs: Any
    ) -> None:
        """The loss of a batch is known; the backward pass comes next and uses ``batch_output["loss"]``.

        Args:
            trainer: the trainer.
            batch: the batch, on the trainer's device.
            batch_output: what `Trainer.calculate_train_batch_loss` returned; the loss is neither scaled nor weighted.
            step: batches of this rank in this epoch, counted from 0.
            kwargs: room for more.
        """

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """The gradients of an update are complete, unscaled and weighted, and not yet clipped."""

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """An update is finished and the gradients are None: the safe point, everything is consistent here."""

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training epoch is over and its loss is in the run history."""

    @_takes_anything
    def on_eval_epoch_start(self, trainer: Trainer, *, is_intermediate: bool, **kwargs: Any) -> None:
        """An evaluation begins; `is_intermediate` inside a training epoch."""

    def on_eval_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """A batch is about to be evaluated."""

    @_takes_anything
    def on_eval_step_end(self, trainer: Trainer, *, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """A batch has been evaluated; `Trainer.gather` may be called here."""

    @_takes_anything
    def on_eval_epoch_end(self, trainer: Trainer, *, is_intermediate: bool, **kwargs: Any) -> None:
        """An evaluation is over and its loss is in the run history."""

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training epoch and the evaluation that belongs to it are over."""

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """A training run is over, also after an early stop."""

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """`Trainer.evaluate` begins."""

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """`Trainer.evaluate` is over."""

    @_takes_anything
    def on_prediction_run_start(self, trainer: Trainer, *, num_batches: int | None = None, **kwargs: Any) -> None:
        """`Trainer.predict` begins; `num_batches` of each rank, None where that is not known."""

    @_takes_anything
    def on_prediction_step_end(self, trainer: Trainer, *, batch: Any, predictions: Any, **kwargs: Any) -> None:
        """The predictions of a batch are known, still on the trainer's device."""

    def on_prediction_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """`Trainer.predict` is over."""

    @_takes_anything
    def on_non_finite_loss(self, trainer: Trainer, *, metric_name: str, epoch: int, step: int, **kwargs: Any) -> None:
        """A loss that has just been read is NaN or infinite on some rank.

        Losses are read in bulk, so up to 64 updates may have followed.

        Args:
            trainer: the trainer.
            metric_name: what the loss would have been recorded as.
            epoch: from 1.
            step: the first such batch, counted from 0 in the epoch or evaluation of the rank that met it.
            kwargs: room for more.
        """

    @_takes_anything
    def on_stop_training_error(self, trainer: Trainer, *, reason: str = "", **kwargs: Any) -> None:
        """The run is about to end early, because `StopTrainingError` was raised or a loss was not finite.

        Args:
            trainer: the trainer.
            reason: the message of the error, which another rank may have raised.
            kwargs: room for more.
        """

    @_takes_anything
    def on_exception(self, trainer: Trainer, *, exception: BaseException, **kwargs: Any) -> None:
        """The run ends with an exception, which goes on up after this. Close what is open."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive an interruption: plain values and tensors. Saved with training states."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned in the run that is being resumed."""

    @property
    def state_key(self) -> str:
        """Names this callback's state in a saved training state; two of a class need different keys."""
        return type(self).__name__
