"""Checkpoints of a warmup-stable-decay schedule: before each decay for longer runs, and after it for use."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.handler import CallbackHandler
from pytorch_accelerated.callbacks.saving import tell_of_earlier_states
from pytorch_accelerated.checkpointing.training_state import load_run
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.schedulers.wsd_scheduler import WSDLrScheduler
from pytorch_accelerated.tracking.loss import LossTracker

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer


@dataclasses.dataclass(eq=False, repr=False)
class WSDCheckpointCallback(TrainerCallback):
    """Saves at the checkpoints of a `WSDLrScheduler`: where a decay begins, and where it ends.

    `save_dir` gets training states ``checkpoint_<step>_wsd_pre_decay``, from which a longer run can start, and
    files ``checkpoint_<step>_wsd_post_decay.pt`` of `Trainer.save_checkpoint`, which have the better models. A step is
    an applied optimizer update.

    To train on, pass either as `initial_checkpoint`, with ``is_continuation_from_checkpoint=True`` for the scheduler.
    The new run has the weights, the optimizer and, of a training state, the random generators. It counts from 0: its
    number of epochs or steps is that of the new part. For a run that equals an uninterrupted one of a greater length,
    resume from the training state: ``train(..., resume_from=...)`` with the number of epochs of the whole.

    Args:
        save_dir: the folder of the checkpoints.
        save_optimizer: whether the files include the optimizer's state.
        save_scheduler: whether the files include the scheduler's state.
        initial_checkpoint: a training state, or a file of `Trainer.save_checkpoint`, to begin with, unless the run is
            resumed.
    """

    ranks_agree_after_each_update = False
    takes_part_in_preflight = False
    _told_apart_by = "save_dir"

    save_dir: str | Path = "checkpoints"
    save_optimizer: bool = True
    save_scheduler: bool = True
    initial_checkpoint: str | Path | None = None
    _last_step = 0

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Check the scheduler, and load `initial_checkpoint`.

        Raises:
            ConfigurationError: if the scheduler is not a `WSDLrScheduler`.
            CheckpointError: if the state is missing, damaged, or of another model.
        """
        scheduler = _scheduler_of(trainer)
        trainer.run_context.saves.claim_folder(self.save_dir)
        is_resumed = trainer.run_state.updates > 0
        if self.initial_checkpoint is not None and not is_resumed:
            _load(trainer, self.initial_checkpoint)
            scheduler.step_update(0)
        elif not is_resumed:
            earlier = sorted(Path(self.save_dir).glob("checkpoint_*_wsd_*"), key=lambda path: path.stat().st_mtime)
            names = [path.name for path in earlier]
            tell_of_earlier_states(trainer, self.save_dir, names, "will replace those at the same steps")
        self._last_step = scheduler.get_current_step()

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Save if a decay begins or ends here."""
        scheduler = _scheduler_of(trainer)
        step = scheduler.get_current_step()
        if step == self._last_step:
            return  # the update was skipped
        self._last_step = step
        for period in scheduler.get_decay_info():
            if step == period["pre_decay_step"]:
                trainer.save_training_state(Path(self.save_dir) / f"checkpoint_{step}_wsd_pre_decay")
            if step == period["period_end"]:
                trainer.save_checkpoint(
                    Path(self.save_dir) / f"checkpoint_{step}_wsd_post_decay.pt",
                    {"step": step, "epoch": trainer.run_history.current_epoch},
                    save_optimizer=self.save_optimizer,
                    save_scheduler=self.save_scheduler,
                )


def _load(trainer: Trainer, source: str | Path) -> None:
    """Load the weights, the optimizer and the generators of a training state or of a portable file."""
    run = trainer.run_context
    if run.ranks.from_first(Path(source).is_file()):
        trainer.load_checkpoint(source, load_scheduler=False)
        return
    state = run.states.find(source, must_exist=True)
    parts = dataclasses.replace(run, scheduler=None, callbacks=CallbackHandler(), recorder=None)
    parts.history, parts.losses, parts.gradient_norms = copy.deepcopy(parts.history), LossTracker(), LossTracker()
    load_run(parts, state, restores_position=False, read=run.states.take_read(state))


def _scheduler_of(trainer: Trainer) -> WSDLrScheduler:
    if not isinstance(trainer.scheduler, WSDLrScheduler):
        raise ConfigurationError(
            f"WSDCheckpointCallback needs a WSDLrScheduler, but the scheduler of this run is {trainer.scheduler!r}. "
            "Pass `create_scheduler_fn=WSDLrScheduler.create_scheduler_fn()` to `train`, or remove the callback."
        )
    return trainer.scheduler
