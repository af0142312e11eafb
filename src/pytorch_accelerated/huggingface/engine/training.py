"""An update and a training of the Hugging Face trainer: events, the requests of callbacks, logs and results.

The native loop trains. `FaceStep` puts the user's `training_step` in the place of the native forward and backward pass;
`FaceTraining` fires the events of `transformers` around updates and epochs, and does what callbacks ask for.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.data.updates import MicroBatch
from pytorch_accelerated.errors import HookOutputError
from pytorch_accelerated.huggingface.arguments.fields import IntervalStrategy, SaveStrategy
from pytorch_accelerated.huggingface.events import CONTROL_FLAGS, is_log_due, is_ours
from pytorch_accelerated.huggingface.knowledge import items_of_update, main_input_name
from pytorch_accelerated.huggingface.trainer_utils import (
    TrainOutput,
    meter_memory,
    output_dir_of,
    refuse_steps_taken_by_others,
    speed_metrics,
)
from pytorch_accelerated.huggingface.training_args import logger
from pytorch_accelerated.loop.hook_output import adding_nothing
from pytorch_accelerated.loop.preparing import loader_of_pass
from pytorch_accelerated.loop.step import Call, Step
from pytorch_accelerated.loop.training import Training
from pytorch_accelerated.loop.variants import RankedStep
from pytorch_accelerated.ranks.accelerators import send_to_device
from pytorch_accelerated.ranks.compat.torch import norms_of
from pytorch_accelerated.ranks.numerics import clip_norm
from pytorch_accelerated.ranks.sharding import whole
from pytorch_accelerated.ranks.wrappers import bare_model
from pytorch_accelerated.record.loss import LossTracker
from pytorch_accelerated.record.warning import warn_user

if TYPE_CHECKING:
    from pytorch_accelerated.data.updates import RunLoader
    from pytorch_accelerated.huggingface.engine.engine import Engine
    from pytorch_accelerated.huggingface.trainer import Trainer
    from pytorch_accelerated.loop.context import Context
    from pytorch_accelerated.ranks.ranks import Ranks

_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")


class FaceStep(Step):
    """A step that tells the Hugging Face callbacks about its parts.

    Losses are kept per update, not per batch.

    Attributes:
        face: the trainer that users see.
        training: the current training.
        learning_rate: of the last update.
        has_own_batches: whether the user's `get_batch_samples` says which batches an update has.
        samples_used: in the updates of this run, over all processes.
        norms: of the gradients of the last update; None if no log was expected.
    """

    def __init__(self, context: Context, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        self.training: FaceTraining = self.control.training  # type: ignore[assignment]
        self.face: Trainer = context.holder
        self.learning_rate = 0.0
        self.samples_used = 0
        self._loss: Any = None
        self._items: int | None = None
        self.norms: Sequence[torch.Tensor] | None = None
        self._raw_optimizer = getattr(self.parts.optimizer, "optimizer", self.parts.optimizer)
        self.has_own_batches = not is_ours(self.face.get_batch_samples)
        self._bare_model = bare_model(self.parts.model)

    def add(self, micro_batch: MicroBatch) -> None:
        """Add the gradients of one batch, and tell the callbacks."""
        emitter, face, update = self.control.emitter, self.face, micro_batch.update
        if update is not self.micro_batch.update:  # an update begins
            emitter.call(face.callback_handler.fire, "on_step_begin", face)
            self._loss = None
            if not self.has_own_batches:
                self._items = None if update.items is None else items_of_update(*update.items, face.args)
        self.parts.accelerator.sync_gradients = micro_batch.is_last  # scripts read it, to act once per update
        super().add(micro_batch)
        if not micro_batch.is_last:
            emitter.call(face.callback_handler.fire, "on_substep_end", face)

    def apply(self) -> None:
        """Apply the update, and tell the callbacks."""
        super().apply()
        emitter, face = self.control.emitter, self.face
        self.samples_used += self.micro_batch.update.samples
        batches, state, position = self.training.batches_of_epoch, face.state, self.parts.state
        # The last update of an epoch may have fewer batches than the others, and the epoch must not seem to be over.
        used = min(self.parts.loaders.train.accumulation.batches(position.updates_in_epoch), batches)
        state.global_step, state.epoch = position.updates, position.epochs + used / batches
        if self.training.counter.counts_tokens:
            state.num_input_tokens_seen += self.training.counter.take_tokens(self.parts.ranks)
        emitter.call(self.training.end_part, "on_step_end")

    def compute(self, batch: Any, step: int) -> None:
        """Add the gradients of one batch by the `training_step` of the Hugging Face trainer."""
        training_step, model = self.face.training_step, self.parts.model
        # A callback has evaluated; in transformers, too, the step itself switches back.
        if not self._bare_model.training:
            model.train()
        try:
            share = training_step(model, batch, self._items)
        except Exception as error:
            self.control.emitter.explain(error, training_step, batch)
            raise
        if share is None:
            raise HookOutputError(
                f"{type(self.face).__name__}.training_step returned None, but its loss is logged. Return the batch's "
                "share of it, as that of the super class does."
            )
        if self.micro_batch.is_borrowed:  # this rank has no row left, and computes only to exchange gradients
            share = torch.zeros_like(share)
        elif self.training.counter.is_needed:
            self.training.counter.count(batch)
        self._loss = share if self._loss is None else self._loss + share

    def share_of_update(self, loss: Any, num_items_in_batch: Any) -> Any:
        """The share of the update's loss that a batch with this loss contributes.

        A loss that was told the number of items is already a share, unless the trainer declares another scale. Other
        losses are means, and weighted.
        """
        micro_batch = self.micro_batch
        if micro_batch.is_borrowed or micro_batch.items == 0:  # a mean of nothing is NaN, and NaN times 0 as well
            return adding_nothing(loss)
        is_share = self.face.loss_is_scaled_for_ga
        if is_share is None:
            is_share = num_items_in_batch is not None and self.face.counts_items
        # The loader doesn't know the sizes of some batches; then each batch of an update counts the same.
        weight = 1 / micro_batch.update.samples if micro_batch.weight is None else micro_batch.weight
        return loss if is_share or weight == 1 else loss * weight

    def applying(self) -> list[Call]:
        """What changes the parameters."""
        return [(self, "optimizer_step")]

    def optimizer_step(self) -> None:
        """Clip the complete gradient and step the optimizer, with the events around it; keep what may be logged."""
        face = self.face
        if self.limit is not None:  # here one number
            self.norms = [clip_norm(self.parameters(), self.limit)]
        elif self.training.may_log_next():
            # The norms of single tensors are enough here: combining them costs more, and can wait for the log.
            self.norms = norms_of([parameter.grad for parameter in self.parameters() if parameter.grad is not None])
        else:
            self.norms = None
        self.control.emitter.call(face.callback_handler.fire, "on_pre_optimizer_step", face)
        # The schedule steps right after the optimizer, but the log belongs to this update.
        self.learning_rate = self._raw_optimizer.param_groups[0]["lr"]
        self.parts.optimizer.step()
        self.control.emitter.call(face.callback_handler.fire, "on_optimizer_step", face)
        self.reports.losses.update(self._loss)  # a log is a mean over updates, not over batches

    def note_norm(self, norm: torch.Tensor, *, is_skipped: bool) -> None:
        """Keep the norm of a gradient that an engine has clipped, for the log."""
        self.norms = [norm]

    def record(self, history: Any) -> None:
        """Nothing for an epoch: norms are logged step by step."""

    def own_batches(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The batches that an overridden `get_batch_samples` returns for each update, and whose items it counts."""
        face: Any = self.face
        device = face.args.device
        for first in batches:
            planned: list[MicroBatch] = []
            left = _of_update(itertools.chain([first], batches), planned)
            own, self._items = face.get_batch_samples(left, face.current_gradient_accumulation_steps, device)
            collections.deque(left, maxlen=0)  # the user leaves these out, but the next update begins after them
            if not own:
                raise HookOutputError(
                    f"{type(face).__name__}.get_batch_samples returned no batch for an update. Return at least one of "
                    "those that the iterator yields."
                )
            if len(own) != len(planned):  # nobody knows which is which, so each counts the same
                planned = [MicroBatch(None, weight=1 / len(own), is_last=False, update=first.update) for _ in own]
                planned[-1] = planned[-1]._replace(is_last=True)
            for each, batch in zip(planned, own, strict=True):
                yield each._replace(batch=send_to_device(batch, device))


