"""What a run measures within its epochs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

_RATES = 5  # the place of `learning_rates` in a record
_COLUMNS = 11  # of the table, before those of the learning rates
_UNKNOWN = -1


class StepRecord(NamedTuple):
    """What was measured over some consecutive updates of one epoch.

    Each update belongs to exactly one record, and all ranks have the same records: losses and samples are those of all
    ranks, times those of rank 0.

    Attributes:
        epoch: the epoch of the updates, counted from 1.
        update: the number of optimizer updates up to and including the last one of the record, since the history was
            reset.
        samples: the samples used by those updates, over all ranks, including skipped ones.
        seconds: wall time of training until the last update of the record, with evaluations and saves. A resumed run
            continues the time of its training state.
        train_loss: the mean training loss per item over the updates of the record, the batches of each, and all ranks,
            weighted as in ``train_loss_epoch``. Losses that
            `nonfinite_policy` leaves out do not count; NaN if none does, or if one that counts is NaN.
        learning_rates: one for each parameter group of the optimizer, as set after the last update of the record, so
            they are those of the update that follows; empty if the trainer has no optimizer.
        gradient_norm: the mean norm of the gradients before clipping; None unless they are clipped by norm.
        samples_per_second: the samples of the record, over all ranks, per second of training without evaluations and
            saves; of a record in which a run was resumed, those after that.
        data_wait_share: the share of those seconds in which rank 0 waited for the next batch, between 0 and 1.
        peak_memory: the most bytes that a rank has used so far: allocated on its GPU, or resident in its process if it
            trains on the CPU; None if unknown.
    """

    epoch: int
    update: int
    samples: int
    seconds: float
    train_loss: float
    learning_rates: tuple[float, ...]
    gradient_norm: float | None
    samples_per_second: float
    data_wait_share: float
    peak_memory: int | None

    def columns(self) -> dict[str, float]:
        """The values of the record as columns of a table, without those that are None.

        The learning rate of the first parameter group is `learning_rate`; other groups have `learning_rate_1` and so
        on.
        """
        values: dict[str, Any] = {}
        for name, value in zip(self._fields, self, strict=True):
            if name == "learning_rates":
                rates = enumerate(self.learning_rates)
                values |= {f"learning_rate_{group}" if group else "learning_rate": rate for group, rate in rates}
            elif value is not None:
                values[name] = value
        return values


def plain_values_of(records: Iterable[StepRecord]) -> list[list[Any]]:
    """The fields of the records as lists, which JSON has."""
    return [[*record[:_RATES], list(record.learning_rates), *record[_RATES + 1 :]] for record in records]


def records_of(values: Iterable[Sequence[Any]] | torch.Tensor) -> list[StepRecord]:
    """The records of `plain_values_of` or of `table_of`.

    Raises:
        ValueError, TypeError: if `values` is none of their results.
    """
    if not isinstance(values, torch.Tensor):
        return [StepRecord._make([*row[:_RATES], tuple(row[_RATES]), *row[_RATES + 1 :]]) for row in values]
    if values.dtype != torch.float64 or values.dim() != 2 or values.shape[1] < _COLUMNS:
        raise ValueError(f"step records are a {values.dtype} tensor of shape {tuple(values.shape)}")
    return [
        StepRecord(
            int(epoch),
            int(update),
            int(samples),
            seconds,
            loss,
            tuple(rates[: int(groups)]),
            norm if has_norm else None,
            speed,
            wait,
            None if peak == _UNKNOWN else int(peak),
        )
        for epoch, update, samples, seconds, loss, has_norm, norm, speed, wait, peak, groups, *rates in values.tolist()
    ]


def table_of(records: Sequence[StepRecord]) -> torch.Tensor:
    """The records as a float64 matrix with a row for each. This is exact: their integers are below 2**53."""
    groups = max((len(record.learning_rates) for record in records), default=0)
    rows = [
        (
            *first,
            norm is not None,
            norm or 0.0,
            speed,
            wait,
            _UNKNOWN if peak is None else peak,
            len(rates),
            *rates,
            *[0.0] * (groups - len(rates)),
        )
        for *first, rates, norm, speed, wait, peak in records
    ]
    return torch.from_numpy(np.array(rows, dtype=np.float64).reshape(len(records), _COLUMNS + groups))
