"""What becomes of an update whose loss or gradient is NaN or infinite, where a run is to survive it.

`UpdateGuard` stands beside the loop's update: it looks at the complete gradients, and may keep them from being applied.
`docs/design/nonfinite.md` says why it is built like this.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.saving import SaveTrainingStateCallback
from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing.policy import SavePolicy
from pytorch_accelerated.checkpointing.training_state import load_run
from pytorch_accelerated.checkpointing.verify import list_states, verify
from pytorch_accelerated.checkpointing.weights import are_finite
from pytorch_accelerated.data.updates import Update
from pytorch_accelerated.errors import ConfigurationError, InvalidCheckpointError, NonFiniteLossError
from pytorch_accelerated.models.preparation import is_replicated
from pytorch_accelerated.models.sharding import own_part
from pytorch_accelerated.steps.step_facts import StepParts
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.training.settings import TrainSettings

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer


class RollBack(Exception):
    """Ends what the loop is doing, on all ranks, so that it can go on from a training state.

    Attributes:
        guard: whose `roll_back` is to be called.
    """

    def __init__(self, guard: UpdateGuard) -> None:
        super().__init__()
        self.guard = guard


def refuse_what_cannot_be_held_back(trainer: Trainer, settings: TrainSettings) -> None:
    """Refuse a run whose `nonfinite_policy` could not be kept. All complaints come in one error.

    Raises:
        ConfigurationError: names what is in the way.
    """
    complaints: list[str] = []
    if trainer.compile_step is not None:
        complaints.append("a captured step does not stop to look at its gradients: leave `compile_step` out")
    if not is_replicated(trainer._accelerator):
        kind = trainer._accelerator.distributed_type.value
        complaints.append(f"{kind} cuts gradients into pieces that no rank sees whole: use one process or DDP")
    if settings.nonfinite_policy == "rollback" and not any(saver.policy != SavePolicy() for saver in _savers(trainer)):
        complaints.append(
            "there is nothing to go back to: add `SaveTrainingStateCallback(save_every_n_steps=...)` to the callbacks"
        )
    if complaints:
        raise ConfigurationError(
            f"`nonfinite_policy` is {settings.nonfinite_policy!r}, which cannot be kept in this run: "
            f"{'; '.join(complaints)}; or leave `nonfinite_policy` out."
        )


class FiniteLossTracker(LossTracker):
    """The mean of the losses that are finite; the others count nowhere.

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
        """Take in the mean loss of a batch."""
        super().update(loss_batch_value, batch_size)
        counts = isinstance(batch_size, torch.Tensor) or batch_size != 0  # else the loss is a mean over nothing
        self.of_update.append(self._pending_losses[-1] if counts else 0.0)

    def replace_last(self, loss: torch.Tensor) -> None:
        """Correct the loss of the last batch."""
        super().replace_last(loss)
        self.of_update[-1] = loss.detach()


