"""The native trainer behind the Hugging Face one: its hooks ask the face, its events become the face's."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.facts.accumulation import Accumulation
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.settings import TrainSettings
from pytorch_accelerated.huggingface.arguments.parallel import accelerator_arguments, deepspeed, in_replicas
from pytorch_accelerated.huggingface.checkpoints.states import CheckpointStates, read_trainer_state
from pytorch_accelerated.huggingface.engine.optimizing import refuse_foreign_schedule
from pytorch_accelerated.huggingface.engine.training import FaceTraining
from pytorch_accelerated.huggingface.events import new_state
from pytorch_accelerated.huggingface.trainer_utils import EvalLoopOutput, TrainOutput, warn_of_earlier_checkpoints
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.loop.checks import check_optimizer_of
from pytorch_accelerated.loop.context import Context, view
from pytorch_accelerated.loop.evaluation import Prediction
from pytorch_accelerated.loop.preparing import distributed, loader_of_pass
from pytorch_accelerated.prediction.collecting import PredictionCollector
from pytorch_accelerated.ranks.accelerators import Accelerator, create_accelerator
from pytorch_accelerated.ranks.preparation import PreparedModel
from pytorch_accelerated.ranks.wrappers import bare_model
from pytorch_accelerated.record.watching import PLATEAU, WatchedMetric
from pytorch_accelerated.trainer import Trainer as NativeTrainer

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.trainer import Trainer
    from pytorch_accelerated.ranks.ranks import Ranks


class Engine(NativeTrainer):
    """Runs the native loop for a Hugging Face trainer.

    Args:
        face: the trainer that users see.
        optimizers: the optimizer and the schedule that its user gave, each may be None.
        native_arguments: see the native `Trainer`.

    Attributes:
        given_optimizer: the user's, and `given_schedule` likewise.
        training: the current training, or the last one.
        ranks, accelerator, states: the context's.
        preparation_seconds: the time to prepare the model for the last evaluation.
        warns_without_metrics: until it has warned that `compute_metrics` could not be called.
        is_in_step: whether our `training_step` asks for a loss, not one of the user's own.
    """

    ranks: Ranks = view("parts.ranks")
    accelerator: Accelerator = view("parts.accelerator")
    states: CheckpointStates = view("control.states")
    preparation_seconds = 0.0
    is_in_step = False
    _makes_optimizer = True
    _kind_of_states = CheckpointStates

    def __init__(self, face: Trainer, optimizers: tuple[Any, Any], **native_arguments: Any) -> None:
        self._face = self.run_context.holder = face
        self.given_optimizer, self.given_schedule = optimizers
        self.training: FaceTraining = None  # type: ignore[assignment]  # until one begins
        self.warns_without_metrics = True
        self._ignore_keys: Sequence[str] | None = None
        self._evaluate_batch: Callable[[Any], Any] | None = None
        super().__init__(face.model, None, None, callbacks=[_NativeEvents(face)], **native_arguments)

    # ----------------------------------------------------------------------------------- for the Hugging Face trainer

    @property
    def batches_of_update(self) -> int:
        """Batches of this process in the current update. The last update of an epoch may have fewer than the others."""
        accumulation, done = Accumulation.of(self._face.args), self.run_state.updates_in_epoch
        batches = getattr(self._train_dataloader, "num_batches", None)
        if batches is None or not self._face.is_in_train or self._evaluate_batch is not None:
            return accumulation.batches(1)
        return max(1, min(accumulation.batches(done + 1), int(batches)) - accumulation.batches(done))

    def evaluate_rows(
        self, loader: Any, evaluate_batch: Callable[[Any], Any], collector: PredictionCollector
    ) -> EvalLoopOutput:
        """The result of `collector`, from the output of `evaluate_batch` for each batch. All ranks must call it."""
        training, control = self.training, self.run_context.control
        is_requested = control.is_at_work and training is not None and training.evaluates_as_requested
        running = contextlib.nullcontext(self.run_context)
        outer, self._evaluate_batch = self._evaluate_batch, evaluate_batch
        try:
            with running if is_requested else self._during_run(TrainSettings(num_epochs=1)) as context:
                part = training.loader_of_pass(loader) if is_requested else loader_of_pass(context, loader, None)
                signals, started = context.control.stopping.signals, time.perf_counter()
                with _model_of_the_moment(context), part as rows:
                    self.preparation_seconds = time.perf_counter() - started
                    # A signal may end an evaluation that the loop requested: a resumed run repeats it.
                    give_up = StopTrainingError if is_requested else lambda reason: signals.exit()
                    output: EvalLoopOutput = Prediction(context).run(rows, collector, give_up)
                # Scripts tell the logs of an evaluation from training logs by the model's mode, which the next step of
                # training changes.
                self.model.eval()
                return output
        finally:
            self._evaluate_batch = outer

    def run_training(self, checkpoint: Path | None, ignore_keys: Sequence[str] | None) -> TrainOutput:
        """Train from `checkpoint` on. If the arguments say so, halve the batch size as often as memory runs out.

        Must be called by all ranks; `ignore_keys` are outputs of the model that evaluations leave out.
        """
        face, size = self._face, self._face.args.train_batch_size
        self._ignore_keys, self.model = ignore_keys, in_replicas(face, face.model, face.args.n_gpu)
        if not face.args.auto_find_batch_size:
            return self._train_once(checkpoint, size)
        if checkpoint is not None:
            size = read_trainer_state(checkpoint).train_batch_size or size
        module = require("pytorch_accelerated.extras.huggingface.fitting", needed_by="`auto_find_batch_size`")
        return module.train(face, self.ranks, size, lambda size: self._train_once(checkpoint, size))  # type: ignore[no-any-return]

    def _train_once(self, checkpoint: Path | None, batch_size: int) -> TrainOutput:
        """Train with batches of `batch_size` rows on one device."""
        args, face = self._face.args, self._face
        face.state, face._train_batch_size = new_state(face), batch_size
        if checkpoint is None and args.save_total_limit is not None:
            warn_of_earlier_checkpoints(args, self.ranks)
        face.is_in_train = True
        face.control.should_training_stop = False  # the last training may have ended with it
        try:
            self.train(
                face.train_dataset,
                num_epochs=math.ceil(args.num_train_epochs) or None,  # None: `max_steps` says when to stop
                per_device_batch_size=batch_size,
                max_num_train_steps=args.max_steps if args.max_steps > 0 else None,
                gradient_accumulation_steps=args.gradient_accumulation_steps,
                gradient_clip_norm=args.max_grad_norm or None,
                resume_from=checkpoint,
                # The metric that a schedule watches is looked up in the log history, not in the native one.
                scheduler_metric="train_loss_epoch",
            )
        finally:
            face.is_in_train = False
            face.model_wrapped = face.model
        return self.training.output

    # ---------------------------------------------------------------------------------------------------------- hooks

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Mapping[str, Any] | None = None) -> Any:
        return self._face.get_train_dataloader()

    def count_batch_items(self, batch: Any) -> int | None:
        """The number of labels in a batch, for a loss that is their mean and takes their number."""
        return self._face.count_items(batch)  # type: ignore[no-any-return]

    def create_scheduler(self) -> Any:
        face = self._face
        if face.lr_scheduler is None and face.args.deepspeed is not None:
            face.lr_scheduler = deepspeed().schedule_of(face, self.optimizer)
        return face.lr_scheduler  # made with the optimizer

    def training_run_start(self) -> None:
        self.training.begin()

    def train_epoch_start(self) -> None:
        self._face.callback_handler.fire("on_epoch_begin", self._face)

    def train_epoch_end(self) -> None:
        self.training.end_part("on_epoch_end")

    def training_run_end(self) -> None:
        self.training.end()

    def calculate_predict_batch_outputs(self, batch: Any) -> Any:
        assert self._evaluate_batch is not None
        return self._evaluate_batch(batch)

    def _create_accelerator(self) -> Accelerator:
        return create_accelerator(self.mixed_precision, **accelerator_arguments(self._face.args, self._face.model))

    def _create_training(self, context: Context) -> FaceTraining:
        self.training = FaceTraining(context, self._ignore_keys)
        return self.training

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Make the optimizer and the schedule as soon as the length of the run is known."""
        face, context, loaders = self._face, self.run_context, self.run_context.parts.loaders
        if not face.counts_items:
            context.asked.count_items = None
        loaders.train = distributed(context, loaders.train, loaders.train_kwargs)
        max_steps = self.training.plan(loaders.train)
        context.asked.settings = dataclasses.replace(context.asked.settings, max_num_train_steps=max_steps)
        if face.args.deepspeed is None or not deepspeed().prepare(face, max_steps):
            face.create_optimizer_and_scheduler(num_training_steps=max_steps)
        self.optimizer = face.optimizer
        check_optimizer_of(context)
        refuse_foreign_schedule(face.optimizer, face.lr_scheduler)
        metric, schedule = face.args.metric_for_best_model, face.lr_scheduler
        if metric is not None:
            watched = WatchedMetric(metric, bool(face.args.greater_is_better))
            watched.check_direction(context.parts.ranks, "`metric_for_best_model`")
            if isinstance(schedule, ReduceLROnPlateau):
                WatchedMetric(metric, schedule.mode == "max").check_direction(context.parts.ranks, *PLATEAU)
        super()._prepare_model_optimizer_and_dataloaders()
        face.model_wrapped = self.model

    def _add_epoch_loss_to_run_history(self, metric_name: str) -> None:
        """Do nothing: the Hugging Face trainer logs losses when requested."""

    def _step_scheduler_after_epoch(self) -> None:
        """Do nothing: a schedule that watches a metric steps at evaluations."""


