"""Skips updates whose loss or gradient is NaN or infinite, if the run asks for that.

`docs/design/failing-updates.md` has the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.data.updates import MicroBatch
from pytorch_accelerated.errors import NonFiniteLossError
from pytorch_accelerated.loop.context import Context
from pytorch_accelerated.loop.step import Call, Step
from pytorch_accelerated.ranks.compat.torch import stored_values, tensor_stores
from pytorch_accelerated.ranks.held import held_parts
from pytorch_accelerated.ranks.keeping import Kept
from pytorch_accelerated.ranks.numerics import is_all_finite, listed, non_finite_modules
from pytorch_accelerated.ranks.sharding import own_part
from pytorch_accelerated.ranks.wrappers import bare_model
from pytorch_accelerated.record.loss import LossTracker
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.states.weights import are_finite


class RollBack(Exception):
    """Ends the current work on all ranks, so that the run can resume from a training state.

    Attributes:
        state: the folder of that state.
    """

    def __init__(self, state: Path) -> None:
        super().__init__()
        self.state = state


class FiniteLossTracker(LossTracker):
    """The mean of the finite losses; the others are ignored.

    Attributes:
        of_update: the losses since this was cleared, finite or not, on their device.
    """

    def __init__(self) -> None:
        super().__init__(leaves_out_non_finite=True)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.of_update: list[Any] = []

    def update(self, loss_batch_value: torch.Tensor | float, batch_size: Any = 1) -> None:
        """Add the mean loss of a batch."""
        super().update(loss_batch_value, batch_size)
        # Otherwise the loss is a mean over nothing.
        counts = isinstance(batch_size, torch.Tensor) or batch_size != 0
        self.of_update.append(self._pending_losses[-1] if counts else 0.0)


class Beginnings:
    """Keeps what updates change before they are applied: gradients, buffers and generators, but not the parameters.

    Args:
        holder: the trainer that users see.
        model: as prepared for the run.
    """

    def __init__(self, holder: Any, model: Any) -> None:
        roots = [part for part in (model, *held_parts(holder).values()) if isinstance(part, nn.Module)]
        modules = list({id(module): module for root in roots for module in root.modules()}.values())
        self._stores = [tensor_stores(module) for module in modules]
        found = [value for each in (holder, *modules) for value in vars(each).values()]
        self._own_generators = [value for value in found if isinstance(value, torch.Generator)]

    def kept(self, parameters: Iterable[torch.Tensor]) -> Kept:
        """What an update begins with.

        Args:
            parameters: of the optimizer.
        """
        of_modules = (each for store, _ in self._stores for each in store.values() if each is not None)
        everything = {id(each): each for each in (*of_modules, *parameters)}
        kept = Kept()
        kept.generators()
        for generator in self._own_generators:
            kept.call(generator.set_state, generator.get_state())
        kept.gradients(list(everything.values()))
        kept.tensors(
            buffer
            for _, store in self._stores
            for buffer in store.values()
            # Tensors whose elements share memory cannot be written to.
            if buffer is not None
            and all(stride or size < 2 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
        )
        return kept


class GuardedStep(Step):
    """A step that undoes an update whose losses or gradients are not finite.

    Attributes:
        before_update: what the current update began with.
    """

    def __init__(self, context: Context, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        assert isinstance(context.parts.reports.losses, FiniteLossTracker)
        self._beginnings = Beginnings(context.holder, context.parts.model)
        self.before_update = Kept()
        self._losses = context.parts.reports.losses
        # Updates that could not be applied, by the number of updates before them.
        self._left_out: set[int] = set()

    @property
    def _passes_over(self) -> bool:
        """Whether the run went back in order to leave the current update out."""
        return self.parts.state.updates in self._left_out

    def add(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of one batch; none for an update to leave out, which has no batch event either."""
        if self._passes_over:
            self.micro_batch = micro_batch
            self.parts.state.batches_in_epoch += not micro_batch.is_borrowed
            return
        if micro_batch.update is not self.micro_batch.update:  # the first batch of an update
            self._losses.of_update.clear()
            self.before_update = self._beginnings.kept(self.parameters())
        super().add(micro_batch)

    def apply(self) -> None:
        """Apply the update, unless it is left out."""
        if self._passes_over:
            super().finish((), is_skipped=True)
        else:
            super().apply()

    def release(self) -> None:
        """Drop what the last update began with, too."""
        super().release()
        self.before_update = Kept()

    def finish(self, calls: Sequence[Call], *, is_skipped: bool) -> None:
        """Apply the gradients if they are finite. Waits for the device once. Must be called by all ranks.

        Raises:
            NonFiniteLossError: if too many updates in a row were not finite.
            RollBack: if the run should go back to a training state.
        """
        if self._is_finite(is_skipped):
            super().finish(calls, is_skipped=is_skipped)
            return
        ranks, settings, saves = self.parts.ranks, self.asked.settings, self.control.saves
        message = self._description()
        is_last_bad = bool(self._losses.of_update) and not math.isfinite(self._losses.of_update[-1])
        batch = self.micro_batch.batch
        self._undo()
        if is_last_bad and ranks.count == 1:
            message += self._origin(batch)
        last = self.parts.state.updates + 1
        self._left_out.add(last - 1)
        good = next(number for number in range(last - 1, -1, -1) if number - 1 not in self._left_out)
        if last - good > settings.max_skipped_updates:
            raise NonFiniteLossError(
                f"{message} None of the updates {good + 1} to {last} could be applied, more in a row than "
                f"`max_skipped_updates` ({settings.max_skipped_updates}) allows, so the weights are those after update "
                f"{good}. Look for bad values in the data, and for a division, root or logarithm of 0 in the loss."
            )
        if settings.nonfinite_policy == "rollback":
            saves.finish()
            state = ranks.do_on_first(lambda: saves.newest_whole(self.asked.resumed_from))
            if state is not None:
                warn_user(ranks, f"{message} The run goes back to {state}, and on without this update.")
                raise RollBack(state)
            message += " There is no training state of this run to go back to."
        warn_user(ranks, f"{message} The update is left out; everything it would have changed is as before.")
        super().finish((), is_skipped=True)

    def record(self, history: Any) -> None:
        """Also record how many updates of the run have been skipped so far, if any."""
        super().record(history)
        if self.parts.state.skipped_updates:
            history.update_metric("skipped_updates", self.parts.state.skipped_updates)

    def _is_finite(self, is_skipped: bool) -> bool:
        ranks = self.parts.ranks
        losses = [torch.isfinite(torch.as_tensor(loss)).reshape(()) for loss in self._losses.of_update]
        # fp16's scaler skips what it found infinite.
        gradients = () if is_skipped else (are_finite(values for _, values in self._gradients()),)
        is_finite = torch.stack([flag.to(ranks.device) for flag in (*losses, *gradients)]).all()
        return not ranks.sum_on_device((~is_finite).float()).item()

    def _undo(self) -> None:
        self.before_update.restore()
        scaler = self.parts.accelerator.scaler
        if scaler is not None:  # it has checked the gradients and waits to be told the result
            scaler.update()
        self.control.emitter.call(self.context.trainer.optimizer_zero_grad)

    def _origin(self, batch: Any) -> str:
        """A sentence about what made the loss of `batch` non-finite, from a repeat of its forward pass.

        The update has been undone, so weights, buffers and generators are those that it began with. They are restored
        afterwards.
        """
        if not is_all_finite(batch):
            return " The batch itself has values that are NaN or infinite."
        try:
            with torch.no_grad(), non_finite_modules(bare_model(self.parts.model)) as names:
                output = self.context.trainer.calculate_train_batch_loss(batch)
        except Exception:  # a second pass may not fit into memory, or the hook may count its calls
            return ""
        finally:
            self.before_update.restore()
        if names:
            return f" The first outputs that are not finite come from the module {listed(names)}."
        if is_all_finite(output.get("loss")):
            return ""  # dropout before this batch of the update may have drawn differently
        return " The outputs of all modules are finite, so it comes from the loss function."

    def _gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters with gradients, and the values of these; for sharded ones, this rank's shard."""
        found = []
        for parameter in self.parameters():
            if parameter.grad is not None:
                values = stored_values(own_part(parameter.grad))
                if values.numel():
                    found.append((parameter, values))
        return found

    def _description(self) -> str:
        """A sentence with the update's error and its position. Must be called by all ranks."""
        parts, ranks, losses = self.parts, self.parts.ranks, self._losses.of_update
        last = parts.state.batches_in_epoch - 1
        first = min(last, last + 1 - len(losses))
        own = [str(first + index) for index, loss in enumerate(losses) if not math.isfinite(loss)]
        reasons = [
            f"the loss of batch {', '.join(batches)}{f' on rank {rank}' * (ranks.count > 1)} is NaN or infinite"
            for rank, batches in enumerate(ranks.exchange(own))
            if batches
        ]
        names = {id(parameter): name for name, parameter in bare_model(parts.model).named_parameters()}
        own_bad = [
            names.get(id(parameter), "a parameter that is not the model's")
            for parameter, values in self._gradients()
            if not torch.isfinite(values).all()
        ]
        bad = list(dict.fromkeys(name for of_rank in ranks.exchange(own_bad) for name in of_rank))
        if bad:
            reasons.append(f"there are NaN or infinite values in the gradient of {listed(bad)}")
        batches = f"batches {first} to {last}" if first < last else f"batch {last}"
        epoch, number = parts.history.current_epoch, parts.state.updates + 1
        return (
            f"In epoch {epoch}, update {number} of the run ({batches} of the epoch, counted from 0) cannot be applied: "
            f"{', and '.join(reasons)}."
        )
