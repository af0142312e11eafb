"""Warmup, stable, decay: a schedule that can be cut short, or continued, at the checkpoints it makes."""

from __future__ import annotations

import functools
from typing import TypedDict, TypeVar

from torch.optim import Optimizer

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.placeholders import Placeholder, TrainerPlaceholderValues
from pytorch_accelerated.schedulers.warmup_scheduler import WarmupLrScheduler, check_arguments

SchedulerT = TypeVar("SchedulerT", bound="WSDLrScheduler")


class PhaseInfo(TypedDict):
    """Where a number of finished updates lies in the schedule.

    ``phase`` is "warmup", "stable", "decay" or "finished"; the phase has the updates from ``start`` up to, without,
    ``end`` (None if finished), and ``checkpoint`` counts, from 0, the checkpoint that it leads to.
    """

    phase: str
    start: int
    end: int | None
    checkpoint: int


class DecayInfo(TypedDict):
    """How the decays look: their formula, share of the run, minimum as a share of the peak, and numbers of updates."""

    formula: str
    decay_phase_ratio: float
    lr_min: float
    num_decay_steps: list[int]


class WSDLrScheduler(WarmupLrScheduler):
    """A linear warmup, then the peak, and a decay before each checkpoint. A step is an optimizer update.

    Each group's own learning rate is its peak. The checkpoints are at the steps of `estimate_checkpoint_steps`, the
    last one at the end of the run. The decay to a checkpoint at step C takes the last ``decay_phase_ratio * C``
    updates before it, so that its model is what a run of length C would have given. After the decay the rate returns
    to the peak and training goes on from the decayed weights ("WSD-S", simplified); after the last one it stays at the
    minimum.

    At progress x of a decay, from 0 in its first update to 1 at the checkpoint, the rate is
    ``1 / (x / (lr_min * peak) + (1 - x) / peak)`` or, with `use_inverse_sqrt_decay` off, the straight line between
    both. The paper decays to a tenth, ``lr_min=0.1``; with a tiny `lr_min` the first formula falls almost at once.

    Args:
        optimizer: the optimizer.
        num_epochs: epochs of the run; not needed if `total_steps` is given.
        num_update_steps_per_epoch: updates per epoch; not needed if `total_steps` is given.
        total_steps: updates of the run; goes before the two above.
        num_warmup_steps: duration of the warmup, rounded to updates.
        decay_phase_ratio: share of the updates up to a checkpoint that its decay takes; 0 for no decay.
        lr_min: the minimum, as a share of the peak.
        warmup_starting_lr: rate of update 0 of the warmup; a group with a lower peak starts at its peak.
        use_inverse_sqrt_decay: the paper's decay, whose inverse grows linearly, instead of a straight line.
        num_checkpoints: number of checkpoints.
        is_continuation_from_checkpoint: the run goes on from weights and optimizer of a pre-decay checkpoint: there
            is no warmup, whatever `num_warmup_steps` says. Steps count from 0 in this run, unless a saved state of the
            scheduler is loaded, which brings its counter along.

    Raises:
        ConfigurationError: if an argument is out of its range, or the phases do not fit into the run.

    Source: Wen et al. (2024), "Understanding warmup-stable-decay learning rates", arXiv 2410.05192.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_epochs: float | None = None,
        num_update_steps_per_epoch: float | None = None,
        total_steps: float | None = None,
        num_warmup_steps: float = 0,
        decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6,
        warmup_starting_lr: float = 1e-6,
        use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1,
        is_continuation_from_checkpoint: bool = False,
    ) -> None:
        if total_steps is None:
            if num_epochs is None or num_update_steps_per_epoch is None:
                raise ConfigurationError(
                    f"{type(self).__name__} got num_epochs={num_epochs}, "
                    f"num_update_steps_per_epoch={num_update_steps_per_epoch} and total_steps=None, which do not tell "
                    "when to decay. Give the first two, or total_steps."
                )
            total_steps = num_epochs * num_update_steps_per_epoch
        check_arguments(
            self,
            (
                num_warmup_steps >= 0,
                f"num_warmup_steps={num_warmup_steps} is no duration: give 0 for no warmup, or more.",
            ),
            (
                0 <= decay_phase_ratio <= 1,
                f"decay_phase_ratio={decay_phase_ratio} is no share of a run: give a number from 0 to 1, usually 0.1.",
            ),
            (
                0 <= lr_min <= 1 and (lr_min > 0 or not use_inverse_sqrt_decay),
                f"lr_min={lr_min} is a share of the peak, and the inverse of the rate grows to its inverse: give a "
                "number above 0 and up to 1, for example 0.1; 0 needs use_inverse_sqrt_decay=False.",
            ),
        )
        if is_continuation_from_checkpoint:
            num_warmup_steps = 0
        super().__init__(
            optimizer,
            num_update_steps_per_epoch=1,  # the warmup is given in updates
            num_warmup_epochs=num_warmup_steps,
            warmup_starting_lr=warmup_starting_lr,
        )
        self.total_steps = round(total_steps)
        self.decay_phase_ratio = decay_phase_ratio
        self.lr_min = lr_min
        self.use_inverse_sqrt_decay = use_inverse_sqrt_decay
        self.num_checkpoints = num_checkpoints
        self.is_continuation_from_checkpoint = is_continuation_from_checkpoint
        self._checkpoint_steps = self._plan_checkpoints()

    @classmethod
    def create_scheduler_fn(  # type: ignore[override]  # durations in epochs
        cls: type[SchedulerT],
        total_num_epochs: float | Placeholder = TrainerPlaceholderValues.NUM_EPOCHS,
        num_update_steps_per_epoch: float | Placeholder = TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
        num_warmup_epochs: float | Placeholder | None = None,
        decay_phase_ratio: float = 0.1,
        lr_min: float = 1e-6,
        warmup_starting_lr: float = 1e-6,
        use_inverse_sqrt_decay: bool = True,
        num_checkpoints: int = 1,
        is_continuation_from_checkpoint: bool = False,
    ) -> functools.partial[SchedulerT]:
        """A function of the optimizer that makes this scheduler, for the `create_scheduler_fn` of `Trainer.train`.

        Args:
            total_num_epochs: epochs of the run.
            num_update_steps_per_epoch: updates per epoch.
            num_warmup_epochs: duration of the warmup; None is a tenth of the run.
            decay_phase_ratio: this and the others are those of the constructor.
        """
        if num_warmup_epochs is None:
            num_warmup_epochs = 0.1 * total_num_epochs
        return super().create_scheduler_fn(
            num_epochs=total_num_epochs,
            num_update_steps_per_epoch=num_update_steps_per_epoch,
            num_warmup_steps=num_warmup_epochs * num_update_steps_per_epoch,
            decay_phase_ratio=decay_phase_ratio,
            lr_min=lr_min,
            warmup_starting_lr=warmup_starting_lr,
            use_inverse_sqrt_decay=use_inverse_sqrt_decay,
            num_checkpoints=num_checkpoints,
            is_continuation_from_checkpoint=is_continuation_from_checkpoint,
        )

    def get_checkpoint_steps(self) -> list[tuple[int, int]]:
        """For each checkpoint the finished updates before its decay and after it, where to save the two models.

        Training can be continued from the first, to another length; the second is the better model.
        """
        return list(self._checkpoint_steps)

    def get_phase_info(self, num_updates: int) -> PhaseInfo:
        """The phase of the update that follows `num_updates` finished ones."""
        if num_updates < self.num_warmup_updates:
            return PhaseInfo(phase="warmup", start=0, end=self.num_warmup_updates, checkpoint=0)
        start = self.num_warmup_updates
        for checkpoint, (decay_start, end) in enumerate(self._checkpoint_steps):
            if num_updates < decay_start:
                return PhaseInfo(phase="stable", start=start, end=decay_start, checkpoint=checkpoint)
            if num_updates < end:
                return PhaseInfo(phase="decay", start=decay_start, end=end, checkpoint=checkpoint)
            start = end
        return PhaseInfo(phase="finished", start=start, end=None, checkpoint=self.num_checkpoints - 1)

    def get_decay_info(self) -> DecayInfo:
        """How the decays look."""
        return DecayInfo(
            formula="inverse" if self.use_inverse_sqrt_decay else "linear",
            decay_phase_ratio=self.decay_phase_ratio,
            lr_min=self.lr_min,
            num_decay_steps=[end - start for start, end in self._checkpoint_steps],
        )

    def get_current_step(self) -> int:
        """The number of finished updates."""
        return self.last_update + 1

    def get_current_phase_info(self) -> PhaseInfo:
        """The phase of the next update."""
        return self.get_phase_info(self.get_current_step())

    def get_lr_after_warmup(self, num_updates: int, peak: float) -> float:
        """The learning rate of a group with this peak, for the update that follows `num_updates` finished ones."""
        info = self.get_phase_info(num_updates)
        if info["phase"] == "stable" or self.decay_phase_ratio == 0:
            return peak
        start, end = self._checkpoint_steps[info["checkpoint"]]
        progress = min((num_updates - start) / (end - start), 1.0)
        if self.use_inverse_sqrt_decay:
            return peak / (progress / self.lr_min + 1 - progress)
        return peak * (progress * self.lr_min + 1 - progress)

    def _plan_checkpoints(self) -> list[tuple[int, int]]:
        plan = []
        previous = self.num_warmup_updates
        for end in estimate_checkpoint_steps(self.total_steps, self.num_checkpoints):
            # A decay that was asked for has at least one update, however short the run.
            start = end - (max(round(self.decay_phase_ratio * end), 1) if self.decay_phase_ratio else 0)
            if start < previous:
                raise ConfigurationError(
                    f"{type(self).__name__} got num_warmup_steps={self.num_warmup_updates}, "
                    f"decay_phase_ratio={self.decay_phase_ratio} and num_checkpoints={self.num_checkpoints}: the decay "
                    f"to the checkpoint at step {end} would start at {start}, but the phase before it ends at "
                    f"{previous}. Shorten warmup or decay, or take fewer checkpoints."
                )
            plan.append((start, end))
            previous = end
        return plan


def estimate_checkpoint_steps(total_steps: int, num_checkpoints: int = 3) -> list[int]:
    """Steps for checkpoints of a run, each about twice as far as the one before and the last at the end.

    Raises:
        ConfigurationError: if there are no checkpoints, or more than fit into the run.

    >>> estimate_checkpoint_steps(200_000)
    [50000, 100000, 200000]
    """
    if num_checkpoints < 1 or total_steps < 2 ** (num_checkpoints - 1):
        raise ConfigurationError(
            f"num_checkpoints={num_checkpoints} do not fit into total_steps={total_steps}, since each is twice as far "
            "as the one before. Take at least 1, and fewer in a short run."
        )
    return [total_steps // 2**halvings for halvings in reversed(range(num_checkpoints))]