class _NativeEvents(TrainerCallback):
    """Translates the events of the native run that have no hook."""

    def __init__(self, face: Trainer) -> None:
        self._face = face

    def on_prediction_step_end(self, trainer: Any, **kwargs: Any) -> None:
        self._face.callback_handler.fire("on_prediction_step", self._face)

    def on_stop_training_error(self, trainer: Any, reason: str = "", **kwargs: Any) -> None:
        if trainer.training is not None:  # else an evaluation was stopped before any training
            trainer.training.stop_early(reason)

    def on_exception(self, trainer: Any, **kwargs: Any) -> None:
        self._face.callback_handler.close_displays()


@contextlib.contextmanager
def _model_of_the_moment(context: Context) -> Iterator[None]:
    """The model that the trainer that users see has now. A script may have replaced it for one evaluation."""
    trained, face = context.parts.model, context.holder
    model = in_replicas(face, face.model, face.args.n_gpu)
    if context.parts.prepared is None or bare_model(trained) is bare_model(model):
        context.parts.model = model if context.parts.prepared is None else trained
        yield
        return
    prepared = PreparedModel(context.parts.accelerator, model, None, for_training=False)
    context.parts.model = prepared.model
    try:
        yield
    finally:
        prepared.release(model)
        context.parts.model = trained
