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
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.run_state import RunPhase
from pytorch_accelerated.loop.context import Context
from pytorch_accelerated.loop.guarded import FiniteLossTracker, GuardedStep
from pytorch_accelerated.loop.hooks import counter_for, own_hooks
from pytorch_accelerated.loop.preparing import distributed
from pytorch_accelerated.loop.states import Requests
from pytorch_accelerated.loop.step import Step
from pytorch_accelerated.loop.variants import GuardedRankedStep, RankedStep
from pytorch_accelerated.ranks.preparation import PreparedModel
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
        further_passes: training passes after the first one of each epoch, in loops of the user's own.
        all_agree_after_each_update: whether there are multiple ranks, any of which may ask to stop within each update.
    """

    #: Whether the loop makes step records of its losses.
    has_step_records = True
    #: Whether the loop switches a model back to training mode if a callback left it in evaluation mode.
    keeps_modes = True
    #: The argument of `train` that names a state.
    name_of_resume = "resume_from"
    #: How users set the number of workers.
    way_to_give_workers = 'train_dataloader_kwargs={{"num_workers": {0}}}, or DataLoader(..., num_workers={0})'

    def __init__(self, context: Context) -> None:
        self.context, self.asked, self.parts, self.control = context, context.asked, context.parts, context.control
        self.reports = context.parts.reports
        self.requests = Requests(self.control, self.evaluate_as_requested)
        self.step: Step = None  # type: ignore[assignment]  # until the run is prepared
        self.further_passes = 0
        self.all_agree_after_each_update = False
        self._updates_between_checks = UPDATES_BETWEEN_READINGS
        self._updates_before = 0
        self._trained: nn.Module | None = None
        self._updates_of_epoch: int | None = None
        guards = self.asked.settings.nonfinite_policy is not None
        self.reports.losses = FiniteLossTracker() if guards else LossTracker()

    def make_step(self, prepared: PreparedModel, *, steps_scheduler: bool) -> None:
        """Create the step, now that all of its parts exist.

        Args:
            prepared: the model and the optimizer of the run.
            steps_scheduler: whether the scheduler steps after each update.
        """
        context = self.context
        own = own_hooks(context.trainer, _OWN_PARTS)
        self.step = self.kind_of_step()(context, own, steps_scheduler=steps_scheduler)
        prepared.take_over(self.step)
        if self.has_step_records:
            updates = None if self.parts.config is None else self.parts.config.max_num_train_steps
            every = self.asked.settings.record_every_n_steps
            reports, device = self.reports, self.parts.ranks.device
            reports.recorder = StepRecorder(
                self.parts.history, reports.losses, reports.gradient_norms, device, every, updates
            )

    def kind_of_step(self) -> type[Step]:
        """The kind of step that the run needs."""
        is_guarded = self.asked.settings.nonfinite_policy is not None
        if self.asked.given.lanes is not None:
            module = require("pytorch_accelerated.loop.lanes", needed_by="`lanes`")
            return module.kind_of_step(is_guarded=is_guarded)  # type: ignore[no-any-return]
        if is_guarded:
            return GuardedStep if self.parts.ranks.count == 1 else GuardedRankedStep
        return Step if self.parts.ranks.count == 1 else RankedStep

    def release(self) -> None:
        """Remove what training wrapped around the model, and drop the references to the last batch."""
        self.parts.end_schedule()
        self.parts.release_model()
        if self.step is not None:
            self.step.release()

    # ------------------------------------------------------------------------------------------- parts of the run

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to train."""
        state, settings = self.parts.state, self.asked.settings
        if settings.limit is not None:
            return state.phase is RunPhase.EPOCH_CLOSED and self.context.is_at_limit
        assert settings.num_epochs is not None
        return state.epochs >= settings.num_epochs

    @property
    def data_epoch(self) -> int:
        """The epoch that determines the order of the samples: epochs of this run and of those that it continues."""
        return self.asked.epochs_before + self.parts.state.epochs + self.further_passes

    def close(self, failure: NonFiniteLossError | None) -> NonFiniteLossError | None:
        """Write the requested states, complete the records, and wait for saves: no update follows.

        Args:
            failure: a non-finite loss that ended the run. A model that may be broken is not saved.

        Returns:
            That failure, or the one that a save has found.
        """
        requests = self.requests
        requests.evaluation = requests.defers_saves = False
        if failure is not None:
            requests.forget()  # a broken model must not replace a good state
        states = [folder for folder, *_ in requests.states]
        try:
            requests.write_states()
        except NonFiniteLossError as error:  # a parameter is NaN or infinite, so no state was written
            failure = error
        self.reports.finish_records()
        self.control.saves.finish()
        has_saved = states and failure is None and not self.control.saves.failures
        self.control.saves.saved_to = states[-1] if has_saved else None
        return failure

    def start_part(self, hook: Callable[[], None], event: str) -> None:
        """Begin the run or an epoch of it: the hook, the event, and what they request."""
        state = self.parts.state
        self.control.emitter.announce(hook, event)
        # An evaluation that a stop interrupted within an epoch waits for `on_train_epoch_start`: callbacks prepare
        # there for what they do in the epoch.
        is_too_early = event == "on_training_run_start" and state.phase is RunPhase.TRAINING
        self.requests.serve(state, repeats=not is_too_early)
        self.control.stopping.stop_if_asked()

    def close_part(self, phase: RunPhase) -> None:
        """Record that a part of the epoch is over, after its last callback; then serve requests and stop if asked."""
        self.parts.state.phase = phase
        self.control.stopping.end_startup()  # here, too, for loops of the user's own
        self.requests.serve(self.parts.state)
        self.control.stopping.stop_if_asked()

    # ------------------------------------------------------------------------------------------------ parts of an epoch

    def begin_pass(self) -> None:
        """Begin a training pass at its first sample, if the last one is over.

        The trainer's loop has done so already, and a resumed pass isn't over. A loop of the user's own only counts the
        epochs of the run history, or passes over the data twice in one of them.

        Raises:
            StopTrainingError: if the run has no update left.
        """
        state = self.parts.state
        if state.phase is RunPhase.TRAINING:
            return
        if self.context.is_at_limit:
            raise StopTrainingError(f"The {state.updates} updates of the run are done.")
        if state.phase is not RunPhase.EPOCH_CLOSED:
            if self.parts.history.current_epoch > self.reports.epoch_clock.epoch:
                state.finish_epoch()
            else:
                self.further_passes += 1
        state.start_epoch()

    def watching_for_anomalies(self) -> contextlib.AbstractContextManager[Any]:
        """In the block, the first NaN in a backward pass is an error, if the run asks for that."""
        is_asked = self.asked.settings.detect_anomaly
        return torch.autograd.set_detect_anomaly(True) if is_asked else contextlib.nullcontext()

    def set_epoch(self) -> None:
        """Tell the loader the epoch. In a loop of the user's own, a subclass may iterate over it itself."""
        loader = self.parts.loaders.train
        if isinstance(loader, RunLoader):
            loader.set_epoch(self.data_epoch)

    def start_epoch(self) -> None:
        """Start the clock of a training epoch, and find out whether ranks must agree to stop after each update."""
        state, ranks = self.parts.state, self.parts.ranks
        self.control.states.early_end, state.is_cut = None, False  # an epoch that ended early continues
        self.all_agree_after_each_update = ranks.count > 1 and ranks.any(self.may_stop_in_update())
        self.reports.epoch_clock = EpochClock(self.parts.history.current_epoch)
        if self.reports.recorder is not None:
            # A resumed run must choose the interval that the saved one chose at its last reading of losses.
            updates = state.updates - state.updates_in_epoch % UPDATES_BETWEEN_READINGS
            self.reports.recorder.start_epoch(updates, state.samples_in_epoch, self.reports.epoch_clock)
            self._updates_between_checks = math.gcd(self.reports.recorder.interval, UPDATES_BETWEEN_READINGS)

    def may_stop_in_update(self) -> bool:
        """Whether a callback or a hook of the user on this rank may ask to stop within an update."""
        has_own = bool(own_hooks(self.context.trainer, _HOOKS_OF_UPDATE))
        return has_own or self.parts.callbacks.ranks_agree_after_each_update()

    def batches(self, loader: Any) -> Iterator[MicroBatch]:
        """The batches of the current epoch that are left, update by update."""
        context, state = self.context, self.parts.state
        # A callback may have replaced the loader, or limited it, at the start of the epoch.
        loader = distributed(context, loader, self.parts.loaders.train_kwargs)
        loader.set_epoch(self.data_epoch)
        if self.asked.left_out:
            loader.leave_out(self.asked.left_out)
        if self.asked.plan is not None:
            self.asked.plan = dataclasses.replace(self.asked.plan, loader=loader)
        self.reports.epoch_clock.watch(loader)
        self._updates_before, self._updates_of_epoch = state.updates, loader.count_updates()
        counter = counter_for(context.trainer, self.asked, loader, "calculate_train_batch_loss")
        # A resumed pass starts at the sample after the last finished update; the order of the epoch is computed again.
        batches = loader.batches(start=state.samples_in_epoch, batches_done=state.batches_in_epoch, count_items=counter)
        self._note_modes()
        return batches if self.asked.settings.limit is None else self._up_to_limit(batches)

    def _note_modes(self) -> None:
        """Note which modules are in evaluation mode while the pass begins: the user keeps them there."""
        module = bare_model(self.parts.model)
        is_trained = self.keeps_modes and isinstance(module, nn.Module) and module.training
        self._trained = module if is_trained else None
        self._in_evaluation = [part for part in module.modules() if not part.training] if is_trained else []

    def _train_again(self) -> None:
        """Restore the modes that the model had when the pass began: a callback has forgotten to."""
        self.parts.model.train()
        for part in self._in_evaluation:
            part.training = False
        warn_user(
            self.parts.ranks,
            "A callback or hook has left the model in evaluation mode within an epoch of training: its modules have "
            "the modes again that they had when the epoch began. Call `model.train()` after an evaluation of your own, "
            "or let the trainer evaluate: `trainer.request_evaluation()`.",
        )

    def _up_to_limit(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The batches of the updates until the run is at its limit. No further one is asked for."""
        is_in_update = False
        while (is_in_update or not self.context.is_at_limit) and (batch := next(batches, None)) is not None:
            if batch.update.items is None and self.asked.settings.max_tokens is not None:
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
        requests = self.requests
        state, stopping = self.parts.state, self.control.stopping
        if stopping.startup_seconds is None:
            stopping.end_startup()
        if state.updates_in_epoch % self._updates_between_checks == 0:
            self._mark_and_read_if_due()
        if requests.evaluation or requests.states:
            # A state must not be saved behind a loss that nobody has looked at.
            self.reports.losses.look_for_non_finite()
            self.reports.report(self.reports.losses)
            with self.reports.epoch_clock.paused():
                requests.serve(state)
        # A single process knows whether it is asked to stop. Multiple ones must exchange a message, which costs as much
        # as a small update: after each one only if a callback may stop the run there, else about once a second.
        if self.parts.ranks.count == 1 or self.all_agree_after_each_update or stopping.is_due(state.updates):
            stopping.stop_if_asked()

    def _mark_and_read_if_due(self) -> None:
        """End a step record if one is due, and read losses if that is due."""
        state, recorder = self.parts.state, self.reports.recorder
        if recorder is not None and state.updates_in_epoch % recorder.interval == 0:
            recorder.mark(state.samples_in_epoch, self.parts.parameter_groups)
        if state.updates_in_epoch % UPDATES_BETWEEN_READINGS == 0:
            self._read_losses()
            if recorder is not None:
                recorder.grow(state.updates)
                self._updates_between_checks = math.gcd(recorder.interval, UPDATES_BETWEEN_READINGS)

    def _read_losses(self) -> None:
        self.reports.losses.read()
        self.reports.gradient_norms.read()
        self.reports.report(self.reports.losses)

    def finish_epoch(self, loader: Any) -> None:
        """Read the remaining losses and the time of the epoch.

        Raises:
            DataError: if the epoch had no update.
        """
        if self.parts.state.updates_in_epoch == 0:
            self.refuse_empty_epoch(loader)
        if self.ends_before_data:
            # The epoch may be resumed. Means of losses and metrics must continue then, so they are kept before this end
            # of the pass records and resets them.
            self.reports.complete_records()
            self.control.states.early_end = moment_of(self.parts, ended_early=True)
        else:
            # Schedule-free optimizers evaluate with other weights. A state of an epoch that ended early needs the
            # weights to train.
            self.parts.mode.eval()
        has_trained = self.parts.state.updates > self._updates_before  # else the run was resumed at the epoch's end
        if has_trained and self.parts.prepared is not None and (complaint := self.parts.prepared.complaint()):
            warn_user(self.parts.ranks, complaint)
        self.parts.history.add_timing(self.reports.epoch_clock.read())
        self._advise_on_workers()
        self.reports.mark_rest()
        self._read_losses()

    def _advise_on_workers(self) -> None:
        """Say after the first epoch how many workers to give, if the run waited for data that workers could read."""
        context = self.context
        (timing, *later), loader = self.parts.history.timings, self.parts.loaders.train
        # In memory there is nothing to wait for, and a stream may be read once by each of its workers.
        if later or not isinstance(loader, PlannedLoader) or loader.is_vectorised:
            return
        workers = timing.workers_to_give(usable_processors() // self.parts.ranks.count_on_node)
        if workers:
            waited = f"Waited for data {timing.data_wait_share:.0%} of the time in epoch {timing.epoch}"
            context.print(f"{waited}. Workers would read it meanwhile: {self.way_to_give_workers.format(workers)}")

    @property
    def ends_before_data(self) -> bool:
        """Whether a limit ends the epoch before its data does; of a stream, whose end is unknown, whenever one does."""
        if self._updates_of_epoch is None:
            return self.context.is_at_limit
        return self.parts.state.updates_in_epoch < self._updates_of_epoch

    def refuse_empty_epoch(self, loader: Any) -> None:
        """Raise an error for training data without a batch."""
        raise empty_loader_error(loader, "train on")

    def step_scheduler_after_epoch(self) -> None:
        """Step schedulers that count epochs, or watch a metric."""
        context = self.context
        if isinstance(self.parts.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            latest = WatchedMetric(self.asked.settings.scheduler_metric).latest(self.parts.history, self.parts.ranks)
            if latest is not None:
                self.parts.scheduler.step(latest)
        elif self.asked.settings.step_scheduler == "epoch":
            context.trainer.scheduler_step()

    # ---------------------------------------------------------------------------------------- evaluations and states

    def evaluate_as_requested(self) -> None:
        """Evaluate within a training epoch."""
        if self.parts.loaders.eval is None:
            raise ConfigurationError(
                "An evaluation was requested, but there is no evaluation dataset. Pass `eval_dataset` to `train`."
            )
        self.evaluate(is_intermediate=True)

    def evaluate(self, **kwargs: Any) -> None:
        """Evaluate each set, with `kwargs` for the trainer's `_run_eval_epoch`."""
        self.control.evaluation_sets.evaluate(**kwargs)

    def go_back_to(self, state: Any) -> None:
        """Return the run to where it was when `state` was written."""
        self.requests.forget()
        self.control.states.load(state)

    def describe_resumption(self) -> str:
        """Where the run continues; that nothing is left to train, if it was resumed from its end."""
        context = self.context
        position = self.parts.state.position
        if not (self.is_complete or context.is_at_limit):
            return f"Resuming from {self.asked.resumed_from}: epoch {self.parts.history.current_epoch}, {position}"
        end = f"{self.asked.resumed_from} is the end of the run, {position}"
        return f"Nothing is left to train: {end}. Raise `{self.name_of_limit}`"

    @property
    def name_of_limit(self) -> str:
        """The argument that ends the run."""
        return self.asked.settings.limit or "num_epochs"
