"""The learning rate range test: what the loss does while the rate grows from tiny to too large.

Source: Smith (2015), "Cyclical Learning Rates for Training Neural Networks", section 3.3, arXiv 1506.01186.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import ConfigurationError, DataError, StopTrainingError
from pytorch_accelerated.extras.looking.rehearsal import preparing, refuse, rehearsal
from pytorch_accelerated.facts import LIMITS
from pytorch_accelerated.record import decorate, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pytorch_accelerated.loop.callback import Trainer

_FEWEST_UPDATES = 20  # fewer make no curve
_SMOOTHING = 0.05  # standard deviation of the weights of losses in a mean, as a share of all updates
_LEAST_FALL = 0.05  # a loss that falls by a smaller share of its first value gives no suggestion
# What the test determines itself.
_NONE = ("num_epochs", "eval_dataset", "create_scheduler_fn", "resume_from")
_NOT_TAKEN = (*_NONE, *LIMITS, "max_duration", "overfit_batches")
_FORCED = {**dict.fromkeys((*_NONE, "nonfinite_policy")), "reset_run_history": True}


@dataclasses.dataclass(frozen=True, repr=False)
class LearningRateTest:
    """The result of `Trainer.find_lr`.

    The rates belong to the parameter group with the largest one; the others keep their ratios to it.

    Attributes:
        rates: the learning rate of each update, growing.
        losses: the mean loss of each update over its batches and all ranks, before the parameters changed. The last
            one may be infinite or NaN.
        ratios: the rate of each parameter group as a share of the largest one.
        has_diverged: whether the test ended early because the loss grew.
        groups: the parameter groups of the optimizer.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    ratios: tuple[float, ...]
    has_diverged: bool
    groups: Sequence[dict[str, Any]] = dataclasses.field(default=(), compare=False)

    @functools.cached_property
    def suggestion(self) -> float | None:
        """Halfway, on the logarithmic scale, between two rates; None if the loss does not fall.

        At the first, which is safe and often slow, the smoothed loss falls fastest; at the second, which is nearly too
        large, it is lowest.
        """
        # `benchmarks/results/find_lr.md` shows how well it trains.
        smoothed = self.smoothed_losses
        lowest = min(range(len(smoothed)), key=smoothed.__getitem__, default=0)
        if lowest < 2 or smoothed[0] - smoothed[lowest] < _LEAST_FALL * abs(smoothed[0]):
            return None
        slopes = [smoothed[place + 1] - smoothed[place - 1] for place in range(1, lowest)]
        steepest = 1 + min(range(len(slopes)), key=slopes.__getitem__)
        return math.sqrt(self.rates[steepest] * self.rates[lowest])

    @property
    def suggestions(self) -> tuple[float, ...] | None:
        """The suggested rate of each parameter group."""
        return None if self.suggestion is None else tuple(self.suggestion * ratio for ratio in self.ratios)

    def apply(self) -> None:
        """Give the optimizer the suggested rates.

        Raises:
            ConfigurationError: if there is no suggestion.
        """
        if self.suggestions is None:
            raise ConfigurationError(f"There is no learning rate to apply. {self!r}")
        for group, rate in zip(self.groups, self.suggestions, strict=True):
            group["lr"] = rate

    @property
    def smoothed_losses(self) -> tuple[float, ...]:
        """The losses up to the last finite one, each averaged with its neighbours. The suggestion is read from them."""
        # Means weighted by a bell curve around each loss, so that the curve is not shifted to later rates. A last huge
        # loss is cut off, so that it does not hide those before it.
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        if not finite:
            return ()
        width = max(_SMOOTHING * len(finite), 1.0)
        limit = _limit(finite[: max(len(finite) // 10, 1)], finite)
        values = torch.tensor(finite, dtype=torch.float64).clamp(max=limit)
        places = torch.arange(len(finite), dtype=torch.float64)
        weights = torch.exp(-0.5 * ((places[:, None] - places[None, :]) / width) ** 2)
        return tuple(((weights @ values) / weights.sum(1)).tolist())

    def __repr__(self) -> str:
        if self.suggestion is None:
            found = (
                f"No suggestion: the loss did not fall at any rate from {self.rates[0]:.1e} to {self.rates[-1]:.1e}. "
                "Try a larger `max_lr` or more updates, and check that the model can learn from these data."
            )
        else:
            found = f"Suggested learning rate: {self.suggestion:.2e}"
            if len(self.ratios) > 1:
                found += f" ({', '.join(f'{rate:.2e}' for rate in self.suggestions or ())} for the groups)"
        end = "stopped because the loss grew" if self.has_diverged else "the largest rate that was asked for"
        return f"{found}\n  {len(self.rates)} updates from {self.rates[0]:.1e} to {self.rates[-1]:.1e}, {end}"

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """A figure of the losses over the rates, with the suggestion.

        Args:
            path: also save the picture there; the suffix determines the format.

        Raises:
            MissingDependencyError: if matplotlib is not installed.
        """
        figure = new_figure(6, 3.5, needed_by="LearningRateTest.plot")
        axes = figure.add_subplot()
        smoothed = self.smoothed_losses
        losses = [loss for loss in self.losses if math.isfinite(loss)]
        rates = self.rates[: len(losses)]
        axes.plot(rates, losses, color="C0", alpha=0.3, linewidth=1, label="loss")
        axes.plot(rates, smoothed, color="C0", linewidth=1.8, label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="C1", linewidth=1.4, label=f"suggestion {self.suggestion:.1e}")
        axes.set_xscale("log")
        low, start = min(losses), smoothed[0]
        margin = 0.1 * max(start - low, abs(start), 1e-12)
        axes.set_ylim(low - margin, min(max(losses), start + 5 * margin) + margin)
        decorate(axes, "training loss of each update", "learning rate")
        axes.legend(frameon=False, loc="lower left")
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def find_learning_rate(
    trainer: Trainer,
    train_dataset: Any,
    *,
    min_lr: float,
    max_lr: float,
    num_updates: Any,
    arguments: Mapping[str, Any],
) -> LearningRateTest:
    """The range test of `Trainer.find_lr`. Must be called by all ranks."""
    refuse(arguments, _NOT_TAKEN, by="find_lr")
    if not 0 < min_lr < max_lr < math.inf or num_updates < _FEWEST_UPDATES:
        raise ConfigurationError(
            f"`find_lr` got rates from {min_lr!r} to {max_lr!r} in {num_updates!r} updates, but the first must be "
            f"above 0, the second larger and finite, and the updates at least {_FEWEST_UPDATES}, for a curve."
        )
    test = _RangeTest(min_lr, max_lr, num_updates)
    with rehearsal(trainer, [*preparing(trainer.callback_handler), test]):
        trainer.train(train_dataset, **{**arguments, **_FORCED, "max_num_train_steps": num_updates})
        return LearningRateTest(
            tuple(test.rates), tuple(test.losses), test.ratios, test.has_diverged, trainer.optimizer.param_groups
        )


class _RangeTest(TrainerCallback):
    """Sets the rates of each update, reads its loss, and stops when the loss grows."""

    def __init__(self, min_lr: float, max_lr: float, num_updates: int) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.ratios: tuple[float, ...] = ()
        self.has_diverged = False
        self._min_lr = min_lr
        self._factor = (max_lr / min_lr) ** (1 / (num_updates - 1))
        self._first = max(num_updates // 10, 5)  # updates with rates so small that they change nothing
        self._before = (0.0, 0.0)

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        rates = [float(group.get("lr", 0.0)) for group in getattr(trainer.optimizer, "param_groups", None) or []]
        if max(rates, default=0.0) <= 0:
            raise ConfigurationError(
                f"`find_lr` needs learning rates above 0, whose ratios it keeps, but has {trainer.optimizer!r}."
            )
        self.ratios = tuple(rate / max(rates) for rate in rates)

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self._before = (0.0, 0.0)

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        rate = self._min_lr * self._factor ** len(self.rates)
        self.rates.append(rate)
        for group, ratio in zip(trainer.optimizer.param_groups, self.ratios, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        run = trainer.run_context
        total, count = run.parts.ranks.sum(
            [run.parts.reports.losses.total_loss, run.parts.reports.losses.running_count]
        )
        if count == self._before[1]:
            raise DataError(
                "`find_lr` cannot see the loss of an update: nothing was recorded for it. Call "
                "`self._update_loss_tracker` in your own `_perform_forward_and_backward_passes`."
            )
        loss = (total - self._before[0]) / (count - self._before[1])
        self._before = (total, count)
        self.losses.append(loss)
        if not math.isfinite(loss) or self._has_grown():
            self.has_diverged = True
            raise StopTrainingError("The loss grows.")

    def _has_grown(self) -> bool:
        first, later = self.losses[: self._first], self.losses[self._first :]
        if len(later) < self._first:
            return False
        return statistics.fmean(later[-max(self._first // 3, 3) :]) > _limit(first, self.losses)


def _limit(first: Sequence[float], losses: Sequence[float]) -> float:
    """A loss that has grown: above the `first` ones by their own size, or by what the loss could fall."""
    start = statistics.fmean(first)
    return start + max(abs(start), start - min(losses))
