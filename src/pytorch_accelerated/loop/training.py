"""`Training`: the position in a training run, and what happens between its updates. `trainer.py` has its order."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.data.building import empty_loader_error
from pytorch_accelerated.data.planned_loader import PlannedLoader
from pytorch_accelerated.data.updates import MicroBatch, RunLoader
from pytorch_accelerated.data.workers import usable_processors
from pytorch_accelerated.errors import ConfigurationError, NonFiniteLossError, StopTrainingError
from pytorch_accelerated.facts.run_state import RunPhase
from pytorch_accelerated.loop.context import Context
from pytorch_accelerated.loop.guarded import FiniteLossTracker, GuardedStep
from pytorch_accelerated.loop.hooks import counter_for, own_hooks
from pytorch_accelerated.loop.preparing import distributed
from pytorch_accelerated.loop.states import Requests
from pytorch_accelerated.loop.step import Step
from pytorch_accelerated.loop.variants import GuardedRankedStep, RankedStep
from pytorch_accelerated.ranks.wrappers import bare_model
from pytorch_accelerated.record.loss import LossTracker
from pytorch_accelerated.record.step_records import EpochClock, StepRecorder
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.record.watching import WatchedMetric
from pytorch_accelerated.states.training_state import moment_of

# Losses stay on the device until they are read, all at once, because each read waits for the device. The interval is a
# number of updates, not of seconds: the last bit of a sum depends on where it is divided, and a resumed run must divide
# it at the same places.
UPDATES_BETWEEN_READINGS = 64

_OWN_PARTS = ("_perform_forward_and_backward_passes", "_clip_gradients", "_update_loss_tracker")
_HOOKS_OF_UPDATE = ("backward_step", "optimizer_step", "scheduler_step", "optimizer_zero_grad", *_OWN_PARTS)


class Training:
    """What a run of `train` does between its updates. All ranks must call its methods.

    Args:
        context: of the run.

    Attributes:
        requests: requested evaluations and saves.
        step: computes updates; it exists as soon as the run is prepared.
        further_passes: training passes besides the first one of each epoch, in loops of the user's own.
        all_agree_after_each_update: whether there are several ranks, of which any may ask to stop within each update.
    """

    #: Whether the loop makes step records of its losses.
    has_step_records = True
    #: Whether the loop gives a model that was left in evaluation mode the modes of training again.
    keeps_modes = True
    #: The argument of `train` that names a state.
    name_of_resume = "resume_from"
    #: How users set the number of workers.
    way_to_give_workers = 'train_dataloader_kwargs={{"num_workers": {0}}}, or DataLoader(..., num_workers={0})'

    def __init__(self, context: Context) -> None:
        self.context = context
        self.requests = Requests(context.saves, self.evaluate_as_requested, self.write_state)
        self.step: Step = None  # type: ignore[assignment]  # until the run is prepared
        self.further_passes = 0
        self.all_agree_after_each_update = False
        self._updates_between_looks = UPDATES_BETWEEN_READINGS
        self._updates_before = 0
        self._trained: nn.Module | None = None
        self._updates_of_epoch: int | None = None
        context.losses = LossTracker() if context.settings.nonfinite_policy is None else FiniteLossTracker()

    def make_step(self, *, steps_scheduler: bool) -> None:
        """Create the step, now that all of its parts exist.

        Args:
            steps_scheduler: whether the scheduler steps after each update.
        """
        context = self.context
        own = own_hooks(context.trainer, _OWN_PARTS)
        self.step = self.kind_of_step()(context, own, steps_scheduler=steps_scheduler)
        if self.has_step_records:
            updates = None if context.config is None else context.config.max_num_train_steps
            every = context.settings.record_every_n_steps
            context.recorder = StepRecorder(
                context.history, context.losses, context.gradient_norms, context.ranks.device, every, updates
            )

    def kind_of_step(self) -> type[Step]:
        """The kind of step that the run needs."""
        if self.context.settings.nonfinite_policy is not None:
            return GuardedStep if self.context.ranks.count == 1 else GuardedRankedStep
        return Step if self.context.ranks.count == 1 else RankedStep

    def release(self) -> None:
        """Remove what training wrapped around the model, and drop the references to the last batch."""
        self.context.release_model()
        if self.step is not None:
            self.step.release()

    # ------------------------------------------------------------------------------------------- parts of the run

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to train."""
        state, settings = self.context.state, self.context.settings
        if settings.limit is not None:
            return state.phase is RunPhase.EPOCH_CLOSED and self.context.is_at_limit
        assert settings.num_epochs is not None
        return state.epochs >= settings.num_epochs

    @property
    def data_epoch(self) -> int:
        """The epoch that determines the order of the samples: epochs of this run and of those that it continues."""
        return self.context.epochs_before + self.context.state.epochs + self.further_passes

    def close(self, failure: NonFiniteLossError | None) -> NonFiniteLossError | None:
        """Write the requested states, complete the records, and wait for saves: no update follows.

        Args:
            failure: a non-finite loss that ended the run. A model that may be broken is not saved.

        Returns:
            That failure, or the one that a save has found.
        """
        context, requests = self.context, self.requests
        requests.evaluation = requests.defers_saves = False
        if failure is not None:
            requests.forget()  # a broken model must not replace a good state
        states = [folder for folder, *_ in requests.states]
        try:
            requests.write_states()
        except NonFiniteLossError as error:  # the parameters are
            failure = error
        context.reports.finish_records()
        context.saves.finish()
        context.saves.saved_to = states[-1] if states and failure is None and not context.saves.failures else None
        return failure

    def start_part(self, hook: Callable[[], None], event: str) -> None:
        """Begin the run or an epoch of it: the hook, the event, and what they request."""
        emitter, state = self.context.emitter, self.context.state
        emitter.defer(hook)
        emitter.emit(event)
        # One within an epoch is repeated after the start of the epoch, at which callbacks prepare for it.
        is_too_early = event == "on_training_run_start" and state.phase is RunPhase.TRAINING
        self.requests.act(state, repeats=not is_too_early)
        self.context.stopping.stop_if_asked()

    def close_part(self, phase: RunPhase) -> None:
        """Record that a part of the epoch is over, after its last callback; then serve requests and stop if asked."""
        self.context.state.phase = phase
        self.context.stopping.end_startup()  # here, too, for loops of the user's own
        self.requests.act(self.context.state)
        self.context.stopping.stop_if_asked()

    # ------------------------------------------------------------------------------------------------ parts of an epoch

    def begin_pass(self) -> None:
        """Begin a training pass at its first sample, if the last one is over.

        The trainer's loop has done so already, and a resumed pass isn't over. A loop of the user's own only counts the
        epochs of the run history, or passes over the data twice in one of them.

        Raises:
            StopTrainingError: if the run has no update left.
        """
        state = self.context.state
        if state.phase is RunPhase.TRAINING:
            return
        if self.context.is_at_limit:
            raise StopTrainingError(f"The {state.updates} updates of the run are done.")
        if state.phase is not RunPhase.EPOCH_CLOSED:
            if self.context.history.current_epoch > self.context.epoch_clock.epoch:
                state.finish_epoch()
            else:
                self.further_passes += 1
        state.start_epoch()

    def watching_for_anomalies(self) -> contextlib.AbstractContextManager[Any]:
        """Context for a training pass: if the run asks for that, the first NaN in a backward pass is an error."""
        is_asked = self.context.settings.detect_anomaly
        return torch.autograd.set_detect_anomaly(True) if is_asked else contextlib.nullcontext()

    def set_epoch(self) -> None:
        """Tell the loader the epoch. In a loop of the user's own, a subclass may iterate over it itself."""
        loader = self.context.loaders.train
        if isinstance(loader, RunLoader):
            loader.set_epoch(self.data_epoch)

    def start_epoch(self) -> None:
        """Start the clock of a training epoch, and agree how often the ranks agree."""
        context, state = self.context, self.context.state
        context.states.cut, state.is_cut = None, False
        self.all_agree_after_each_update = context.ranks.count > 1 and context.ranks.any(self.may_stop_in_update())
        context.epoch_clock = EpochClock(context.history.current_epoch)
        if context.recorder is not None:
            updates = state.updates - state.updates_in_epoch % UPDATES_BETWEEN_READINGS
            context.recorder.start_epoch(updates, state.samples_in_epoch, context.epoch_clock)
            self._updates_between_looks = math.gcd(context.recorder.interval, UPDATES_BETWEEN_READINGS)

    def may_stop_in_update(self) -> bool:
        """Whether a callback or a hook of the user on this rank may ask to stop within an update."""
        context = self.context
        return bool(own_hooks(context.trainer, _HOOKS_OF_UPDATE)) or context.callbacks.ranks_agree_after_each_update()

    def batches(self, loader: Any) -> Iterator[MicroBatch]:
        """The batches of the current epoch that are left, update by update."""
        context, state = self.context, self.context.state
        # A callback may have replaced the loader, or limited it, at the start of the epoch.
        loader = distributed(context, loader, context.loaders.train_kwargs)
        loader.set_epoch(self.data_epoch)
        if context.left_out:
            loader.leave_out(context.left_out)
        if context.plan is not None:
            context.plan = dataclasses.replace(context.plan, loader=loader)
        context.epoch_clock.watch(loader)
        self._updates_before, self._updates_of_epoch = state.updates, loader.count_updates()
        counter = counter_for(context, loader, "calculate_train_batch_loss")
        batches = loader.batches(start=state.samples_in_epoch, batches_done=state.batches_in_epoch, count_items=counter)
        self._note_modes()
        return batches if context.settings.limit is None else self._up_to_limit(batches)

    def _note_modes(self) -> None:
        """Note which modules are in evaluation mode while the pass begins: the user keeps them there."""
        module = bare_model(self.context.model)
        is_trained = self.keeps_modes and isinstance(module, nn.Module) and module.training
        self._trained = module if is_trained else None
        self._in_evaluation = [part for part in module.modules() if not part.training] if is_trained else []

    def _train_again(self) -> None:
        """Restore the modes that the model had when the pass began: a callback has forgotten to."""
        self.context.model.train()
        for part in self._in_evaluation:
            part.training = False
        warn_user(
            self.context.ranks,
            "A callback or hook has left the model in evaluation mode within an epoch of training: its modules have "
            "the modes again that they had when the epoch began. Call `model.train()` after an evaluation of your own, "
            "or let the trainer evaluate: `trainer.request_evaluation()`.",
        )

    def _up_to_limit(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The batches of the updates until the run is at its limit. Nothing is read after that."""
        is_in_update = False
        while (is_in_update or not self.context.is_at_limit) and (batch := next(batches, None)) is not None:
            if batch.update.items is None and self.context.settings.max_tokens is not None:
                raise ConfigurationError(
                    "`max_tokens` was given, but nothing counts the tokens of a batch. Override `count_batch_items` in "
                    "a subclass, which returns those that count in its loss, or give `max_samples`."
                )
            is_in_update = not batch.is_last
            yield batch

    def act_at_safe_point(self) -> None:
        """Read losses, serve requests, and stop if asked: between two updates, where everything is consistent."""
        if self._trained is not None and not self._trained.training:
            self._train_again()
        context, requests = self.context, self.requests
        state, stopping = context.state, context.stopping
        if stopping.startup_seconds is None:
            stopping.end_startup()
        if state.updates_in_epoch % self._updates_between_looks == 0:
            self._look_at_losses()
        if requests.evaluation or requests.states:
            # A state must not be saved behind a loss that nobody has looked at.
            context.losses.look_for_non_finite()
            context.reports.report(context.losses)
            with context.epoch_clock.paused():
                requests.act(state)
        # A single process knows whether it is asked to stop. Several must exchange a message, which costs as much as a
        # small update: after each one only if a callback may stop the run there, else about once a second.
        if context.uneven is None or self.all_agree_after_each_update or stopping.is_due(state.updates):
            stopping.stop_if_asked()

    def _look_at_losses(self) -> None:
        """End a step record if one is due, and read losses if that is due."""
        context, state, recorder = self.context, self.context.state, self.context.recorder
        if recorder is not None and state.updates_in_epoch % recorder.interval == 0:
            recorder.mark(state.samples_in_epoch, context.parameter_groups)
        if state.updates_in_epoch % UPDATES_BETWEEN_READINGS == 0:
            self._read_losses()
            if recorder is not None:
                recorder.grow(state.updates)
                self._updates_between_looks = math.gcd(recorder.interval, UPDATES_BETWEEN_READINGS)

    def _read_losses(self) -> None:
        self.context.losses.read()
        self.context.gradient_norms.read()
        self.context.reports.report(self.context.losses)

    def finish_epoch(self, loader: Any) -> None:
        """Read the remaining losses and the time of the epoch.

        Raises:
            DataError: if the epoch had no update.
        """
        context = self.context
        if context.state.updates_in_epoch == 0:
            self.refuse_empty_epoch(loader)
        if self.ends_before_data:
            # The epoch may be resumed. Means of losses and metrics must continue then, so they are kept before this end
            # of the pass records and resets them.
            context.reports.complete_records()
            context.states.cut = moment_of(context, is_cut=True)
        else:
            context.mode.eval()  # a cut epoch may be resumed, with the very same weights
        trained = context.state.updates > self._updates_before  # else it was resumed at its end
        if trained and context.prepared is not None and (complaint := context.prepared.complaint()):
            warn_user(context.ranks, complaint)
        context.history.add_timing(context.epoch_clock.read())
        self._advise_on_workers()
        context.reports.mark_rest()
        self._read_losses()

    def _advise_on_workers(self) -> None:
        """Say after the first epoch how many workers to give, if the run waited for data that workers could read."""
        context = self.context
        (timing, *later), loader = context.history.timings, context.loaders.train
        # In memory there is nothing to wait for, and a stream may be read once by each of its workers.
        if later or not isinstance(loader, PlannedLoader) or loader.is_vectorised:
            return
        workers = timing.workers_to_give(usable_processors() // context.ranks.count_on_node)
        if workers:
            waited = f"Waited for data {timing.data_wait_share:.0%} of the time in epoch {timing.epoch}"
            context.print(f"{waited}. Workers would read it meanwhile: {self.way_to_give_workers.format(workers)}")

    @property
    def ends_before_data(self) -> bool:
        """Whether a limit ends the epoch before its data does; of a stream, whose end is unknown, whenever one does."""
        if self._updates_of_epoch is None:
            return self.context.is_at_limit
        return self.context.state.updates_in_epoch < self._updates_of_epoch

    def refuse_empty_epoch(self, loader: Any) -> None:
        """Raise an error for training data without a batch."""
        raise empty_loader_error(loader, "train on")

    def step_scheduler_after_epoch(self) -> None:
        """Step schedulers that count epochs, or watch a metric."""
        context = self.context
        if isinstance(context.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            latest = WatchedMetric(context.settings.scheduler_metric).latest(context.history, context.ranks)
            if latest is not None:
                context.scheduler.step(latest)
        elif context.settings.step_scheduler == "epoch":
            context.trainer.scheduler_step()

    # ---------------------------------------------------------------------------------------- evaluations and states

    def evaluate_as_requested(self) -> None:
        """Evaluate within a training epoch."""
        if self.context.loaders.eval is None:
            raise ConfigurationError(
                "An evaluation was requested, but there is no evaluation dataset. Pass `eval_dataset` to `train`."
            )
        self.evaluate(is_intermediate=True)

    def evaluate(self, **kwargs: Any) -> None:
        """Evaluate each set, with `kwargs` for the trainer's `_run_eval_epoch`."""
        self.context.evaluation_sets.evaluate(**kwargs)

    def write_state(self, folder: Any, extra: dict[str, Any], background: bool) -> None:
        """Write a training state that was requested."""
        self.context.states.write(folder, extra, background)

    def go_back_to(self, state: Any) -> None:
        """Return the run to where it was when `state` was written."""
        self.requests.forget()
        self.context.states.load(state)

    def describe_resumption(self) -> str:
        """Where the run goes on; that nothing is left to train, if it was resumed from its end."""
        context = self.context
        position = context.state.position
        if not (self.is_complete or context.is_at_limit):
            return f"Resuming from {context.resumed_from}: epoch {context.history.current_epoch}, {position}"
        end = f"{context.resumed_from} is the end of the run, {position}"
        return f"Nothing is left to train: {end}. Raise `{self.name_of_limit}`"

    @property
    def name_of_limit(self) -> str:
        """The argument that ends the run."""
        return self.context.settings.limit or "num_epochs"
