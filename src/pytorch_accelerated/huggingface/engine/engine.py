"""The native trainer behind the Hugging Face one: its hooks ask the face, its moments become the face's events."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.checkpointing.state_folder import read_state
from pytorch_accelerated.checkpointing.training_state import save_run
from pytorch_accelerated.data.updates import MicroBatch, RunLoader, Update
from pytorch_accelerated.errors import HookOutputError, StopTrainingError
from pytorch_accelerated.huggingface.arguments.parallel import accelerator_arguments
from pytorch_accelerated.huggingface.checkpoints.saving import write_without_run
from pytorch_accelerated.huggingface.engine.divisor import BATCHES, ITEMS, NOTHING, LossDivisor
from pytorch_accelerated.huggingface.engine.refusing import refuse_foreign_schedule
from pytorch_accelerated.huggingface.events.callbacks import is_ours
from pytorch_accelerated.huggingface.events.state import CONTROL_FLAGS
from pytorch_accelerated.huggingface.models.adapters import BASE_KEY, fingerprint_of, frozen_base
from pytorch_accelerated.huggingface.models.knowledge import refuse_sum
from pytorch_accelerated.models.deepspeed import EngineOptimizer, ZeroOptimizer
from pytorch_accelerated.models.sharding import has_shards, whole
from pytorch_accelerated.prediction.collecting import PredictionCollector
from pytorch_accelerated.processes.accelerators import create_accelerator
from pytorch_accelerated.run_config import TrainerRunConfig
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.trainer import Trainer as NativeTrainer
from pytorch_accelerated.training.hook_output import adding_nothing
from pytorch_accelerated.training.loop import clip_gradients

if TYPE_CHECKING:
    from accelerate import Accelerator

    from pytorch_accelerated.huggingface.evaluation.outputs import EvalLoopOutput
    from pytorch_accelerated.huggingface.trainer import Trainer


class Engine(NativeTrainer):
    """Runs the native loop for a Hugging Face trainer.

    Losses are kept per update, not per batch: the tracker holds those since the last log, which may reach over the end
    of an epoch.

    Args:
        face: the trainer that users see.
        native_arguments: see the native `Trainer`.

    Attributes:
        learning_rate: that the last update used.
        preparation_seconds: that making the model ready for the last evaluation took; None if a training had done so.
        samples_used: in the updates of this run, over all processes.
    """

    def __init__(self, face: Trainer, **native_arguments: Any) -> None:
        self._face = face
        self.learning_rate = 0.0
        self._norms_of_gradients: Sequence[torch.Tensor] | None = None
        self.samples_used = 0
        self._step_loss: Any = None
        self._items_on_rank: list[int | None] = []
        self._items_of_update: int | None = None
        self._loss_divisor = LossDivisor()
        self._evaluate_batch: Callable[[Any], Any] | None = None
        self._evaluates_as_requested = False
        self._kept_loaders: dict[Any, RunLoader] = {}
        self._kept_workers = contextlib.ExitStack()
        self._has_trained = False
        self.preparation_seconds: float | None = None
        super().__init__(face.model, None, None, callbacks=[_Moments(face)], **native_arguments)

    # --------------------------------------------------------------------------------------------------------- set-up

    def _create_accelerator(self) -> Accelerator:
        return create_accelerator(self.mixed_precision, **accelerator_arguments(self._face.args, self._face.model))

    def _renew_accelerator(self) -> None:
        """accelerate has one config of DeepSpeed per process: come back to ours if another trainer has changed it."""
        if self._face.args.deepspeed is None:
            super()._renew_accelerator()
        else:
            self._accelerator = self._create_accelerator()

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Mapping[str, Any] | None = None) -> Any:
        return self._face.get_train_dataloader()

    def count_batch_items(self, batch: Any) -> int | None:
        """The labels that a token-wise loss is the mean of, where the loss takes their number."""
        count = self._face.count_items(batch)
        self._items_on_rank.append(count)
        return count

    def create_scheduler(self) -> Any:
        return self._face.lr_scheduler  # made with the optimizer

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Make the optimizer and the schedule as soon as the length of the run is known."""
        face = self._face
        if not face.counts_items:
            self._count_items = None
        self._train_dataloader = self._adapted(self._train_dataloader, self._train_dl_kwargs)
        max_steps = face.plan(self._train_dataloader.num_updates)
        self._settings = dataclasses.replace(self._settings, max_num_train_steps=max_steps)
        face.create_optimizer_and_scheduler(num_training_steps=max_steps)
        self.optimizer = face.optimizer
        super()._check_optimizer()
        refuse_foreign_schedule(face.optimizer, face.lr_scheduler)
        super()._prepare_model_optimizer_and_dataloaders()
        face.model_wrapped = self.model
        self._raw_optimizer = getattr(self.optimizer, "optimizer", self.optimizer)

    def _check_optimizer(self) -> None:
        """There is none yet when a run is asked for."""

    def _create_run_config(
        self,
        per_device_batch_size: int,
        num_epochs: int | None,
        gradient_accumulation_steps: int,
        max_num_train_steps: int | None,
        gradient_clip_value: float | None,
    ) -> TrainerRunConfig:
        config = super()._create_run_config(
            per_device_batch_size,
            None,
            gradient_accumulation_steps,
            self._settings.max_num_train_steps,
            gradient_clip_value,
        )
        args = self._face.args
        # DeepSpeed computes in a precision that accelerate is not told of.
        return (
            dataclasses.replace(config, mixed_precision="bf16") if args.deepspeed is not None and args.bf16 else config
        )

    def _seed_run(self, state: Path | None = None) -> None:
        """The order of the rows follows from the arguments alone, so that training again gives the same again."""
        args = self._face.args
        self._run_seed = args.seed if args.data_seed is None else args.data_seed

    def _start_safeguards(self, resumed_from: Path | None) -> None:
        super()._start_safeguards(resumed_from)
        self._loss_tracker = LossTracker(leaves_out_non_finite=self._face.args.logging_nan_inf_filter)
        # The mean of a single batch is right whatever it is divided by.
        is_one_batch = self._ranks.count == self._settings.gradient_accumulation_steps == 1
        self._loss_divisor = LossDivisor(known=ITEMS if is_one_batch else None)
        self.samples_used = 0

    def _find_state(self, source: str | Path) -> Path | None:
        return Path(source)  # the face has looked for it

    def _resume(self, state: Path, skipped_weights: Collection[str] = ()) -> None:
        self._face.resume(state)
        self._loss_tracker.reset()  # the next log is about the steps of this call

    def _has_stoppers(self) -> bool:
        return self._face.has_foreign_callbacks

    # --------------------------------------------------------------------------------------------------------- updates

    def _updates(self, train_dl: Any) -> Iterator[Update]:
        for update in super()._updates(train_dl):
            yield update
            self.agree_on_control()
            control = self._face.control
            if control.should_epoch_stop or control.should_training_stop:
                return

    def agree_on_control(self) -> None:
        """Set each flag of the control that any rank has set, where ranks may have callbacks of their own.

        Must be called by all ranks, between events and what is done because of their flags.
        """
        face = self._face
        if self._ranks.count == 1 or not self._stops_after_each_update or face.control_is_agreed:
            return
        flags = vars(face.control)
        everyones = zip(*self._ranks.exchange_numbers([bool(flags[name]) for name in CONTROL_FLAGS]), strict=True)
        flags.update((name, True) for name, asked in zip(CONTROL_FLAGS, everyones, strict=True) if any(asked))
        face.control_is_agreed = True

    def _run_update(self, update: Update) -> None:
        self._guarded(self._face.fire, "on_step_begin")
        if self._count_items is not None:
            self._items_of_update = self._sum_of_items()
        self._step_loss = None
        super()._run_update(update)
        self.samples_used += update.samples

    def _run_batch(self, micro_batch: MicroBatch) -> None:
        super()._run_batch(micro_batch)
        if not micro_batch.is_last:
            self._tell("on_substep_end")

    def _tell(self, event: str) -> None:
        """Fire an event that changes nothing by itself."""
        face = self._face
        if face.callback_handler.listens_to(event):
            self._guarded(face.fire, event)

    def gather_padded(self, tensors: Any, padding_value: float) -> Any:
        """`gather` that keeps rows of nothing but padding: the labels of a row may all be -100."""
        return self._gather_rows(tensors, padding_value)

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        step_of_face = self._face.training_step
        try:
            share = step_of_face(self.model, batch, self._items_for(batch))
        except Exception as error:
            self._note_failure(error, step_of_face, batch)
            raise
        if share is None:
            raise HookOutputError(
                f"{type(self._face).__name__}.training_step returned None, but its loss is logged. Return the batch's "
                "share of it, as that of the super class does."
            )
        self._face._counter.count(batch)
        self._step_loss = share if self._step_loss is None else self._step_loss + share

    def _keep_in_step(self, batch: Any) -> None:
        self._fire_of_batch("on_train_step_start")  # as the ranks with a batch do
        self._gathers_no_rows = True
        share = self._face.training_step(self.model, batch, self._items_for(batch))
        self._gathers_no_rows = False
        if self._step_loss is None:  # a rank without any row in this update
            self._step_loss = torch.zeros_like(share)

    def _items_for(self, batch: Any) -> int | None:
        """The items of this update, unless the loss is a mean whatever it is told."""
        return None if self._loss_divisor.known == NOTHING else self._items_of_update

    def loss_of(self, compute: Callable[[Any], Any], num_items_in_batch: Any) -> Any:
        """The loss that `compute` returns when it is told the number of items."""
        loss = self._loss_divisor.loss_of(compute, num_items_in_batch)
        if num_items_in_batch is not None and self._loss_divisor.known == NOTHING and is_ours(self._face.compute_loss):
            refuse_sum(self._face)
        return loss

    def share_of_update(self, loss: Any, num_items_in_batch: Any) -> Any:
        """What is added to the gradients for a batch with this loss.

        A loss that was divided by the number of items of the whole update is a share of it already; a mean over the
        rows of the batch becomes one. Each rank's share counts as often as there are ranks, because gradients are
        averaged over them.
        """
        micro_batch = self._micro_batch
        if micro_batch.is_borrowed:
            return adding_nothing(loss)
        if self._loss_divisor.known == BATCHES:
            return loss
        if num_items_in_batch is not None and self._loss_divisor.known == ITEMS:
            weight: float = self._ranks.count if self._face.args.average_tokens_across_devices else 1
        elif micro_batch.weight is None:
            weight = 1 / self._update.samples  # nobody knows the sizes of the batches, so these are counted instead
        else:
            weight = micro_batch.weight
        if weight == 1:
            return loss
        return loss * weight if weight else adding_nothing(loss)

    def _sum_of_items(self) -> int | None:
        """The items of this update, as far as they could be counted."""
        counts, self._items_on_rank = self._items_on_rank, []
        if self._ranks.any(None in counts):
            return None
        total = sum(count or 0 for count in counts)
        if self._face.args.average_tokens_across_devices:
            return int(self._ranks.sum([total])[0])
        return max(1, total)  # a process without any label adds 0, not 0 / 0

    def _apply_gradients(self) -> None:
        self._clip_gradients()
        self._tell("on_pre_optimizer_step")
        self.learning_rate = self._raw_optimizer.param_groups[0]["lr"]
        self._guarded(self.optimizer_step)
        if isinstance(self.optimizer, ZeroOptimizer):
            self._norms_of_gradients = [self.optimizer.gradient_norm]
        self._tell("on_optimizer_step")
        self._loss_tracker.update(self._step_loss)

    def _clip_gradients(self) -> None:
        if isinstance(self.optimizer, ZeroOptimizer):
            return  # its step does so: no rank has a gradient to itself
        norm = clip_gradients(self._parameters(), self._settings)
        self._norms_of_gradients = None if norm is None else [norm]
        if norm is None and self._face.may_log_step():
            gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
            # Those of the tensors; putting them together takes longer, and can wait until the norm is looked at.
            self._norms_of_gradients = torch._foreach_norm(gradients) if gradients else ()

    # ----------------------------------------------------------------------------------------------------- evaluations

    def evaluate_rows(
        self, loader: Any, evaluate_batch: Callable[[Any], Any], collector: PredictionCollector
    ) -> EvalLoopOutput:
        """What `collector` makes of what `evaluate_batch` makes of each batch. Must be called by all ranks."""
        if not self._is_running:
            self.model = self._face.model
        outer, self._evaluate_batch = self._evaluate_batch, evaluate_batch
        try:
            # One that the loop asked for may be given up for a signal: a resumed run repeats it.
            with (
                contextlib.nullcontext() if self._evaluates_as_requested else self._running(),
                self._pass_over(loader) as adapted,
            ):
                return self._run_prediction(adapted, collector)  # type: ignore[no-any-return]
        finally:
            self._evaluate_batch = outer

    def _pass_over(self, loader: Any) -> contextlib.AbstractContextManager[Any]:
        """What `loader` yields. Its workers live until `end_kept_workers`, if it says that they persist.

        Outside of a training they end with the pass.
        """
        if not (self._evaluates_as_requested and getattr(loader, "persistent_workers", False)):
            return self._loader_of_pass(loader, None)
        if loader not in self._kept_loaders:
            self._kept_loaders[loader] = self._kept_workers.enter_context(self._loader_of_pass(loader, None))
        return contextlib.nullcontext(self._kept_loaders[loader])

    def end_kept_workers(self) -> None:
        """End the workers of evaluations, now that the training is over."""
        self._kept_loaders.clear()
        self._kept_workers.close()

    def calculate_predict_batch_outputs(self, batch: Any) -> Any:
        assert self._evaluate_batch is not None
        return self._evaluate_batch(batch)

    def _evaluate_as_requested(self) -> None:
        self._evaluates_as_requested = True
        try:
            self._face.evaluate_as_requested()
        finally:
            self._evaluates_as_requested = False

    def _give_up_prediction(self, reason: str) -> BaseException:
        return StopTrainingError(reason) if self._evaluates_as_requested else super()._give_up_prediction(reason)

    def _release_model(self) -> None:
        face = self._face
        if isinstance(face.optimizer, EngineOptimizer):  # it would keep all that DeepSpeed holds
            face.optimizer = face.callback_handler.optimizer = face.optimizer.optimizer
        super()._release_model()

    def _prepare_model(self, *, for_training: bool) -> None:
        started = time.perf_counter()
        super()._prepare_model(for_training=for_training)
        self._has_trained |= for_training
        self.preparation_seconds = None if self._has_trained else time.perf_counter() - started

    # ------------------------------------------------------------------------------------------------------ the rest

    @property
    def gradient_norm(self) -> float | None:
        """Of the last update, before it was clipped; None if nobody could know that it would be asked for.

        Waits for the device. Must be called by all ranks.
        """
        if self._norms_of_gradients is None:
            return None
        return float(whole(torch.nn.utils.get_total_norm(self._norms_of_gradients)))

    @property
    def batches_of_update(self) -> int:
        """Batches of this process in the update at work; the last one of an epoch may have fewer than the others."""
        most = self._face.args.gradient_accumulation_steps
        batches = getattr(self._train_dataloader, "num_batches", None)
        if batches is None or not self._face.is_in_train:
            return most
        number = max(1, min(most, int(batches) - self.run_state.updates_in_epoch * most))
        return self._loss_divisor.told_batches(number)

    def has_placed(self, batch: Any) -> bool:
        """Whether `batch` is the one at work in training, which the loader has put on the device."""
        return batch is self._micro_batch.batch

    @property
    def epochs_done(self) -> float:
        """Passes over the training set, with the fraction of the current one."""
        state, batches = self.run_state, self._train_dataloader.num_batches
        if batches is None:
            assert self._settings.max_num_train_steps is not None
            return state.epochs + state.updates_in_epoch / self._settings.max_num_train_steps
        used = min(state.updates_in_epoch * self._settings.gradient_accumulation_steps, batches)
        return state.epochs + float(used / batches)

    def _refuse_empty_epoch(self, train_dl: Any) -> None:
        """A stream may be used up; the run is over then."""
        warn_user(
            self,
            f"The training data has nothing more to yield, so the run ends after {self.run_state.updates} of "
            f"{self._settings.max_num_train_steps} steps. Pass something that can be iterated over again.",
        )
        self._face.control.should_training_stop = True

    def _is_run_complete(self) -> bool:
        self.agree_on_control()
        return self._face.control.should_training_stop or super()._is_run_complete()

    def _add_epoch_loss_to_run_history(self, metric_name: str) -> None:
        """The face logs losses, when it is asked to."""

    def _step_scheduler_after_epoch(self) -> None:
        """A schedule that watches a metric steps at evaluations."""

    def _write_training_state(self, output_dir: Path, extra: dict[str, Any], background: bool) -> None:
        self._face.save_as_requested()

    def write_run(self, folder: Path, write_others: Callable[[Path], None]) -> None:
        """Write everything this run is to a folder, and what `write_others` puts beside it. All ranks must call it."""
        self._check_finite()
        frozen = frozen_base(self._face.model)
        save_run(
            self,
            folder,
            {BASE_KEY: fingerprint_of(self._face.model, frozen)} if frozen else {},
            write_others=write_others,
            skipped_weights=frozen,
            has_optimizer_file=not has_shards(self._face.model),  # whose parts each rank writes itself
        )

    def write_model(self, folder: Path, write_others: Callable[[Path], None]) -> None:
        """Write a folder of what `write_others` puts into it. All ranks must call it."""
        self._check_finite()
        facts = {"updates": self.run_state.updates, "epochs": self.run_state.epochs}
        self._ranks.do_on_first(lambda: write_without_run(folder, facts, write_others))
        self._state_folders.add_saved(folder, self._ranks)

    def take_over_run(self, folder: Path) -> None:
        """Go on from what `write_run` wrote. All ranks must call it."""
        frozen = frozen_base(self._face.model)
        if frozen:
            _, parts = read_state(folder, ["extra"])
            saved = parts["extra"].get(BASE_KEY)
            if saved is not None and saved != fingerprint_of(self._face.model, frozen):
                kind = type(self._face.model).__name__
                warn_user(
                    self,
                    f"The frozen base of this {kind} has other weights, or another dtype, than when {folder} was "
                    "saved, which holds the adapter only. The run uses the base as it is now; load the one that it "
                    "began with.",
                )
        super()._resume(folder, frozen)


class _Moments(TrainerCallback):
    """Tells the face of the moments of the run, when everything that belongs to them is done."""

    def __init__(self, face: Trainer) -> None:
        self._face = face

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        self._face.begin_training()

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        self._face.fire("on_epoch_begin")

    def on_optimizer_step_end(self, trainer: Any, **kwargs: Any) -> None:
        self._face.end_step()

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self._face.fire("on_epoch_end")
        self._face.act_on_control()

    def on_prediction_step_end(self, trainer: Any, **kwargs: Any) -> None:
        self._face.fire("on_prediction_step")

    def on_stop_training_error(self, trainer: Any, **kwargs: Any) -> None:
        self._face.save_because_of_signal()

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        self._face.end_training()

    def on_exception(self, trainer: Any, **kwargs: Any) -> None:
        self._face.close_displays()