class UpdateGuard:
    """Keeps updates from being applied whose losses or gradients are not finite.

    Args:
        trainer: whose updates they are.
        resumed_from: the training state that the run goes on from, if any.

    Attributes:
        losses: the loss tracker of the run.
    """

    def __init__(self, trainer: Trainer, resumed_from: Path | None) -> None:
        self.losses = FiniteLossTracker()
        self._trainer = trainer
        self._settings = trainer._settings
        self._rolls_back = self._settings.nonfinite_policy == "rollback"
        self._resumed_from = resumed_from
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._left_out: set[int] = set()  # updates that could not be applied, by the number of those before them
        self._state: Path | None = None  # to go back to
        # What is in these folders already belongs to other runs.
        self._newest_of_others: dict[Path, int] = {}
        if self._rolls_back and trainer._ranks.is_first:
            for saver in _savers(trainer):
                serials = [manifest.serial for _, manifest in list_states(Path(saver.save_dir))]
                self._newest_of_others[Path(saver.save_dir)] = max(serials, default=0)

    # ------------------------------------------------------------------------------------------- what the loop calls

    def lets_begin(self, update: Update) -> bool:
        """Whether `update` is to be computed; one that the run went back for is passed over here instead."""
        if self._trainer.run_state.updates in self._left_out:
            self._pass_over(update)
            return False
        # A forward pass with NaN in it would leave NaN in BatchNorm's statistics for good.
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in StepParts(self._trainer).buffers().values()]
        self.losses.of_update.clear()
        return True

    def holds_back(self, *, is_skipped: bool) -> bool:
        """Whether the gradients must not be applied. Waits for the device once. Must be called by all ranks.

        Args:
            is_skipped: whether fp16 has found them infinite, and will leave this update out by itself.

        Raises:
            NonFiniteLossError: if it has happened too often.
            RollBack: if the run shall go back to a training state.
        """
        trainer = self._trainer
        losses = [torch.isfinite(torch.as_tensor(loss)).reshape(()) for loss in self.losses.of_update]
        gradients = () if is_skipped else (are_finite(values for _, values in self._gradients()),)
        is_finite = torch.stack([flag.to(trainer.device) for flag in (*losses, *gradients)]).all()
        if not trainer._ranks.sum_on_device((~is_finite).float()).item():
            return False
        self._undo()
        message = self._description()
        last = trainer.run_state.updates + 1
        self._left_out.add(last - 1)
        good = next(number for number in range(last - 1, -1, -1) if number - 1 not in self._left_out)
        if last - good > self._settings.max_skipped_updates:
            trainer._guarded(trainer.optimizer_zero_grad)
            raise NonFiniteLossError(
                f"{message} None of the updates {good + 1} to {last} could be applied, more in a row "
                f"than `max_skipped_updates` ({self._settings.max_skipped_updates}) allows, so the weights are those "
                f"after update {good}. Look for bad values in the data and for a division, root or "
                "logarithm of 0 in the loss; else go on from an older training state with a smaller learning rate or "
                "`gradient_clip_norm`."
            )
        if self._rolls_back:
            self._state = self._newest_state()
            if self._state is not None:
                warn_user(trainer, f"{message} The run goes back to {self._state}, and on without this update.")
                raise RollBack(self)
            message += " There is no training state of this run to go back to."
        warn_user(trainer, f"{message} The update is left out; everything it would have changed is as before.")
        return True

    def roll_back(self) -> None:
        """Let the run be where it was when the newest training state was written. Must be called by all ranks."""
        trainer = self._trainer
        assert self._state is not None
        trainer._guarded(trainer.optimizer_zero_grad)
        trainer._requested_states.clear()
        trainer._evaluation_requested = False
        load_run(trainer, self._state)

    def record(self) -> None:
        """Record how many updates of the run have been skipped so far, if any."""
        if self._trainer.run_state.skipped_updates:
            self._trainer.run_history.update_metric("skipped_updates", self._trainer.run_state.skipped_updates)

    # ------------------------------------------------------------------------------------------------ its parts

    def _pass_over(self, update: Update) -> None:
        """Use up the batches of an update. No batch event is fired, since there is no batch to speak of."""
        trainer = self._trainer
        for micro_batch in update.micro_batches:
            trainer.run_state.batches_in_epoch += not micro_batch.is_borrowed
        trainer.run_state.finish_update(samples=update.samples, skipped=True)
        trainer.run_history._finish_update()
        trainer._fire("on_optimizer_step_end")

    @torch.no_grad()
    def _undo(self) -> None:
        """Bring everything that the passes have changed, but for the gradients, to where it was."""
        for buffer, before in self._buffers:
            buffer.copy_(before)
        scaler = self._trainer._accelerator.scaler
        if scaler is not None:  # it has looked at the gradients and waits to hear what came of them
            scaler.update()

    def _gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters that have gradients, and the values of those; of sharded ones this rank's part."""
        found = []
        for parameter in self._trainer._parameters():
            if parameter.grad is not None:
                gradient = own_part(parameter.grad)
                values = gradient._values() if gradient.is_sparse else gradient
                if values.numel():
                    found.append((parameter, values))
        return found

    def _description(self) -> str:
        """What is wrong with the update, and where, in a sentence. Must be called by all ranks."""
        trainer, losses = self._trainer, self.losses.of_update
        first = trainer.run_state.batches_in_epoch - len(losses)
        own = [first + index for index, loss in enumerate(losses) if not math.isfinite(loss)]
        everyones = trainer._ranks.exchange(own)
        reasons = []
        for rank, batches in enumerate(everyones):
            where = f" on rank {rank}" if len(everyones) > 1 else ""
            if batches:
                reasons.append(f"the loss of {_counted('batch', 'batches', batches)}{where} is NaN or infinite")
        names = {id(parameter): name for name, parameter in trainer.get_model().named_parameters()}
        own_bad = [
            names.get(id(parameter), "a parameter that is not the model's")
            for parameter, values in self._gradients()
            if not torch.isfinite(values).all()
        ]
        bad = list(dict.fromkeys(name for of_rank in trainer._ranks.exchange(own_bad) for name in of_rank))
        if bad:
            shown = ", ".join(map(repr, bad[:3])) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
            reasons.append(f"there are NaN or infinite values in the gradient of {shown}")
        epoch, number = trainer.run_history.current_epoch, trainer.run_state.updates + 1
        last = trainer.run_state.batches_in_epoch - 1
        batches_of_update = _counted("batch", "batches", range(min(first, last), last + 1))
        return (
            f"In epoch {epoch}, update {number} of the run ({batches_of_update} of the epoch, counted from 0) cannot "
            f"be applied: {', and '.join(reasons)}."
        )

    def _newest_state(self) -> Path | None:
        """The newest valid training state that this run can go back to. Must be called by all ranks."""
        trainer = self._trainer
        trainer._finish_saves()
        return trainer._ranks.do_on_first(self._find_state)

    def _find_state(self) -> Path | None:
        states = [
            (manifest.facts["updates"], manifest.serial, folder)
            for place, newest_of_others in self._newest_of_others.items()
            for folder, manifest in list_states(place)
            if manifest.serial > newest_of_others and "updates" in manifest.facts
        ]
        folders = [folder for *_, folder in sorted(states, reverse=True)]
        for folder in [*folders, *([self._resumed_from] if self._resumed_from is not None else [])]:
            try:
                verify(folder)
            except InvalidCheckpointError:
                continue
            return folder
        return None


def _savers(trainer: Trainer) -> list[SaveTrainingStateCallback]:
    return [callback for callback in trainer.callback_handler if isinstance(callback, SaveTrainingStateCallback)]


def _counted(one: str, many: str, numbers: Any) -> str:
    """For example "batch 3", or "batches 3 to 5" for numbers that follow each other."""
    numbers = list(numbers)
    if len(numbers) == 1:
        return f"{one} {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{many} {numbers[0]} to {numbers[-1]}"
    return f"{many} {', '.join(map(str, numbers))}"
