"""What has to be there before the loop can run: accelerator, seed, model, loaders, scheduler, run config."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.callbacks.handler import CallbackHandler
from pytorch_accelerated.callbacks.saving import SaveTrainingStateCallback
from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.callbacks.watching import WatchedMetric
from pytorch_accelerated.checkpointing.training_state import data_of_run, difference_by_ranks, load_run, seed_of_run
from pytorch_accelerated.data.adapting import adapt_loader, close_loader
from pytorch_accelerated.data.checking import refuse_empty, refuse_other_rows
from pytorch_accelerated.data.ordering import drawn_seed
from pytorch_accelerated.data.prefetch import device_feed
from pytorch_accelerated.data.resuming import SavedData, data_facts, differing_rows
from pytorch_accelerated.data.slicing import DataLoaderSlice
from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.errors import CheckpointError, ConfigurationError, NonFiniteLossError
from pytorch_accelerated.models.preparation import PreparedModel
from pytorch_accelerated.models.sharding import has_shards
from pytorch_accelerated.processes.accelerators import create_accelerator, given_accelerator, send_to_device
from pytorch_accelerated.processes.peers import is_lost_contact, limit_of_waiting, lost_peer_error
from pytorch_accelerated.processes.plugins import refuse_static_graph
from pytorch_accelerated.run_config import TrainerRunConfig, describe_run
from pytorch_accelerated.seeding import derived_seed, mixed_seed, set_seed
from pytorch_accelerated.steps.capturing import CapturedStep, CapturedStepReport
from pytorch_accelerated.steps.cuda_graphs import Capturer, CudaGraphCapturer
from pytorch_accelerated.steps.guarded import UpdateGuard
from pytorch_accelerated.steps.splitting import BatchSplitter
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.training.error_notes import show_note
from pytorch_accelerated.training.hooks import TrainerHooks
from pytorch_accelerated.training.loop import TrainingLoop
from pytorch_accelerated.training.placeholders import settle_epoch_counts
from pytorch_accelerated.training.run_state import RunState
from pytorch_accelerated.training.settings import check_optimizer, check_parts, check_reduction, check_scheduler

if TYPE_CHECKING:
    from accelerate import Accelerator


class TrainingRun(TrainingLoop):
    """Puts everything in place for a run, and back when it is over."""

    seed: int | None
    mixed_precision: str | None
    timeout: float | None
    compile_model: bool | Mapping[str, Any]
    compile_step: str | None
    captured_step_report: CapturedStepReport | None
    train_dataset: Any
    eval_dataset: Any
    _callbacks: Iterable[Any]
    _given_accelerator: Accelerator | Callable[[], Accelerator] | None
    _precision: str
    _is_running: bool
    _prepared: PreparedModel | None
    _run_seed: int
    _training_runs: int
    _resumed_data: Mapping[str, SavedData] | None

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """A run, or something within one: tells callbacks about exceptions and leaves the trainer as it was."""
        if self._is_running:
            with self._finishing_passes():
                yield
            return
        self._renew_accelerator()
        self._reset_control()
        self._count_items = self.count_batch_items if self._overrides("count_batch_items") else None
        self._is_running = True
        with self._signals as signals, contextlib.ExitStack() as cleaning_up:
            # The last one first; each is done whatever happens in those before: a second Ctrl-C, or torch's word of a
            # dead loader process, which comes in the middle of anything.
            cleaning_up.callback(lambda: close_loader(self._train_dataloader))
            cleaning_up.callback(lambda: close_loader(self._eval_dataloader))
            cleaning_up.callback(self._release_model)
            cleaning_up.callback(self._release_folders)
            cleaning_up.callback(self._close_writer)
            try:
                yield
                if signals.agreed:
                    self._ranks.wait()  # launchers end the others as soon as one leaves
            except NonFiniteLossError:
                raise
            except BaseException as exception:
                show_note(exception)
                error = self._explained(exception)
                self._tell_of(error)
                if error is exception:
                    raise
                raise error from exception
            finally:
                self._is_running = False
        if signals.agreed or signals.number:
            raise signals.exit(self._saved_to)

    def _explained(self, exception: BaseException) -> BaseException:
        """What to raise for `exception`: something better where torch tells only that a connection broke."""
        if self._ranks.count == 1 or not is_lost_contact(exception):
            return exception
        return lost_peer_error(
            exception,
            rank=self._ranks.index,
            size=self._ranks.count,
            updates=self.run_state.updates,
            newest=self._state_folders.newest(set(self._locks)),
        )

    def _tell_of(self, exception: BaseException) -> None:
        """Fire `on_exception`. What goes wrong in it must not hide what went wrong before."""
        try:
            self._fire("on_exception", exception=exception)
        except Exception as error:
            warnings.warn(
                f"A callback failed in `on_exception` with {type(error).__name__}: {error}. What ended the run is "
                f"another exception, a {type(exception).__name__}; callbacks after that one have not been told of it.",
                stacklevel=2,
            )

    def _close_writer(self) -> None:
        """Wait for a state that is still being written, where an exception ended the run: that is what must go up."""
        try:
            self._state_writer.close()
        except CheckpointError as error:
            warnings.warn(str(error), stacklevel=2)

    def _start_training_run(
        self,
        train_dl_kwargs: Mapping[str, Any] | None,
        eval_dl_kwargs: Mapping[str, Any] | None,
        reset_run_history: bool,
        state: Path | None,
    ) -> None:
        settings = self._settings
        refuse_static_graph(self._accelerator, settings.gradient_accumulation_steps)
        if reset_run_history:
            self.run_history.reset()
            self._epochs_before_run = 0
        else:
            self._epochs_before_run += self.run_state.epochs
        self._seed_run(state)
        self._resumed_data = None if state is None else data_of_run(state)
        self._training_runs += 1
        if self.seed is not None:
            set_seed(mixed_seed("run", int(self.seed), self._ranks.index, self._training_runs))
        self.run_state = RunState()
        self._start_safeguards(state)
        self._gradient_norms.reset()
        if isinstance(self.model, nn.Module):
            self.model.zero_grad()  # an interrupted run may have left half of an update
        eval_batch_size = settings.eval_per_device_batch_size or settings.per_device_batch_size
        self._train_dl_kwargs, self._eval_dl_kwargs = dict(train_dl_kwargs or {}), dict(eval_dl_kwargs or {})
        self._train_dataloader = self.create_train_dataloader(settings.per_device_batch_size, train_dl_kwargs)
        self._eval_dataloader = None
        if self.eval_dataset is not None:
            self._eval_dataloader = self.create_eval_dataloader(eval_batch_size, eval_dl_kwargs)
        self._start_capturing()
        self._prepare_model_optimizer_and_dataloaders()
        if any(isinstance(callback, SaveTrainingStateCallback) for callback in self.callback_handler):
            # Rows are fetched for it: now, not when a signal asks for a state at once.
            data_facts(train=self._train_dataloader, eval=self._eval_dataloader)
        self.run_config = self._create_run_config(
            settings.per_device_batch_size,
            settings.num_epochs,
            settings.gradient_accumulation_steps,
            settings.max_num_train_steps,
            settings.gradient_clip_value,
        )
        self.scheduler = self.create_scheduler()
        settle_epoch_counts(self.scheduler)
        check_scheduler(
            self.scheduler,
            is_expected=self.create_scheduler_fn is not None,
            has_own_step=self._overrides("scheduler_step"),
        )
        is_plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if is_plateau:
            WatchedMetric(settings.scheduler_metric).check_before_run(self)  # type: ignore[arg-type]  # as below
        has_step = self.scheduler is not None or self._overrides("scheduler_step")
        self._steps_scheduler_per_update = has_step and settings.step_scheduler == "update" and not is_plateau
        if state is not None:
            self._resume(state)
        self._deadline = None if settings.max_seconds is None else time.monotonic() + settings.max_seconds

    def _resume(self, state: Path, skipped_weights: Collection[str] = ()) -> None:
        """Take over a training state, now that everything that it belongs to is there."""
        load_run(self, state, skipped_weights=skipped_weights)  # type: ignore[arg-type]  # a run is always a Trainer's
        difference = difference_by_ranks(self, state)  # type: ignore[arg-type]  # as above
        if difference is not None:
            warn_user(self, difference)  # type: ignore[arg-type]  # as above
        for message in differing_rows(self._resumed_data or {}, self._train_dataloader, self._eval_dataloader, state):
            warn_user(self, message)  # type: ignore[arg-type]  # as above

    def _start_safeguards(self, resumed_from: Path | None) -> None:
        """What the settings ask for against updates that are not finite, and against batches that are too large."""
        if self._settings.nonfinite_policy is not None:
            self._update_guard = UpdateGuard(self, resumed_from)  # type: ignore[arg-type]  # as above
        if self._settings.split_on_oom:
            self._splitter = BatchSplitter(self)  # type: ignore[arg-type]  # as above
        self._loss_tracker = LossTracker() if self._update_guard is None else self._update_guard.losses

    def _seed_run(self, state: Path | None = None) -> None:
        """Fix the seed of the run; one that goes on from a training state keeps that one's."""
        seed = int(self.seed) if self.seed is not None else derived_seed(self._training_runs)
        if state is not None:
            seed = seed_of_run(state)
        self._run_seed = self._ranks.from_first(seed)

    def _create_accelerator(self) -> Accelerator:
        """The accelerate object behind this trainer."""
        if self._given_accelerator is None:
            return create_accelerator(self.mixed_precision, timeout=limit_of_waiting(self.timeout))
        return given_accelerator(self._given_accelerator, limit_of_waiting(self.timeout))

    def _renew_accelerator(self) -> None:
        """accelerate has one precision per process: come back to ours if another trainer has changed it."""
        if str(self._accelerator.mixed_precision) != self._precision:
            self._accelerator = self._create_accelerator()

    def _create_callback_handler(self) -> CallbackHandler:
        """The handler of the callbacks given to the constructor."""
        return CallbackHandler(self._callbacks, custom_events=self.custom_events)

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Put the model on its device, wrap what must be wrapped, and share the loaders out over the ranks."""
        self._prepare_model(for_training=self._train_dataloader is not None)
        if self._train_dataloader is not None:
            self._train_dataloader = self._adapted(self._train_dataloader, self._train_dl_kwargs, role="train")
            refuse_empty(self._train_dataloader, "train on")
        if self._eval_dataloader is not None:
            self._eval_dataloader = self._adapted(self._eval_dataloader, self._eval_dl_kwargs, role="eval")
            self._check_eval_batch_size()

    def _prepare_model(self, *, for_training: bool) -> None:
        with contextlib.nullcontext() if self._captured_step is None else self._captured_step.aside():
            self._prepared = PreparedModel(
                self._accelerator,
                self.model,
                self.optimizer,
                for_training=for_training,
                compile_arguments=self.compile_model,
            )
        self._is_sharded = has_shards(self._prepared.model)
        if self._ranks.count > 1 and not for_training and not self._is_sharded:
            # Nothing else makes sure that all ranks evaluate the same model.
            self._ranks.copy_from_first([parameter.data for parameter in self.model.parameters()])
        self.model, self.optimizer = self._prepared.model, self._prepared.optimizer
        self._has_plain_backward = self._prepared.has_plain_backward
        self._accumulating = self._prepared.accumulating

    def _release_model(self) -> None:
        if self._prepared is not None:
            self.model, self.optimizer = self._prepared.release(self.model)
            self._prepared = None
        if self._captured_step is not None:
            self._captured_step.close()
            self._captured_step = None

    @contextlib.contextmanager
    def _loader_of_pass(self, loader: Any, dl_kwargs: Mapping[str, Any] | None) -> Iterator[RunLoader]:
        """What `loader` yields for the model as it is, within a run or outside of one."""
        if self._prepared is None:
            self._seed_run()
            self._prepare_model(for_training=False)
        adapted = self._adapted(loader, dl_kwargs)
        try:
            yield adapted
        finally:
            close_loader(adapted)

    def _start_capturing(self) -> None:
        self.captured_step_report = None
        if self.compile_step is not None:
            self._captured_step = CapturedStep(self, self._create_capturer())  # type: ignore[arg-type]  # as above
            self.captured_step_report = self._captured_step.report

    def _create_capturer(self) -> Capturer | None:
        """What captures training steps on this device, if anything does."""
        device = self._ranks.device
        return CudaGraphCapturer(device) if device.type == "cuda" else None

    def _adapted(self, loader: Any, dl_kwargs: Mapping[str, Any] | None, role: str | None = None) -> RunLoader:
        if isinstance(loader, RunLoader):
            return loader
        if isinstance(loader, DataLoaderSlice):
            return self._adapted(loader.dl, dl_kwargs, role).limited(loader.slice_size)
        own_seed = self._ranks.from_first(drawn_seed(loader))  # on every rank, so that generators stay in step
        seed = self._run_seed if own_seed is None else own_seed
        if self._resumed_data is not None:  # whatever generators are like now, and if the state says nothing of them
            saved = self._resumed_data.get(role or "")
            seed = self._run_seed if saved is None else saved.seed
        adapted = adapt_loader(
            loader,
            self._ranks,
            seed=seed,
            accumulation_steps=self._settings.gradient_accumulation_steps,
            feed=device_feed(self._ranks.device, send_to_device),
            is_sharded=bool((dl_kwargs or {}).get("is_sharded", False)),
        )
        if adapted.announcement is not None:
            self.print(adapted.announcement)  # type: ignore[attr-defined]  # a run is always a Trainer's
        refuse_other_rows(adapted, self._ranks)
        return adapted

    def _create_run_config(
        self,
        per_device_batch_size: int,
        num_epochs: int | None,
        gradient_accumulation_steps: int,
        max_num_train_steps: int | None,
        gradient_clip_value: float | None,
    ) -> TrainerRunConfig:
        """The frozen facts of the run, from what was asked for and the loaders that exist."""
        return describe_run(
            self._train_dataloader,
            self._eval_dataloader,
            self._ranks,
            per_device_batch_size=per_device_batch_size,
            num_epochs=num_epochs,
            gradient_accumulation_steps=gradient_accumulation_steps,
            max_num_train_steps=max_num_train_steps,
            gradient_clip_value=gradient_clip_value,
            gradient_clip_norm=self._settings.gradient_clip_norm,
            train_dl_kwargs=self._train_dl_kwargs,
            eval_dl_kwargs=self._eval_dl_kwargs,
            mixed_precision=str(self._accelerator.mixed_precision),
            seed=self._run_seed,
        )

    def _check_eval_batch_size(self) -> None:
        """Refuse an evaluation without batches. Any batch size fits any number of ranks."""
        refuse_empty(self._eval_dataloader, "evaluate")

    def _check_parts(self) -> None:
        check_parts(
            model=self.model,
            loss_func=self.loss_func,
            run_history=self.run_history,
            seed=self.seed,
            compile_model=self.compile_model,
            compile_step=self.compile_step,
        )

    def _check_reduction(self, *, trains: bool, evaluates: bool) -> None:
        """Refuse a loss function that returns sums, unless hooks of the user's stand between it and the loop."""
        has_own_passes = type(self)._perform_forward_and_backward_passes is not (
            TrainingLoop._perform_forward_and_backward_passes
        )
        if trains and not (has_own_passes or self._overrides("calculate_train_batch_loss")):
            check_reduction(self.loss_func, hook="calculate_train_batch_loss")
        if evaluates and not self._overrides("calculate_eval_batch_loss"):
            check_reduction(self.loss_func, hook="calculate_eval_batch_loss")

    def _check_optimizer(self) -> None:
        modules = [value for value in vars(self).values() if isinstance(value, nn.Module)]
        check_optimizer(self.optimizer, modules, has_own_step=self._overrides("optimizer_step"))

    def _overrides(self, hook: str) -> bool:
        """Whether a subclass has a method of its own in place of the one in `TrainerHooks`."""
        return getattr(type(self), hook) is not getattr(TrainerHooks, hook)

    def _refuse_within_a_run(self, method: str, remedy: str) -> None:
        self._refuse_without_constructor()
        if self._is_running:
            raise ConfigurationError(
                f"`{method}` was called while the trainer is at work: it would reset the run. {remedy}"
            )

    def _refuse_without_constructor(self) -> None:
        if "_is_running" not in vars(self):
            raise ConfigurationError(
                f"`Trainer.__init__` has not run for this {type(self).__name__}, so most of it is missing. Call "
                f"`super().__init__(model, loss_func, optimizer, ...)` in `{type(self).__name__}.__init__`."
            )
