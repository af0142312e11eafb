"""`Run`: everything that one call of `train`, `evaluate` or `predict` needs, from its start to its end.

A run is created by `Trainer`, entered once and closed once. `trainer.py` has the order of what happens in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.callbacks.watching import WatchedMetric
from pytorch_accelerated.checkpointing.state_folder import read_state
from pytorch_accelerated.checkpointing.training_state import (
    LiveRun,
    data_of_run,
    difference_by_ranks,
    load_run,
    save_run,
    seed_of_run,
)
from pytorch_accelerated.checkpointing.verify import find_state, verify
from pytorch_accelerated.checkpointing.weights import check_model_finite
from pytorch_accelerated.data.adapting import close_loader, distribute_loader, empty_loader_error, refuse_empty
from pytorch_accelerated.data.resuming import SavedData, differing_rows, role_of_set
from pytorch_accelerated.data.slicing import DataLoaderSlice
from pytorch_accelerated.data.updates import CountItems, Loaders, Round, RunLoader, Update
from pytorch_accelerated.errors import ConfigurationError, InvalidCheckpointError, NonFiniteLossError, StopTrainingError
from pytorch_accelerated.facts.error_notes import add_place, show_note
from pytorch_accelerated.facts.run_state import RunPhase, RunState
from pytorch_accelerated.facts.settings import TrainSettings
from pytorch_accelerated.models.held import held_parts, refuse_outside, share_values, trained_outside
from pytorch_accelerated.models.preparation import PreparedModel, is_replicated
from pytorch_accelerated.models.sharding import has_shards
from pytorch_accelerated.processes.ranks import Ranks, UnevenRanks, limit_of_waiting
from pytorch_accelerated.progress.display import print_above_bars
from pytorch_accelerated.progress.notebook import NotebookPage
from pytorch_accelerated.seeding import derived_seed
from pytorch_accelerated.steps.guarded import AnomalyStep, FiniteLossTracker, GuardedStep, Rollbacks, savers_among
from pytorch_accelerated.steps.outside import OutsideStep
from pytorch_accelerated.steps.safe_points import NotedStep, SafePoint
from pytorch_accelerated.steps.splitting import SplittingStep
from pytorch_accelerated.steps.step import Step, StepParts
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.tracking.step_records import StepRecorder
from pytorch_accelerated.tracking.timing import EpochClock
from pytorch_accelerated.training.emitting import Emitter
from pytorch_accelerated.training.hooks import TrainerHooks, overrides
from pytorch_accelerated.training.passes import EvaluationSets, Passes
from pytorch_accelerated.training.reports import LossReports, ShownWarnings
from pytorch_accelerated.training.rescuing import Rescuer
from pytorch_accelerated.training.saves import Requests, Saves
from pytorch_accelerated.training.stopping import Stopping
from pytorch_accelerated.training.uneven import UnevenPasses, UnevenStep

# Losses are read this often. A number of updates, not of seconds: a resumed run must divide its sums at the same
# places.
UPDATES_BETWEEN_READINGS = 64

_HOOKS_OF_UPDATE = ("backward_step", "optimizer_step", "scheduler_step", "optimizer_zero_grad")


class Run:
    """The state of one call of the trainer.

    Args:
        hooks: the trainer.
        settings: the arguments of the call.
        evaluate: evaluates a loader as the trainer does.
        own_parts: the user's own versions of parts of an update; see `StepParts`.
        before: the trainer's last run, if there was one.

    Attributes:
        settings: the arguments of the call.
        given: the arguments of the trainer's constructor.
        ranks: the processes.
        accelerator: the accelerator of this process.
        loaders: the loaders of this run.
        emitter: calls callbacks and hooks.
        stopping: reasons to stop.
        requests: requested evaluations and saves.
        saves: the training states of this run.
        uneven: how rows count when some ranks have none; None for a single process.
        losses: the current loss tracker.
        gradient_norms: the gradient norms of the current epoch, if gradients are clipped by norm.
        epoch_clock: times the current epoch.
        reports: brings losses that have been read to the history and the callbacks.
        evaluation_sets: the evaluation sets by name.
        safe_point: the last one, if the run is saved when an error ends it.
        seed: the seed of everything random in this run.
        number: the number of the trainer's training runs so far, including this one.
        count_items: counts the items of a host batch, if the loss is not a mean over samples.
        epochs_before: epochs of the runs that this run continues, with `reset_run_history=False`.
        further_passes: training passes besides the first one of each epoch, in loops of the user's own.
        resumed_from: the training state that the run was resumed from, if any.
        page: the display of a training run in a notebook, opened by a callback; None elsewhere.
        shown_warnings: the warnings that this process has shown during the run.
    """

    #: Whether the loop makes step records of its losses.
    has_step_records = True

    def __init__(
        self,
        hooks: TrainerHooks,
        settings: TrainSettings,
        evaluate: Callable[..., None],
        own_parts: Mapping[str, Any],
        before: Run | None,
    ) -> None:
        self.settings = settings
        self.given = hooks._given_arguments
        self.ranks: Ranks = hooks._ranks
        self.accelerator = hooks._accelerator
        self.hooks = hooks
        self.loaders: Loaders = dataclasses.replace(hooks._run_loaders)  # those of the last run stay as they are
        hooks._run_loaders = self.loaders
        self.emitter = Emitter(hooks, self.ranks)
        self.saves = Saves(self.ranks)
        self.stopping = Stopping(self.ranks, self.emitter, self.saves, settings)
        self.requests = Requests(self.evaluate_as_requested, self.write_state)
        self.evaluation_sets = EvaluationSets(hooks, self.loaders)
        self.reports = LossReports(hooks, self.ranks, self.emitter, self.loaders)
        self._rescuer = Rescuer(hooks, self.ranks, self.emitter, self.saves, self.reports)
        self.uneven = UnevenRanks(self.ranks) if self.ranks.count > 1 else None
        self.losses = LossTracker()
        self.gradient_norms = LossTracker()
        self.epoch_clock = EpochClock(1)
        self.safe_point: SafePoint | None = None
        self.seed: int = 0 if before is None else before.seed
        self.number: int = 0 if before is None else before.number
        self.epochs_before: int = 0 if before is None else before.epochs_before
        self.further_passes = 0
        self.resumed_from: Path | None = None
        self.page: NotebookPage | None = None
        self.shown_warnings = ShownWarnings()
        self._step: Step | None = None
        self._updates_between_looks = UPDATES_BETWEEN_READINGS
        self._passes: Passes | None = None
        self._evaluate = evaluate
        self._own_parts = own_parts
        self.count_items: CountItems | None = hooks.count_batch_items if overrides(hooks, "count_batch_items") else None
        self._state_that_was_read: tuple[Path, dict[str, Any], dict[str, Any]] | None = None
        self._saved_data: Mapping[str, SavedData] | None = None
        self._cut: LiveRun | None = None  # the run where its epoch was cut
        self._updates_before = 0
        self._updates_of_epoch: int | None = None
        self._prepared: PreparedModel | None = None
        # On one process: whether something other than a callback, a signal or a save may ask to stop.
        self.all_agree_after_each_update = True

    # -------------------------------------------------------------------------------------------- beginning and ending

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Context for everything that the run does: tells callbacks about exceptions, and cleans up."""
        with self.shown_warnings.counted(), self.stopping.signals as signals, contextlib.ExitStack() as cleaning_up:
            # In reverse order; each is done whatever happens in those before: a second Ctrl-C, or torch's report of a
            # dead loader process, can come at any moment.
            cleaning_up.callback(lambda: close_loader(self.loaders.train))
            cleaning_up.callback(self._close_eval_loaders)
            cleaning_up.callback(self.release_model)
            cleaning_up.callback(self.saves.release_folders)
            cleaning_up.callback(self.saves.close)
            cleaning_up.callback(self._close_page)
            try:
                yield
                if signals.agreed:
                    self.ranks.wait()  # launchers end the others as soon as one exits
            except NonFiniteLossError:
                raise
            except BaseException as exception:
                if isinstance(exception, Exception):
                    epoch, state = self.hooks.run_history.current_epoch, self.hooks.run_state
                    add_place(exception, f"epoch {epoch}, after {state.updates} updates of the run")
                point, self.safe_point = self.safe_point, None
                if point is not None:
                    self._rescuer.save(point, exception)
                show_note(exception)
                error = self._rescuer.explained(exception)
                self._rescuer.tell_of(error)
                if error is exception:
                    raise
                raise error from exception
        if signals.agreed or signals.number:
            raise signals.exit(self.saves.saved_to)

    def _close_page(self) -> None:
        if self.page is not None:
            self.page.close()

    def _close_eval_loaders(self) -> None:
        with contextlib.ExitStack() as closing:
            for loader in self.loaders.all_eval:
                closing.callback(close_loader, loader)

    @contextlib.contextmanager
    def ending(self, hook: Callable[[], None], event: str) -> Iterator[None]:
        """The hook and the event that end a run, unless an exception does.

        A non-finite loss is raised after them.
        """
        stop: StopTrainingError | NonFiniteLossError | None = None
        failure: NonFiniteLossError | None = None
        requests, saves = self.requests, self.saves
        try:
            yield
        except StopTrainingError as error:
            stop = error
        except NonFiniteLossError as error:
            stop = failure = error
        if stop is not None:
            self.emitter.emit("on_stop_training_error", reason=str(stop), failure=failure)
        requests.evaluation = requests.defers_saves = False
        if self.safe_point is not None:
            self.safe_point.leave()  # what follows may load other weights
        if failure is not None:
            requests.forget()  # a model that may be broken is not saved
        states = [folder for folder, *_ in requests.states]
        try:
            requests.write_states()
        except NonFiniteLossError as error:  # the parameters are
            failure = error
        self.reports.finish_records(self.parameter_groups)
        saves.finish()
        saves.saved_to = states[-1] if states and failure is None else None
        self.release_model()
        self.emitter.defer(hook)
        self.emitter.emit(event)
        if failure is not None:
            raise failure

    # ----------------------------------------------------------------------------------------------- order and position

    def start_part(self, hook: Callable[[], None], event: str) -> None:
        """Begin the run or an epoch of it: the hook, the event, and what they request."""
        self.emitter.defer(hook)
        self.emitter.emit(event)
        state = self.hooks.run_state
        # One within an epoch is repeated after the start of the epoch, at which callbacks prepare for it.
        is_too_early = event == "on_training_run_start" and state.phase is RunPhase.TRAINING
        self.requests.act(state, repeats=not is_too_early)
        self.stop_if_asked()

    def close_part(self, phase: RunPhase) -> None:
        """Record that a part of the epoch is over, after its last callback; then serve requests and stop if asked."""
        self.hooks.run_state.phase = phase
        self.note_safe_point()
        self.requests.act(self.hooks.run_state)
        self.stop_if_asked()

    def note_safe_point(self) -> None:
        """Keep what the run is like now, if it is saved when an error ends it. For moments besides those of updates."""
        if self.safe_point is not None:
            self.reports.complete_records()
            self.safe_point.note(everything=True)

    def stop_if_asked(self) -> None:
        """Stop if any rank has a reason to. Must be called by all ranks."""
        self.stopping.stop_if_asked(self.hooks.run_state.updates)

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to train."""
        state = self.hooks.run_state
        if self.settings.max_num_train_steps is not None:
            return state.phase is RunPhase.EPOCH_CLOSED and self.updates_left == 0
        assert self.settings.num_epochs is not None
        return state.epochs >= self.settings.num_epochs

    @property
    def is_last_epoch(self) -> bool:
        """Whether the run ends, as far as is known, when the current epoch is over."""
        if self.settings.max_num_train_steps is not None:
            return self.updates_left == 0
        return self.hooks.run_state.epochs + 1 >= (self.settings.num_epochs or 1)

    @property
    def updates_left(self) -> int | None:
        """The updates until `max_num_train_steps`, if it is set; 0 if a run is resumed right after the last one."""
        limit = self.settings.max_num_train_steps
        return None if limit is None else min(max(0, limit - self.hooks.run_state.updates), sys.maxsize)

    @property
    def data_epoch(self) -> int:
        """The epoch that determines the order of the samples: epochs of this run and of those that it continues."""
        return self.epochs_before + self.hooks.run_state.epochs + self.further_passes

    def agrees_after_each_update(self) -> bool:
        """Whether a callback or a hook of the user on this rank may ask to stop within an update."""
        has_own_parts = any(part is not None for part in self._own_parts.values())
        has_own_hooks = has_own_parts or any(overrides(self.hooks, hook) for hook in _HOOKS_OF_UPDATE)
        return has_own_hooks or self.hooks.callback_handler.ranks_agree_after_each_update()

    def begin_pass(self) -> None:
        """Begin a training pass at its first sample, if the last one is over.

        The trainer's loop has done so already, and a resumed pass isn't over. A loop of the user's own only counts the
        epochs of the run history, or passes over the data twice in one of them.

        Raises:
            StopTrainingError: if the run has no update left.
        """
        state = self.hooks.run_state
        if state.phase is RunPhase.TRAINING:
            return
        if self.updates_left == 0:
            raise StopTrainingError(f"The {state.updates} updates of the run are done.")
        if state.phase is not RunPhase.EPOCH_CLOSED:
            if self.hooks.run_history.current_epoch > self.epoch_clock.epoch:
                state.finish_epoch()
            else:
                self.further_passes += 1
        state.start_epoch()

    def start_epoch(self) -> None:
        """Start the clock of a training epoch, and agree how often the ranks agree."""
        self._cut, self.hooks.run_state.is_cut = None, False
        if self.ranks.count == 1:
            self.all_agree_after_each_update = self.settings.max_seconds is not None
        else:
            self.all_agree_after_each_update = self.ranks.any(self.agrees_after_each_update())
        self.epoch_clock = EpochClock(self.hooks.run_history.current_epoch)
        recorder = self.reports.recorder
        if recorder is not None:
            state = self.hooks.run_state
            updates = state.updates - state.updates_in_epoch % UPDATES_BETWEEN_READINGS
            recorder.start_epoch(updates, state.samples_in_epoch, self.epoch_clock)
            self._updates_between_looks = math.gcd(recorder.interval, UPDATES_BETWEEN_READINGS)

    def updates(self, loader: Any) -> Iterator[Update]:
        """The remaining updates of the current epoch."""
        loader = self.adapted(loader, self.loaders.train_kwargs)  # a callback may have replaced it
        state = self.hooks.run_state
        loader.set_epoch(self.data_epoch)
        self.epoch_clock.watch(loader)
        self._updates_before, self._updates_of_epoch = state.updates, loader.num_updates
        updates = loader.updates(
            start=state.samples_in_epoch, batches_done=state.batches_in_epoch, count_items=self.count_items
        )
        updates = itertools.islice(updates, self.updates_left)
        return updates if self.safe_point is None else self._noted(updates, self.safe_point)

    def _noted(self, updates: Iterator[Update], safe_point: SafePoint) -> Iterator[Update]:
        """The updates; the moment before each is fetched is a safe point."""
        while True:
            safe_point.note(everything=False)
            update = next(updates, None)
            if update is None:
                self.note_safe_point()
                return
            yield update

    def act_at_safe_point(self) -> None:
        """Read losses, serve requests, and stop if asked: between two updates, where everything is consistent."""
        state, requests, stopping = self.hooks.run_state, self.requests, self.stopping
        if state.updates_in_epoch % self._updates_between_looks == 0:
            self.look_at_losses(state)
        if requests.evaluation or requests.states:
            self.losses.look_for_non_finite()
            self.reports.report(self.losses)
            with self.epoch_clock.paused():
                requests.act(state)
        # One process knows whether it is asked; several must agree on that, now and then.
        is_asked = self.emitter.wish is not None or stopping.signals.number or self.saves.writer.failure is not None
        is_due = is_asked if self.uneven is None else stopping.is_due(state.updates)
        if self.all_agree_after_each_update or is_due:
            stopping.stop_if_asked(state.updates)

    def look_at_losses(self, state: RunState) -> None:
        """End a step record if one is due, and read losses if that is due."""
        recorder = self.reports.recorder
        if recorder is not None and state.updates_in_epoch % recorder.interval == 0:
            recorder.mark(state.samples_in_epoch, self.parameter_groups)
        if state.updates_in_epoch % UPDATES_BETWEEN_READINGS == 0:
            self.losses.read()
            self.gradient_norms.read()
            self.reports.report(self.losses)
            if recorder is not None:
                recorder.grow(state.updates)
                self._updates_between_looks = math.gcd(recorder.interval, UPDATES_BETWEEN_READINGS)

    @property
    def parameter_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer; none if the user steps other optimizers."""
        return getattr(self.hooks.optimizer, "param_groups", [])

    def finish_epoch(self, loader: Any) -> None:
        """Read the remaining losses and the time of the epoch.

        Raises:
            DataError: if the epoch had no update.
        """
        if self.hooks.run_state.updates_in_epoch == 0:
            self.refuse_empty_epoch(loader)
        if self.ends_before_data:
            self._cut_epoch()
        trained = self.hooks.run_state.updates > self._updates_before  # else it was resumed at its end
        if trained and self._prepared is not None and (complaint := self._prepared.complaint()):
            warn_user(self.ranks, complaint)
        self.hooks.run_history.add_timing(self.epoch_clock.read())
        self.reports.mark_rest(self.parameter_groups)
        self.losses.read()
        self.gradient_norms.read()
        self.reports.report(self.losses)

    @property
    def ends_before_data(self) -> bool:
        """Whether a limit ends the epoch before its data does; of a stream, whose end is unknown, whenever one does."""
        if self._updates_of_epoch is None:
            return self.updates_left == 0
        return self.hooks.run_state.updates_in_epoch < self._updates_of_epoch

    @property
    def is_cut(self) -> bool:
        """Whether the epoch has ended before its data. The events of its end are emitted, but it stays open."""
        return self._cut is not None

    def _cut_epoch(self) -> None:
        """Keep what the run is like before the end of its epoch, so that states resume there, as if nothing were over.

        Otherwise the losses and metrics of the epoch would begin anew within it, and be recorded twice.
        """
        self.reports.complete_records()
        self._cut = self.contents().frozen(self.hooks.callback_handler)
        self._cut.run_state.is_cut = True

    def refuse_empty_epoch(self, loader: Any) -> None:
        """Raise an error for training data without a batch."""
        raise empty_loader_error(loader, "train on")

    # ------------------------------------------------------------------------------------------------------- evaluation

    @contextlib.contextmanager
    def evaluating(self, *, restore_modes: bool) -> Iterator[Passes]:
        """Context for an evaluation or prediction: the bare model in evaluation mode, and a separate loss tracker."""
        losses = self.losses
        self.losses = LossTracker()
        try:
            with self.passes.on_bare_model(restore_modes=restore_modes):
                self.hooks.model.eval()
                yield self.passes
        finally:
            self.losses = losses

    def evaluate_rounds(self, loader: Any, passes: Passes, record: Callable[[Any, Any], None]) -> None:
        """Compute the losses of all rounds.

        Raises:
            DataError: if there is none.
        """
        rounds = 0
        with passes.without_gradients():
            every_round = self.rounds(loader, count_items=self.count_items)
            for rounds, round_ in enumerate(self.stopping.until_signal(every_round, StopTrainingError), start=1):
                passes.start = round_.start
                passes.evaluate(round_, record)
                if rounds % UPDATES_BETWEEN_READINGS == 0:
                    self.losses.read()
        if rounds == 0:
            raise empty_loader_error(loader, "evaluate")
        passes.start = None
        self.losses.read()

    def rounds(self, loader: Any, count_items: CountItems | None = None) -> Iterator[Round]:
        """The rounds of an evaluation or prediction pass."""
        adapted = self.adapted(loader, self.loaders.eval_kwargs)
        return adapted.rounds(borrows=self.is_sharded, count_items=count_items)

    def evaluate_as_requested(self) -> None:
        """Evaluate within a training epoch."""
        if self.loaders.eval is None:
            raise ConfigurationError(
                "An evaluation was requested during training, but there is no evaluation dataset. Pass `eval_dataset` "
                "to `train`."
            )
        self.note_safe_point()
        self.evaluate_sets(self._evaluate, is_intermediate=True)

    def evaluate_sets(self, evaluate: Callable[..., None], **kwargs: Any) -> None:
        """Call `evaluate`, the trainer's `_run_eval_epoch`, with the loader of each evaluation set, and `kwargs`."""
        self.evaluation_sets.evaluate_each(evaluate, **kwargs)
        if self.safe_point is not None:
            self.safe_point.leave()  # what comes of the evaluation, such as a step of the scheduler, belongs to it

    def evaluate_other_model(self, model: nn.Module, *, metric_name_prefix: str, callbacks: Iterable[Any] = ()) -> None:
        """Evaluate `model` instead of the trainer's, for callbacks in `on_eval_epoch_end`. All ranks must call it.

        Args:
            model: the model, on the trainer's device.
            metric_name_prefix: the prefix of every metric that is recorded meanwhile.
            callbacks: the callbacks whose events are emitted meanwhile.
        """
        other = self.passes.on_other_model(model, metric_name_prefix=metric_name_prefix, callbacks=callbacks)
        with other, self.stopping.finishing_passes():
            self._evaluate(self.loaders.eval)

    def predict(self, loader: RunLoader, collector: Any) -> Any:
        """The result of `collector`, from the predictions for every batch of `loader`. Must be called by all ranks."""
        try:
            with self.evaluating(restore_modes=True) as passes:
                passes.emit("on_prediction_run_start", num_batches=loader.num_batches)
                with passes.without_gradients():
                    for round_ in self.stopping.until_signal(self.rounds(loader), self.give_up_prediction):
                        passes.predict(round_, collector)
                passes.emit("on_prediction_run_end")
        except BaseException:
            collector.abort()
            raise
        return collector.finish()

    def give_up_prediction(self, reason: str) -> BaseException:
        """The error that ends a prediction because of a signal."""
        return self.stopping.signals.exit()

    # ------------------------------------------------------------------------------------------------- making the run

    def choose_seed(self, state: Path | None = None) -> None:
        """Fix the seed of the run; a resumed run keeps that of its training state."""
        given = self.given.seed
        seed = int(given) if given is not None else derived_seed(self.number)
        if state is not None:
            seed = seed_of_run(state)
        self.seed = self.ranks.from_first(seed)

    def resume_from(self, state: Path | None) -> None:
        """Set the training state that the run will be resumed from."""
        self.resumed_from = state
        self._saved_data = None if state is None else data_of_run(state)
        self.losses = LossTracker() if self.settings.nonfinite_policy is None else FiniteLossTracker()

    def find_state(self, source: str | Path) -> Path | None:
        """The training state that `source` is or holds, the same for all ranks. The first one has read it, if whole."""
        is_whole = is_replicated(self.accelerator) and not has_shards(self.hooks.model)
        return self.ranks.do_on_first(lambda: find_state(source, self._read if is_whole else verify))

    def _read(self, folder: Path) -> None:
        try:
            self._state_that_was_read = folder, *read_state(folder)
        except InvalidCheckpointError:
            verify(folder)  # names all damaged files
            raise

    def take_read(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The contents of a training state, if `find_state` has read it: checking it is reading it."""
        known, self._state_that_was_read = self._state_that_was_read, None
        return None if known is None or known[0] != folder else known[1:]

    @property
    def is_prepared(self) -> bool:
        """Whether the model is on its device, in its wrappers."""
        return self._prepared is not None

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has only a shard of the model."""
        return self._prepared is not None and has_shards(self._prepared.model)

    @property
    def holder(self) -> Any:
        """The trainer that users see, whose attributes may belong to the run, too."""
        return self.hooks

    def prepare_model(self, *, for_training: bool) -> None:
        """Move the model to its device, and wrap what must be wrapped."""
        hooks = self.hooks
        held = held_parts(self.holder)
        if for_training:
            refuse_outside(trained_outside(self.holder, held), self.accelerator, hooks.model, self.ranks)
            share_values(held, self.ranks)
        self._prepared = PreparedModel(
            self.accelerator,
            hooks.model,
            hooks.optimizer,
            for_training=for_training,
            compile_arguments=self.given.compile_model,
        )
        if self.ranks.count > 1 and not for_training and not self.is_sharded:
            # Nothing else ensures that all ranks evaluate the same model.
            self.ranks.copy_from_first([parameter.data for parameter in hooks.model.parameters()])
        hooks.model, hooks.optimizer = self._prepared.model, self._prepared.optimizer
        parts = hooks, self.emitter, self.ranks, torch.inference_mode if self.given.inference_mode else torch.no_grad
        if self.uneven is None:
            self._passes = Passes(*parts)
        else:
            self._passes = UnevenPasses(*parts, uneven=self.uneven, is_sharded=self.is_sharded)

    def release_model(self) -> None:
        """Remove the wrappers that training needed from the model and the optimizer."""
        if self._prepared is not None:
            self.hooks.model, self.hooks.optimizer = self._prepared.release(self.hooks.model)
            self._prepared = None
        if self._step is not None:
            self._step.release()

    def prepare_loaders(self) -> None:
        """Distribute the loaders over the ranks.

        Raises:
            DataError: if one of them has no batch.
        """
        hooks = self.hooks
        loaders = self.loaders
        if loaders.train is not None:
            loaders.train = self.adapted(loaders.train, loaders.train_kwargs, role="train")
            refuse_empty(loaders.train, "train on")
            num_passes = self.settings.passes_over(loaders.train.num_updates)
            loaders.train.expect_passes(num_passes, self.print)
        for name in self.evaluation_sets.names if loaders.eval is not None else ():
            with self.evaluation_sets.current(name):
                role = role_of_set(name) if name in loaders.further_eval else "eval"
                loaders.eval = self.adapted(loaders.eval, loaders.eval_kwargs, role=role)
                hooks._check_eval_batch_size()
                if loaders.train is not None:
                    loaders.eval.expect_passes(num_passes, self.print)

    def adapted(self, loader: Any, dl_kwargs: Mapping[str, Any] | None, role: str | None = None) -> RunLoader:
        """This rank's part of the user's `loader`."""
        if isinstance(loader, DataLoaderSlice):
            return self.adapted(loader.dl, dl_kwargs, role).limited(loader.slice_size)
        saved_seed = None
        if self._saved_data is not None:
            saved = self._saved_data.get(role or "")
            saved_seed = self.seed if saved is None else saved.seed
        return distribute_loader(
            loader,
            self.ranks,
            seed=self.seed,
            saved_seed=saved_seed,
            accumulation_steps=self.settings.gradient_accumulation_steps,
            is_sharded=bool((dl_kwargs or {}).get("is_sharded", False)),
            tell=self.print,
        )

    @contextlib.contextmanager
    def loader_of_pass(self, loader: Any, dl_kwargs: Mapping[str, Any] | None) -> Iterator[RunLoader]:
        """This rank's part of `loader`, for the model in its current form, within a run or outside of one."""
        if self._prepared is None:
            self.choose_seed()
            self.prepare_model(for_training=False)
        adapted = self.adapted(loader, dl_kwargs)
        try:
            yield adapted
        finally:
            close_loader(adapted)

    @property
    def has_step(self) -> bool:
        """Whether the run trains and has a step."""
        return self._step is not None

    @property
    def step(self) -> Step:
        """The step. It exists as soon as the run is prepared for training."""
        assert self._step is not None
        return self._step

    @property
    def passes(self) -> Passes:
        """Computes evaluations and predictions. It exists as soon as the model is prepared."""
        assert self._passes is not None
        return self._passes

    def start_steps(self, *, steps_scheduler: bool) -> None:
        """Create the step, now that all of its parts exist.

        Args:
            steps_scheduler: whether the scheduler steps after each update.
        """
        assert self._prepared is not None
        hooks = self.hooks
        outside = trained_outside(self.holder, held_parts(self.holder))
        rollbacks = None
        if self.settings.nonfinite_policy == "rollback":
            callbacks = hooks.callback_handler
            rollbacks = Rollbacks(callbacks, self.saves, self.resumed_from, is_first=self.ranks.is_first)
        if any(saver.save_on_exception for saver in savers_among(hooks.callback_handler)):
            self.safe_point = self._make_safe_point()
        parts = StepParts(
            hooks,
            self.emitter,
            self.ranks,
            self.accelerator,
            self.settings,
            self.holder,
            outside,
            self._prepared.accumulating,
            self.losses,
            self.gradient_norms,
            steps_scheduler=steps_scheduler,
            uneven=self.uneven,
            count_items=self.count_items,
            rollbacks=rollbacks,
            before_applying=None if self.safe_point is None else self.safe_point.leave,
            **self._own_parts,
        )
        self._step = self.make_step(parts)
        if self.has_step_records:
            updates = None if hooks.run_config is None else hooks.run_config.max_num_train_steps
            every = self.settings.record_every_n_steps
            self.reports.recorder = StepRecorder(
                hooks.run_history, self.losses, self.gradient_norms, self.ranks.device, every, updates
            )

    def _make_safe_point(self) -> SafePoint | None:
        """What keeps the last safe point of the run; None, with a warning, if it cannot be saved after an error."""
        if self.ranks.count == 1 and is_replicated(self.accelerator):
            return SafePoint(self.hooks, self.holder, self.contents)
        several = "the other ranks would wait for the one that failed"
        reason = several if self.ranks.count > 1 else "the model is sharded"
        warn_user(
            self.ranks,
            f"`save_on_exception` has no effect in this run: {reason}. Save often enough with `save_every_n_steps` or "
            "`save_every_n_minutes`.",
        )
        return None

    def make_step(self, parts: StepParts, kind: type[Step] = Step) -> Step:
        """`kind` with the variants that the settings and the ranks require.

        Args:
            parts: the parts of the step.
            kind: the step without variants.
        """
        variants: list[type[Step]] = [] if parts.before_applying is None else [NotedStep]
        if parts.settings.detect_anomaly:
            variants.append(AnomalyStep)
        if parts.settings.nonfinite_policy is not None:
            variants.append(GuardedStep)
        if parts.settings.split_on_oom:
            variants.append(SplittingStep)
        if parts.uneven is not None:
            variants.append(UnevenStep)
            if parts.outside:
                variants.append(OutsideStep)
        bases = [*([kind] if kind is not Step or not variants else []), *variants]
        made: type[Step] = bases[0] if len(bases) == 1 else type(kind.__name__, tuple(bases), {})
        return made(parts)

    # ------------------------------------------------------------------------------------------------- training states

    def contents(self) -> LiveRun:
        """Everything that belongs to a training state."""
        hooks = self.hooks
        run = LiveRun(
            ranks=self.ranks,
            model=hooks.model,
            holder=self.holder,
            optimizer=hooks.optimizer,
            scheduler=hooks.scheduler,
            scaler=self.accelerator.scaler,
            callbacks=list(hooks.callback_handler),
            history=hooks.run_history,
            config=hooks.run_config,
            run_state=hooks.run_state,
            losses=self.losses,
            gradient_norms=self.gradient_norms,
            train_loader=self.loaders.train,
            eval_loader=self.loaders.eval,
            evaluation_sets=self.loaders.eval_by_name,
            seed=self.seed,
            epochs_before=self.epochs_before,
            recorder=self.reports.recorder,
        )
        if self._cut is None:
            return run
        earlier = {name: getattr(self._cut, name) for name in ("run_state", "losses", "gradient_norms", "kept")}
        return dataclasses.replace(run, **earlier)

    def write_state(self, folder: Path, extra: dict[str, Any], background: bool) -> None:
        """Write a training state. Must be called by all ranks."""
        self.check_finite()
        self.reports.complete_records()  # a state has no place for those that have ended, but have not been read
        saves = self.saves
        saves.uses_background |= background
        writer = saves.writer if background else None
        save_run(self.contents(), folder, extra, writer, ranks_of_writer=self.ranks_of_writer)
        saves.add(folder, self.hooks.run_history, self.hooks.run_state, writer)

    def load_state(self, folder: Path, *, is_at_work: bool = True, skipped_weights: Collection[str] = ()) -> Any:
        """Load a training state. Must be called by all ranks.

        Args:
            folder: the folder of the state.
            is_at_work: whether the loaders exist and move to the position of the state.
            skipped_weights: names in the model's state that the folder may lack; the live values stay.

        Returns:
            The `extra` entries of the save, and `current_epoch`.
        """
        read = self.take_read(folder)
        loaded = load_run(
            self.contents(), folder, restores_position=is_at_work, skipped_weights=skipped_weights, read=read
        )
        self.hooks.run_state, self.epochs_before = loaded.run_state, loaded.epochs_before
        return {"current_epoch": self.hooks.run_history.current_epoch, **loaded.extra}

    def resume(self, state: Path, skipped_weights: Collection[str] = ()) -> None:
        """Load the training state that the run is resumed from, now that everything it belongs to exists."""
        self.load_state(state, skipped_weights=skipped_weights)
        difference = difference_by_ranks(self.contents(), state)
        if difference is not None:
            warn_user(self.ranks, difference)
        for message in differing_rows(self._saved_data or {}, self.loaders, state):
            warn_user(self.ranks, message)

    def describe_resumption(self) -> str:
        """Where the run goes on; that nothing is left to train, if it was resumed from its end."""
        position = self.hooks.run_state.position
        if not (self.is_complete or self.updates_left == 0):
            return f"Resuming from {self.resumed_from}: epoch {self.hooks.run_history.current_epoch}, {position}"
        limit = "num_epochs" if self.settings.max_num_train_steps is None else "max_num_train_steps"
        return (
            f"Nothing is left to train: {self.resumed_from} is the end of the run, {position}. Raise `{limit}` to go on"
        )

    def go_back_to(self, state: Path) -> None:
        """Return the run to where it was when `state` was written. Must be called by all ranks."""
        self.requests.forget()
        self.load_state(state)

    def check_finite(self) -> None:
        """Reject a save of a model with non-finite weights. Each rank sees only its shard of a sharded one: all must
        call it.
        """
        check_model_finite(self.hooks.model, self.ranks)

    def ranks_of_writer(self) -> Ranks:
        """The ranks on a channel for threads that write. Must be called by all ranks."""
        return Ranks(self.accelerator, channel="writer", timeout=limit_of_waiting(self.given.timeout))

    def step_scheduler_after_epoch(self) -> None:
        """Step schedulers that count epochs, or watch a metric."""
        hooks = self.hooks
        if isinstance(hooks.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            latest = WatchedMetric(self.settings.scheduler_metric).latest(hooks.run_history, self.ranks)
            if latest is not None:
                hooks.scheduler.step(latest)
        elif self.settings.step_scheduler == "epoch":
            hooks.scheduler_step()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on the first process of each node."""
        print_above_bars(self.ranks, *args, **kwargs)
