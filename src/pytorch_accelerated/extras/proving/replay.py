"""Goes back to just before an update of a run, and looks at it: its rows, their losses, its gradient, its effect."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.looking.rehearsal import refuse
from pytorch_accelerated.extras.proving.rewind import NOT_TAKEN, rewind
from pytorch_accelerated.extras.proving.trace import gradients_of, weights_of
from pytorch_accelerated.facts.trees import count_rows, map_leaves
from pytorch_accelerated.loop import overrides
from pytorch_accelerated.ranks import kept, whole
from pytorch_accelerated.record.text import aligned
from pytorch_accelerated.utils import read_run_history

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer
    from pytorch_accelerated.loop.context import Context

Weights = dict[str, torch.Tensor]
_MOST_SHOWN = 8


@dataclasses.dataclass(frozen=True, repr=False)
class Replay:
    """The result of `Trainer.replay`: one update of a run; ``print(replay)`` shows it.

    Tensors are on the CPU.

    Attributes:
        update: counted from 1.
        epoch: counted from 1.
        state: the training state that the replay began with; None for the beginning of the run.
        updates_before: how many updates were trained again to reach this one.
        rows: the rows of the training set in the update, over all ranks, rank by rank in the order of the batches; None
            if they are unknown, as with streams.
        row_losses: the loss of each row, in the same order. From the outputs in the run, if the trainer's loss function
            makes the loss of them; else of each row by itself, in evaluation mode. None if a batch cannot be taken
            apart.
        batches: of this rank.
        loss: the mean loss of the update, over its batches and all ranks.
        recorded_loss: what the run recorded for it; None if its records are longer than an update, or end before.
        gradient_norm: the norm of the gradient, before clipping.
        gradient_norms: that of each module which has parameters itself, by its name.
        gradients: by the names of parameters, before clipping.
        weights: parameters and buffers before the update, by name.
        weights_after: the same after it.
    """

    update: int
    epoch: int
    state: Path | None
    updates_before: int
    rows: list[int] | None
    row_losses: list[float] | None
    batches: list[Any]
    loss: float
    recorded_loss: float | None
    gradient_norm: float
    gradient_norms: dict[str, float]
    gradients: Weights
    weights: Weights
    weights_after: Weights

    @property
    def worst_rows(self) -> list[tuple[int, float]]:
        """Rows with their losses, the highest first; NaN is the highest. Empty if they are unknown."""
        if self.rows is None or self.row_losses is None or len(self.rows) != len(self.row_losses):
            return []
        pairs = zip(self.rows, self.row_losses, strict=True)
        return sorted(pairs, key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1], reverse=True)

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensors, as plain values."""
        tensors = ("batches", "gradients", "weights", "weights_after")
        plain = {name: value for name, value in vars(self).items() if name not in tensors}
        return {**plain, "state": self.state and str(self.state)}

    def __repr__(self) -> str:
        start = "the beginning of the run" if self.state is None else str(self.state)
        recorded = ""
        if self.recorded_loss is not None:
            is_same = self.recorded_loss == self.loss or math.isnan(self.recorded_loss) and math.isnan(self.loss)
            recorded = ", as the run recorded it" if is_same else f", but the run recorded {self.recorded_loss!r}"
        distance = f"{self.updates_before + 1} update{'s'[: self.updates_before]}"
        lines = [f"Update {self.update}, in epoch {self.epoch}, {distance} from {start}"]
        facts = ("  loss", f"{self.loss!r}{recorded}"), ("  gradient norm", f"{self.gradient_norm:.4g}")
        lines += aligned(facts)
        worst, norms = self.worst_rows, sorted(self.gradient_norms.items(), key=lambda each: -each[1])
        for title, found in (("rows, the highest loss first", worst), ("gradient norms, the largest first", norms)):
            shown = [(f"    {name or 'the model'}", f"{value:.4g}") for name, value in found[:_MOST_SHOWN]]
            more = [f"    and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
            lines += [f"  {title}:", *aligned(shown, [1]), *more] if shown else []
        return "\n".join(lines)


def replay(trainer: Trainer, states: str | Path, update: int, debug: bool, given: Mapping[str, Any]) -> Replay:
    """The replay of `Trainer.replay`. Must be called by all ranks."""
    refuse(given, NOT_TAKEN, by="replay")
    moment = WatchedUpdate(update, debug)
    with rewind(trainer, states, update, moment, **given) as state:
        found = {**moment.found, "loss": trainer.run_history.step_records[-1].train_loss}
    return Replay(update=update, state=state, recorded_loss=_recorded_loss(states, update), **found)


class WatchedUpdate(TrainerCallback):
    """Looks at an update.

    Args:
        update: the number of the update, from 1.
        debug: whether to stop in the debugger before each of its batches.
        loss_of: of a batch with one row; default: by the outputs that the run has computed.

    Attributes:
        found: the fields of a `Replay`, except for what only the caller knows; empty until the update has come.
    """

    def __init__(self, update: int, debug: bool, loss_of: Callable[[Any], Any] | None = None) -> None:
        self._update, self._debug, self._loss_of = update, debug, loss_of
        self.found: dict[str, Any] = {}
        self._rows: list[list[int]] | None = None
        self._row_losses: list[list[float] | None] = []

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Look at the weights before the update, and at its batches."""
        run = trainer.run_context
        if run.parts.state.updates != self._update - 1:
            return
        batch = run.control.training.step.micro_batch.batch
        if not self.found:
            assert run.asked.plan is not None
            self._rows = _rows_of_batches(run, run.asked.plan.loader)
            self.found = {"epoch": trainer.run_history.current_epoch, "batches": []}
            self.found |= {"weights": _on_host(weights_of(trainer))}
            self.found |= {"updates_before": run.parts.state.updates - run.asked.plan.start.updates}
        self.found["batches"].append(map_leaves(_copied, batch))
        if not self._judges_outputs(trainer):
            self._row_losses.append(_losses_of_single_rows(trainer, batch, self._loss_of))
        if self._debug:
            _look_at(trainer, batch, None if self._rows is None else self._rows[len(self.found["batches"]) - 1])

    def on_train_step_end(self, trainer: Trainer, *, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """Compute the losses of rows from the outputs of the run."""
        if self._is_now(trainer) and self._judges_outputs(trainer):
            self._row_losses.append(_losses_of_outputs(trainer.loss_func, batch_output.get("model_outputs"), batch))

    def _is_now(self, trainer: Trainer, *, updates: int = 1) -> bool:
        """Whether the update is at work; a run may go back to before it, and pass over it."""
        return bool(self.found) and trainer.run_state.updates == self._update - updates

    def _judges_outputs(self, trainer: Trainer) -> bool:
        has_loss = self._loss_of is None and trainer.loss_func is not None
        return has_loss and not overrides(trainer, "calculate_train_batch_loss")

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Look at the gradient."""
        if not self._is_now(trainer):
            return
        gradients = {name: whole(each) for name, each in gradients_of(trainer).items()}
        by_module: dict[str, list[torch.Tensor]] = {}
        for name, gradient in gradients.items():
            by_module.setdefault(name.rpartition(".")[0], []).append(gradient)
        self.found |= {"gradients": _on_host(gradients), "gradient_norm": _norm(list(gradients.values()))}
        self.found |= {"gradient_norms": {name: _norm(parts) for name, parts in by_module.items()}}

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Look at the weights after the update."""
        if not self._is_now(trainer, updates=0):
            return
        run = trainer.run_context
        if self._rows is not None:  # a batch without a row of its own has a borrowed one
            self._row_losses = [
                each and each[: len(rows)] for rows, each in zip(self._rows, self._row_losses, strict=True)
            ]
        loss = run.parts.ranks.sum([run.parts.reports.losses.copy().loss_value])[0] / run.parts.ranks.count
        self.found |= {"weights_after": _on_host(weights_of(trainer)), "loss": loss}
        parts: dict[str, list[Any]] = {"rows": self._rows or [None], "row_losses": self._row_losses}
        for name, own in parts.items():
            per_rank = [part for each in run.parts.ranks.exchange(own) for part in each]
            self.found[name] = None if None in per_rank else [value for part in per_rank for value in part]


def _look_at(trainer: Trainer, batch: Any, rows: list[int] | None) -> None:
    """Stop in the debugger; the forward pass of the batch comes next."""
    breakpoint()


def _rows_of_batches(run: Context, loader: Any) -> list[list[int]] | None:
    """The rows of each batch of this rank in the update that has begun; None for a stream. All ranks must call it."""
    try:
        loader = loader.detached()
    except ConfigurationError:
        return None
    order, windows = loader.windows(run.parts.state.samples_in_epoch, run.parts.state.batches_in_epoch)
    cells = [cells[run.parts.ranks.index] for cells in next(windows).rounds]
    return [order.rows(cell.start, cell.start + cell.size) for cell in cells]


def _losses_of_outputs(loss_func: Any, outputs: Any, batch: Any) -> list[float] | None:
    """The loss of each row, in order, from the outputs of a whole batch."""
    size = count_rows(batch) or 0
    targets = batch[1] if isinstance(batch, (tuple, list)) else batch
    if count_rows(outputs) != size:
        return None
    return _losses(size, lambda at: loss_func(_row(outputs, at, size), _row(targets, at, size)))


def _losses_of_single_rows(trainer: Trainer, batch: Any, loss_of: Callable[[Any], Any] | None) -> list[float] | None:
    """The loss of each row, in order, computed by itself in evaluation mode. Changes nothing."""
    size, model = count_rows(batch) or 0, trainer.get_model()
    loss_of = loss_of or (lambda row: trainer.calculate_train_batch_loss(row)["loss"])
    with kept() as before:
        before.modes(model)
        before.tensors(model.buffers())
        model.eval()
        return _losses(size, lambda at: loss_of(_row(batch, at, size)))


def _losses(size: int, loss_of: Callable[[int], Any]) -> list[float] | None:
    """The losses of rows by their place in a batch; None if the batch cannot be taken apart."""
    with kept() as before, torch.no_grad():
        before.generators()
        try:
            return [float(loss_of(at)) for at in range(size)] or None
        except Exception:  # a hook or loss of the user's own may need a whole batch
            return None


def _row(data: Any, at: int, size: int) -> Any:
    """One row of everything that has `size` rows, as a batch."""
    return map_leaves(
        lambda leaf: leaf[at : at + 1] if getattr(leaf, "shape", None) and len(leaf) == size else leaf,
        data,
        keep_mappings=True,
    )


def _copied(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf


def _on_host(tensors: Mapping[str, torch.Tensor]) -> Weights:
    return {name: whole(each.detach()).to("cpu", copy=True) for name, each in tensors.items()}


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors))


def _recorded_loss(states: str | Path, update: int) -> float | None:
    """The loss that the run recorded for one update."""
    losses = {record.update: record.train_loss for record in read_run_history(states).step_records}
    return losses.get(update) if update == 1 or update - 1 in losses else None
