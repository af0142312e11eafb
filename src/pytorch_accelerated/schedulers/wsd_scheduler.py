"""Warmup, stable, decay: a schedule for runs that may be stopped, or continued, at checkpoints on the way."""

from __future__ import annotations

import functools
import math
from typing import Any, TypedDict, TypeVar

from torch.optim import Optimizer

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.placeholders import Placeholder, TrainerPlaceholderValues
from pytorch_accelerated.schedulers.warmup_scheduler import (
    WarmupLrScheduler,
    check_above_0,
    check_not_negative,
    check_share,
)

SchedulerT = TypeVar("SchedulerT", bound="WSDLrScheduler")


class PeriodInfo(TypedDict):
    """A period of the schedule, in finished updates: it ends with a checkpoint, and its last `decay_steps` decay.

    Attributes:
        period_start: its start.
        period_end: its end, at which the checkpoint is saved.
        decay_steps: the updates of the decay.
        pre_decay_step: the start of the decay, from which training can be continued to another length.
    """

    period_start: int
    period_end: int
    decay_steps: int
    pre_decay_step: int


class WSDLrScheduler(WarmupLrScheduler):
    """A linear warmup, then the peak, and a decay before each checkpoint. A step is an optimizer update.

    Each group's own learning rate is its peak. The checkpoints are at the steps of `estimate_checkpoint_steps`, the
    last one at the end of the run. The period before each checkpoint ends with a decay, which takes
    ``int(length * decay_phase_ratio)`` of the period's updates. After a decay the rate returns to the peak and training
    continues from the decayed weights ("WSD-S", simplified). After the last decay it stays at the minimum.

    At progress t of a decay, from 0 in its first update to 1 at the checkpoint, a group with peak p has the rate
    ``p * (lr_min + (1 - lr_min) * (1 - sqrt(t)))`` or, with ``use_inverse_sqrt_decay=False``, the paper's
    ``p / (t / lr_min + (1 - t))``, which falls almost at once if `lr_min` is tiny: the paper uses 0.1.

    Args:
        optimizer: the optimizer.
        num_epochs: epochs of the run; not needed if `total_steps` is given.
        num_update_steps_per_epoch: updates per epoch; not needed if `total_steps` is given.
        total_steps: updates of the run; overrides the two arguments above.
        num_warmup_steps: duration of the warmup, rounded to updates; None means 1 % of the run, rounded down.
        decay_phase_ratio: share of the updates of each period that its decay takes; 0 for no decay.
        lr_min: the minimum, as a share of the peak.
        warmup_starting_lr: rate of update 0 of the warmup; a group with a lower peak starts at its peak.
        use_inverse_sqrt_decay: use the square-root decay, not the paper's, whose inverse grows linearly.
        num_checkpoints: number of checkpoints.
        is_continuation_from_checkpoint: the run continues from the weights and optimizer of a checkpoint, and the
            length counts the new part: a fresh stable phase, then its decay, without a warmup. A state that is
            loaded gives the peaks; its steps count only where a training state is resumed.

    Raises:
        ConfigurationError: if an argument is out of its range, or the phases do not fit into the run.

    Sources: Wen et al. (2024), "Understanding warmup-stable-decay learning rates", arXiv 2410.05192; Hägele et al.
    (2024), "Scaling laws and compute-optimal training beyond fixed training durations", arXiv 2405.18392, for the
    square root.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_epochs: float | None = None,
        num_update_steps_per_epoch: float | None = None,
        total_steps: float | None = None,
        num_warmup_steps: float | None = 0,
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
                    f"{type(self).__name__} needs num_epochs and num_update_steps_per_epoch, or total_steps."
                )
            total_steps = round(num_epochs * num_update_steps_per_epoch)
        if num_warmup_steps is None:
            num_warmup_steps = int(total_steps * 0.01)
        check_not_negative(self, num_warmup_steps=num_warmup_steps)
        check_share(self, decay_phase_ratio=decay_phase_ratio, lr_min=lr_min)
        if not use_inverse_sqrt_decay:
            check_above_0(self, lr_min=lr_min)  # the paper's decay divides by it
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
        self._periods = self._plan_periods()

    @classmethod
    def create_scheduler_fn(
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
        """A function that makes this scheduler for an optimizer, for the `create_scheduler_fn` of `Trainer.train`.

        `num_warmup_epochs` is the duration of the warmup, and None means 1 % of the run; the other arguments are those
        of the constructor.
        """
        num_warmup_steps = None if num_warmup_epochs is None else num_warmup_epochs * num_update_steps_per_epoch
        lengths = (total_num_epochs, num_update_steps_per_epoch, None, num_warmup_steps)
        rates = (decay_phase_ratio, lr_min, warmup_starting_lr, use_inverse_sqrt_decay)
        return super().create_scheduler_fn(*lengths, *rates, num_checkpoints, is_continuation_from_checkpoint)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved position. A continuation starts over, unless a training state of it is resumed."""
        super().load_state_dict(state_dict)
        if self.is_continuation_from_checkpoint and not state_dict.get("is_resumed"):
            self.step_update(0)

    def get_checkpoint_steps(self) -> list[int]:
        """For each checkpoint, the number of finished updates at the end of its decay."""
        return [period["period_end"] for period in self._periods]

    def get_decay_info(self) -> list[PeriodInfo]:
        """The periods, one for each checkpoint.

        Training can be continued to another length from the state at `pre_decay_step`; the model at `period_end` is
        the better one.
        """
        return [PeriodInfo(**period) for period in self._periods]

    def get_phase_info(self, num_updates: int) -> PeriodInfo:
        """The period after `num_updates` finished updates. A checkpoint belongs to the period that it ends."""
        period = next((period for period in self._periods if num_updates <= period["period_end"]), self._periods[-1])
        return PeriodInfo(**period)

    def get_current_step(self) -> int:
        """The number of finished updates."""
        return self.last_update + 1

    def get_current_phase_info(self) -> PeriodInfo:
        """The current period."""
        return self.get_phase_info(self.get_current_step())

    def get_lr_after_warmup(self, num_updates: int, peak: float) -> float:
        """The learning rate of a group with this peak, for the update that follows `num_updates` finished ones."""
        progress = self._decay_progress(num_updates)
        if progress == 0:
            return peak
        if self.use_inverse_sqrt_decay:
            return peak * (self.lr_min + (1 - self.lr_min) * (1 - math.sqrt(progress)))
        return peak / (progress / self.lr_min + 1 - progress)

    def _decay_progress(self, num_updates: int) -> float:
        """How much of a decay is over before the next update: 0 outside of one, 1 at the end of the run."""
        for period in self._periods:
            if num_updates < period["period_end"]:
                updates_in_decay = num_updates - period["pre_decay_step"]
                return max(updates_in_decay, 0) / max(period["decay_steps"], 1)
        return 1.0 if self.decay_phase_ratio else 0.0

    def _plan_periods(self) -> list[PeriodInfo]:
        plan = []
        start = 0
        for end in estimate_checkpoint_steps(self.total_steps, self.num_checkpoints):
            decay_steps = int((end - start) * self.decay_phase_ratio)
            plan.append(
                PeriodInfo(
                    period_start=start, period_end=end, decay_steps=decay_steps, pre_decay_step=end - decay_steps
                )
            )
            start = end
        if self.num_warmup_updates > plan[0]["pre_decay_step"]:
            raise ConfigurationError(
                f"{type(self).__name__} got num_warmup_steps={self.num_warmup_updates}, but the first decay, to step "
                f"{plan[0]['period_end']}, would start at {plan[0]['pre_decay_step']}. Shorten one of them."
            )
        return plan


def estimate_checkpoint_steps(total_steps: int, num_checkpoints: int = 3) -> list[int]:
    """Steps for the checkpoints of a run: the last at the end, and each about twice as far as the one before it.

    Raises:
        ConfigurationError: if `num_checkpoints` is less than 1, or more than fit into the run.

    >>> estimate_checkpoint_steps(200_000)
    [50000, 100000, 200000]
    """
    if num_checkpoints < 1 or total_steps < 2 ** (num_checkpoints - 1):
        raise ConfigurationError(
            f"num_checkpoints={num_checkpoints} do not fit into total_steps={total_steps}. Choose at least 1, or fewer."
        )
    return [total_steps // 2**halvings for halvings in reversed(range(num_checkpoints))]
