"""A run within Ray Train: its metrics and training states are reported to Ray, which restarts it from the last one."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from pytorch_accelerated.facts import require
from pytorch_accelerated.record import Pace

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer

_SECONDS_BETWEEN_QUESTIONS = 2.0  # Ray itself looks every five seconds


@contextlib.contextmanager
def ray_checkpoint() -> Iterator[Path | None]:
    """Gives the training state that Ray kept last, as `RayTrainCallback` reported it; None at a first start.

    All workers of Ray Train must use it, around the whole run: a state on remote storage is downloaded, and deleted
    when the context ends.

    Raises:
        MissingDependencyError: if Ray is not installed.
    """
    checkpoint = require("ray.train", needed_by="ray_checkpoint").get_checkpoint()
    with contextlib.nullcontext() if checkpoint is None else checkpoint.as_directory() as folder:
        yield None if folder is None else Path(folder)


class RayTrainCallback(SaveTrainingStateCallback):
    """Reports to Ray Train: the metrics of each epoch, and training states as checkpoints.

    For the train function of a ``ray.train.torch.TorchTrainer``::

        def train_on_worker(config):
            trainer = Trainer(model, loss_func, optimizer, callbacks=[..., RayTrainCallback()])
            with ray_checkpoint() as state:
                trainer.train(train_dataset, 10, eval_dataset, resume_from=state)

    A report has the newest value of each metric that the epoch recorded, ``epoch`` and ``update``. In the report of a
    state within an epoch, the metrics are NaN, which Ray ranks below every number. A run that Ray starts again resumes
    from the last reported state, to the bit. When Ray announces that a machine will be taken away, a state is saved and
    reported after an update, within seconds, and the run continues.

    The report follows at the first event after the state was written, when all ranks have reached it. Put this callback
    last: what later ones record at the end of an epoch is reported with the next one.

    Args:
        save_dir: a folder on a disk that all workers share; Ray copies states from there to its own storage, and only
            the newest stays. None: a temporary folder, for workers on one machine.
        save_every_n_epochs: the number of epochs between two states. One is also saved when the run ends.
        save_every_n_steps: the number of optimizer updates between two states.
        save_every_n_minutes: the minutes between two states.

    Raises:
        ConfigurationError: if a number is not positive.
        MissingDependencyError: if Ray is not installed.
    """

    ranks_agree_after_each_update = False
    _told_apart_by = ""

    def __init__(
        self,
        save_dir: str | Path | None = None,
        save_every_n_epochs: int | None = 1,
        save_every_n_steps: int | None = None,
        save_every_n_minutes: float | None = None,
    ) -> None:
        super().__init__(
            tempfile.gettempdir() if save_dir is None else save_dir,
            save_every_n_epochs,
            save_every_n_steps,
            max_checkpoints=1,
            save_every_n_minutes=save_every_n_minutes,
        )
        self._ray_train = require("ray.train", needed_by=type(self).__name__)
        self._is_temporary = save_dir is None
        self._temporary: Path | None = None  # where this run has its states, once it has begun
        self._due: dict[str, Any] | None = None  # the metrics of the next report
        self._state: Path | None = None  # requested, and not yet reported
        self._preemption: Any = None  # the last one that a state has answered

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Choose the temporary folder; see also `SaveTrainingStateCallback`.

        Raises:
            RuntimeError: Ray's, outside of its train function.
        """
        self._ray_train.get_context().get_world_rank()
        if self._is_temporary:
            self.save_dir = self._temporary = self._temporary_folder()
            trainer.run_context.parts.ranks.do_on_first(self._remove_temporary)  # left by workers that were killed
        self._due = self._state = None
        self._questions = Pace(_SECONDS_BETWEEN_QUESTIONS, updates=trainer.run_state.updates)
        super().on_training_run_start(trainer, **kwargs)

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Save if the number of updates or minutes says so, or if Ray announces that a machine will be taken away."""
        super().on_optimizer_step_end(trainer, **kwargs)
        updates, ask = trainer.run_state.updates, getattr(self._ray_train, "get_preemption_info", None)
        if ask is not None and self._questions.is_due(updates):
            preemption = ask()  # the same on all ranks, which must ask together
            self._questions.go_on(
                updates, trainer.run_context.parts.ranks.from_first(self._questions.proposal(updates))
            )
            if preemption not in (None, self._preemption) and self._state is None:
                self._request(trainer, f"step_{updates}")
            self._preemption = preemption

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Collect the metrics of the epoch, and save if it is time."""
        records = trainer.run_history.read_new_records(self.state_key)
        self._due = self._place(trainer) | {each.name: each.value for each in records if each.is_scalar}
        super().on_training_run_epoch_end(trainer, **kwargs)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Report what is left, and delete the temporary folder."""
        super().on_training_run_end(trainer, **kwargs)
        self._report(trainer)
        if trainer.run_context.parts.ranks.is_first:
            self._remove_temporary()

    def on_exception(self, trainer: Trainer, **kwargs: Any) -> None:
        """Delete the temporary folder, on any rank: Ray has its own copies, and is about to kill the other ranks."""
        self._remove_temporary()

    def _temporary_folder(self) -> Path:
        """The same for every start of a run by Ray, and for no other run."""
        runtime = require("ray", needed_by=type(self).__name__).get_runtime_context()
        run = self._ray_train.get_context().get_experiment_name()
        name = hashlib.sha256(repr((runtime.gcs_address, runtime.get_job_id(), run)).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir(), f"states_for_ray_{name}")

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _request(self, trainer: Trainer, name: str) -> None:
        super()._request(trainer, name)
        self._state = self.folder / name
        # Without a value of the metric that ranks states, Ray takes one for the best if less is better.
        self._due = dict.fromkeys(self._metric_names(trainer), math.nan) | (self._due or self._place(trainer))

    def _request_final(self, trainer: Trainer) -> None:
        if self._state is None:  # otherwise this moment is saved already
            super()._request_final(trainer)

    def _metric_names(self, trainer: Trainer) -> list[str]:
        """The metrics of an epoch, as far as they are known before its end."""
        recorded = [getattr(each, "recorded_names", None) or () for each in trainer.callback_handler.callbacks]
        evaluated = [] if trainer.eval_dataset is None else ["eval_loss_epoch"]
        return ["train_loss_epoch", *evaluated, *itertools.chain(*recorded), *trainer.run_history.get_metric_names()]

    def _place(self, trainer: Trainer) -> dict[str, Any]:
        return {"epoch": trainer.run_history.current_epoch, "update": trainer.run_history.updates_done}

    def _report(self, trainer: Trainer, **kwargs: Any) -> None:
        """Report what is due, if anything is. All ranks must, and the first one has the checkpoint."""
        metrics, state = self._due, self._state
        self._due = self._state = None
        if metrics is None:
            return
        checkpoint = None
        # Where a loss was not finite, a state that was requested is not written.
        if trainer.run_context.parts.ranks.is_first and state in [
            each.path for each in trainer.run_context.control.saves.all
        ]:
            checkpoint = self._ray_train.Checkpoint.from_directory(state)
        self._ray_train.report(metrics, checkpoint=checkpoint)
        kept = self._ray_train.get_checkpoint()
        trainer.run_context.control.saves.copy_to_resume = None if kept is None else Path(kept.path)

    # The first events after a state was written; `on_training_run_end` is another.
    on_train_epoch_start = on_optimizer_step_start = on_train_epoch_end = _report