def _of_update(batches: Iterator[MicroBatch], planned: list[MicroBatch]) -> Iterator[Any]:
    """The batches of one update, which are noted in `planned`."""
    for micro_batch in batches:
        planned.append(micro_batch)
        yield micro_batch.batch
        if micro_batch.is_last:
            return


class RankedFaceStep(FaceStep, RankedStep):
    """A step of the Hugging Face trainer on multiple ranks."""


class FaceTraining(Training):
    """One training of the Hugging Face trainer: its events, the requests of callbacks, logs and results.

    Args:
        context: of the run; its holder is the trainer that users see.
        ignore_keys: outputs of the model that evaluations leave out.

    Attributes:
        face: the trainer that users see.
        counter: of operations and tokens.
        started: when it began, in seconds since 1970.
        first_tokens: tokens that were seen before this training.
        batches_of_epoch: on this process.
        evaluates_as_requested: whether an evaluation is running that the loop requested.
        output: the result, once the training is over.
    """

    step: FaceStep
    has_step_records = False  # `logging_steps` says which losses belong together
    keeps_modes = False  # each step does it, as in transformers
    name_of_resume = "resume_from_checkpoint"
    way_to_give_workers = "dataloader_num_workers={0}"

    def __init__(self, context: Context, ignore_keys: Sequence[str] | None) -> None:
        super().__init__(context)
        self.face: Trainer = context.holder
        self._engine: Engine = context.trainer
        self._args = self.face.args
        self.counter = BatchCounter(self.face)
        self.evaluates_as_requested = False
        self.output: TrainOutput = None  # type: ignore[assignment]  # until the training is over
        self._ignore_keys = ignore_keys
        self.batches_of_epoch = 1
        self._first_step = 0
        self._total_loss = self._losses_taken = 0.0
        self._memory: Callable[[], dict[str, int]] = dict if self._args.skip_memory_metrics else meter_memory("train")
        self._reason_to_stop = ""
        self._kept_loaders: dict[Any, RunLoader] = {}
        self._kept_workers = contextlib.ExitStack()
        self.parts.reports.losses = LossTracker(leaves_out_non_finite=self._args.logging_nan_inf_filter)

    def kind_of_step(self) -> type[FaceStep]:
        """The kind of step that the run needs."""
        return FaceStep if self.parts.ranks.count == 1 else RankedFaceStep

    def plan(self, loader: Any) -> int:
        """The number of updates of the run, now that the length of an epoch is known, if there is one."""
        args, state = self._args, self.face.state
        state.num_train_epochs, *_, state.max_steps = self.face.set_initial_training_values(args, loader)
        state.train_batch_size = self.face._train_batch_size
        state.compute_steps(args, state.max_steps)
        return state.max_steps

    def release(self) -> None:
        """Remove what training wrapped around the model from the trainer that users see, too."""
        super().release()
        self._kept_loaders.clear()
        self._kept_workers.close()

    def loader_of_pass(self, loader: Any) -> contextlib.AbstractContextManager[RunLoader]:
        """This rank's part of an evaluation loader. Persistent workers live until the training is over."""
        part = loader_of_pass(self.context, loader, None)
        if not getattr(loader, "persistent_workers", False):
            return part
        if loader not in self._kept_loaders:
            self._kept_loaders[loader] = self._kept_workers.enter_context(part)
        return contextlib.nullcontext(self._kept_loaders[loader])

    def begin(self) -> None:
        """Prepare callbacks and counts: the engine is about to run."""
        face, engine = self.face, self._engine
        if self._args.save_strategy != SaveStrategy.NO:
            # Another run in the folder is refused now, not at the first checkpoint, hours later.
            folder, first_step = output_dir_of(self._args), face.state.global_step + 1
            self.control.saves.claim_folder(folder, "output_dir")
            self.parts.ranks.do_on_first(lambda: refuse_steps_taken_by_others(folder, first_step, face.state.max_steps))
        face.optimizer, face.model_wrapped = engine.optimizer, engine.model
        handler = face.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = face.model, face.optimizer, face.lr_scheduler
        handler.train_dataloader = self.parts.loaders.train
        self._first_step = self._last_logged = face.state.global_step
        self.first_tokens = self.face.state.num_input_tokens_seen
        self.started = time.time()
        logger.info("Training begins: steps %d to %d", face.state.global_step + 1, face.state.max_steps)
        handler.fire("on_train_begin", face)
        if self._args.eval_on_start:
            self.face._evaluate(None, self._ignore_keys, skip_scheduler=True)

    def may_stop_in_update(self) -> bool:
        """Whether a callback or method of the user may set flags on one rank alone."""
        return self.face.callback_handler.ranks_agree_after_each_update() or not is_ours(self.face)

    def agreed_control(self) -> Any:
        """The trainer's control, with each flag that any rank has set, where ranks may have callbacks of their own.

        Must be called by all ranks, between an event and what is done because of its flags.
        """
        handler = self.face.callback_handler
        if self.all_agree_after_each_update and not handler.is_agreed:
            flags = vars(self.face.control)
            by_rank = self.parts.ranks.exchange_numbers([bool(flags[name]) for name in CONTROL_FLAGS])
            for name, asked in zip(CONTROL_FLAGS, zip(*by_rank, strict=True), strict=True):
                flags[name] = any(asked)
            handler.is_agreed = True
        return self.face.control

    @property
    def is_complete(self) -> bool:
        """Whether there is nothing left to train, or a callback ended the training. Epochs that it ended count."""
        is_stopped, state = self.agreed_control().should_training_stop, self.parts.state
        is_over = state.epochs >= self.face.state.num_train_epochs or (state.is_cut and self.context.is_at_limit)
        return is_over or bool(is_stopped) or super().is_complete

    @property
    def ends_before_data(self) -> bool:
        """Whether a limit or a callback ends the run within the epoch. A callback may also end the epoch itself."""
        control = self.face.control
        is_stopped = self._updates_of_epoch is None and control.should_training_stop
        return not control.should_epoch_stop and (is_stopped or super().ends_before_data)

    def batches(self, loader: Any) -> Iterator[MicroBatch]:
        """The batches of the current epoch that are left, until a callback ends it."""
        batches = super().batches(loader)
        # A stream without an end is the only epoch of its run.
        train = self.parts.loaders.train
        self.batches_of_epoch = train.num_batches or train.accumulation.batches(self.face.state.max_steps)
        return batches

    def _up_to_limit(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The batches of the updates until the run has done all of them, or a callback ends the epoch or the run."""
        position, limit = self.parts.state, self.asked.settings.max_num_train_steps or 0
        if self.step.has_own_batches:
            batches = self.step.own_batches(batches)
        while position.updates < limit and (batch := next(batches, None)) is not None:
            yield batch
            if batch.is_last:
                control = self.agreed_control()
                if control.should_epoch_stop or control.should_training_stop:
                    return

    def refuse_empty_epoch(self, loader: Any) -> None:
        """End the run with a warning: a stream may be exhausted."""
        warn_user(
            self.parts.ranks,
            f"The training data has nothing more to yield, so the run ends after {self.parts.state.updates} of "
            f"{self.asked.settings.max_num_train_steps} steps. Pass something that can be iterated over again.",
        )
        self.face.control.should_training_stop = True

    def end_part(self, event: str) -> None:
        """Fire the event at the end of an update or an epoch, then log, evaluate and save, as the control says.

        The evaluation and the save wait for the next safe point.
        """
        self.face.callback_handler.fire(event, self.face)
        control = self.agreed_control()
        if control.should_log:
            self._log_losses()  # callbacks of the log may ask for more
            control = self.agreed_control()
        if control.should_evaluate:
            self._engine.request_evaluation()
        elif control.should_save:  # after an evaluation, which may change the best model, see below
            self._request_checkpoint()

    def may_log_next(self) -> bool:
        """Whether the current update may be logged: callbacks decide only after it."""
        face = self.face
        return (
            face.control.should_log
            or face.callback_handler.ranks_agree_after_each_update()
            or face.args.logging_strategy == IntervalStrategy.EPOCH
            or is_log_due(face.args, face.state, face.state.global_step + 1)
        )

    def _log_losses(self) -> None:
        """Log the mean loss of the steps since the last log, if there were any. That may have been in an earlier epoch.

        Waits for the device. Must be called by all ranks.
        """
        step = self.step
        if self.face.state.global_step == self._last_logged:
            return
        mean, left_out = self._take_losses()
        logs: dict[str, Any] = {"loss": mean}
        if step.norms is not None:
            logs["grad_norm"] = float(whole(torch.nn.utils.get_total_norm(step.norms)))
        logs["learning_rate"] = float(step.learning_rate)
        if left_out:
            logs["non_finite_losses"] = left_out
        # An overridden `log` need not have the second parameter if tokens are not counted.
        self.face.log(logs, *([self.started] if self.counter.counts_tokens else []))

    def _take_losses(self) -> tuple[float, int]:
        """The mean loss of the steps since the last call, and the number of steps left out, with a warning.

        Must be called by all ranks.
        """
        ranks, losses, step = self.parts.ranks, self.parts.reports.losses, self.face.state.global_step
        steps, self._last_logged = step - self._last_logged, step
        total, count = ranks.sum([losses.total_loss, losses.running_count])
        losses.reset()
        self._total_loss += total
        self._losses_taken += count
        left_out = math.ceil(steps - count / ranks.count)
        if left_out:
            warn_user(
                ranks,
                f"{left_out} of the last {steps} losses were NaN or infinite (up to step {step}). The logged mean "
                "leaves them out, because of `logging_nan_inf_filter`; the weights may be spoilt anyway. Lower the "
                "learning rate, or look for bad rows.",
            )
        # If none counts, use the mean of the run so far.
        return (total / count if count else self._mean_loss()), left_out

    def _mean_loss(self) -> float:
        """The mean of all losses that were taken; NaN without any."""
        return self._total_loss / self._losses_taken if self._losses_taken else math.nan

    def evaluate_as_requested(self) -> None:
        """Evaluate at a safe point, and compare with the best model."""
        self.evaluates_as_requested = True
        try:
            metrics = self.face._evaluate(None, self._ignore_keys)
        finally:
            self.evaluates_as_requested = False
        # If the checkpoint of the new best model can't be written, the earlier one stays the best.
        self.best_before = {name: getattr(self.face.state, name) for name in _BEST}
        is_best = self.face._determine_best_metric(metrics, None)
        if self._args.save_strategy == SaveStrategy.BEST:
            self.face.control.should_save = is_best
        if self.agreed_control().should_save:
            self._request_checkpoint()

    @property
    def name_of_limit(self) -> str:
        """The argument that ends the run."""
        return "max_steps" if self._args.max_steps > 0 else "num_train_epochs"

    def stop_early(self, reason: str) -> None:
        """Note why the run is stopped. Save if a signal did it, and this run has trained anything."""
        self._reason_to_stop = reason
        has_trained = self.face.is_in_train and self.face.state.global_step > self._first_step
        if self.control.stopping.signals.agreed and has_trained and self._args.save_strategy != SaveStrategy.NO:
            self._request_checkpoint()

    def end(self) -> None:
        """Load the best weights if requested, and log the summary: the run is over."""
        if self._args.load_best_model_at_end and self.face.state.best_model_checkpoint is not None:
            self._engine.states.load_best(Path(self.face.state.best_model_checkpoint))
        self._take_losses()
        steps = self.face.state.global_step - self._first_step
        train_loss = self._mean_loss() if steps else 0.0
        metrics = speed_metrics("train", self.started, num_samples=self.step.samples_used, num_steps=steps)
        self.face.store_flos()
        metrics["total_flos"] = self.face.state.total_flos
        metrics["train_loss"] = train_loss
        metrics.update(self._memory())
        self.face.log(metrics)
        self._engine.states.delete_superfluous()
        self.face.callback_handler.note_end(self._reason_to_stop, self.parts.state.skipped_updates)
        self.face.callback_handler.fire("on_train_end", self.face)
        self.output = TrainOutput(self.face.state.global_step, train_loss, metrics)

    def _request_checkpoint(self) -> None:
        self._engine.save_training_state(self._engine.states.checkpoint_folder())


class BatchCounter:
    """Counts operations and tokens of the batches of this process, as far as the batches allow it.

    Args:
        face: the trainer, whose arguments say what to count.

    Attributes:
        flos: operations on this process since `take_flos` was last called.
        counts_tokens: whether tokens are counted.
        is_needed: whether anything is counted.
    """

    def __init__(self, face: Trainer) -> None:
        self._face, self.flos = face, 0.0
        # Without a number of parameters, our estimate is always 0.
        self._counts_flos = hasattr(face.model, "num_parameters") or not is_ours(face.floating_point_ops)
        self.counts_tokens = face.args.include_num_input_tokens_seen != "no"
        self.is_needed = self._counts_flos or self.counts_tokens
        self._flos_by_shapes: dict[Hashable, float] = {}
        self._tokens: list[Any] = []

    def count(self, batch: Any) -> None:
        """Count a batch that has been used."""
        if self._counts_flos and isinstance(batch, (dict, Mapping)):
            shapes = tuple([(name, getattr(value, "shape", None)) for name, value in batch.items()])
            if shapes not in self._flos_by_shapes:  # counting the parameters takes longer than a small step
                self._flos_by_shapes[shapes] = float(self._face.floating_point_ops(batch))
            self.flos += self._flos_by_shapes[shapes]
        if self.counts_tokens:
            self._tokens.append(self._tokens_of(batch))

    def take_flos(self, ranks: Ranks) -> float:
        """The operations on all ranks since this was last called. Must be called by all ranks."""
        flos, self.flos = self.flos, 0.0
        return ranks.sum([flos])[0]

    def take_tokens(self, ranks: Ranks) -> int:
        """The tokens on all ranks since this was last called. Must be called by all ranks."""
        tokens, self._tokens = sum(int(tokens) for tokens in self._tokens), []
        return int(ranks.sum([tokens])[0])

    def _tokens_of(self, batch: Mapping[str, Any]) -> Any:
        tokens = batch[main_input_name(self._face.model)]
        if self._face.args.include_num_input_tokens_seen == "non_padding":
            if "attention_mask" in batch:
                return batch["attention_mask"].sum()
            padding = getattr(self._face.processing_class, "pad_token_id", None)
            if padding is not None:
                return (tokens != padding).sum()
        return tokens.numel()
