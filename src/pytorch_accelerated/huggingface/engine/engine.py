"""The native trainer behind the Hugging Face one: its hooks ask the face, its events become the face's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.facts.settings import TrainSettings
from pytorch_accelerated.huggingface.arguments.parallel import accelerator_arguments
from pytorch_accelerated.huggingface.engine.refusing import refuse_foreign_schedule
from pytorch_accelerated.huggingface.engine.run import EngineRun
from pytorch_accelerated.huggingface.engine.step import FaceStep
from pytorch_accelerated.huggingface.events import Events
from pytorch_accelerated.huggingface.trainer_utils import EvalLoopOutput
from pytorch_accelerated.models.preparation import PreparedModel
from pytorch_accelerated.models.wrappers import bare_model
from pytorch_accelerated.prediction.collecting import PredictionCollector
from pytorch_accelerated.processes.accelerators import Accelerator, create_accelerator
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.run_config import TrainerRunConfig
from pytorch_accelerated.trainer import Trainer as NativeTrainer
from pytorch_accelerated.training.setup import check_optimizer_of

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.engine.training import Training
    from pytorch_accelerated.huggingface.trainer import Trainer


class Engine(NativeTrainer):
    """Runs the native loop for a Hugging Face trainer.

    Args:
        face: the trainer that users see.
        optimizers: the optimizer and the schedule that its user gave, each may be None.
        native_arguments: see the native `Trainer`.

    Attributes:
        events: calls the callbacks of the trainer.
        given_optimizer: the user's, and `given_schedule` likewise.
        training: the current training, or the last one.
        init_metrics: the memory that making the trainer took, if that is measured.
        warns_without_metrics: until it has warned that `compute_metrics` could not be called.
    """

    _makes_optimizer = True
    _run_kind = EngineRun

    def __init__(self, face: Trainer, optimizers: tuple[Any, Any], **native_arguments: Any) -> None:
        self._face = face
        self.events = Events(face)
        self.given_optimizer, self.given_schedule = optimizers
        self.training: Training | None = None
        self.init_metrics: dict[str, int] = {}
        self.warns_without_metrics = True
        self._evaluate_batch: Callable[[Any], Any] | None = None
        self._kept_loaders: dict[Any, RunLoader] = {}
        self._kept_workers = contextlib.ExitStack()
        self._counted: tuple[RunLoader | None, int | None] = None, None  # a training loader and its batches
        self._has_trained = False
        super().__init__(face.model, None, None, callbacks=[_Moments(self, self.events)], **native_arguments)

    # ----------------------------------------------------------------------------------- for the Hugging Face trainer

    @property
    def run(self) -> EngineRun:
        """The current run; outside of one the last, or a new one."""
        run = self.run_context
        assert isinstance(run, EngineRun)
        return run

    @property
    def ranks(self) -> Ranks:
        """The processes."""
        return self._ranks

    @property
    def accelerator(self) -> Accelerator:
        """The accelerate object behind the trainer."""
        return self._accelerator

    @property
    def train_loader(self) -> RunLoader:
        """The training loader of the run."""
        loader: RunLoader = self._train_dataloader
        return loader

    @property
    def step(self) -> FaceStep:
        """Does the updates of the current training, or of the last one right after it."""
        step = self.run.step
        assert isinstance(step, FaceStep)
        return step

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update."""
        return self.step.learning_rate if self.run.has_step else 0.0

    @property
    def preparation_seconds(self) -> float | None:
        """The time it took to prepare the model for the last evaluation; None if a training had prepared it."""
        return None if self._has_trained else self.run.preparation_seconds

    @property
    def batches_of_update(self) -> int:
        """Batches of this process in the current update. The last update of an epoch may have fewer than the others."""
        most = self._face.args.gradient_accumulation_steps
        batches = getattr(self._train_dataloader, "num_batches", None)
        if batches is None or not self._face.is_in_train or self._evaluate_batch is not None:
            return most
        return max(1, min(most, int(batches) - self.run_state.updates_in_epoch * most))

    @property
    def batch_samples(self) -> int | None:
        """Rows of the batch that is being evaluated, as far as the loader knows."""
        return self._batch_samples

    def has_placed(self, batch: Any) -> bool:
        """Whether `batch` is the current one of the training, which the loader has put on the device."""
        run = self.run
        return run.has_step and batch is run.step.micro_batch.batch

    @property
    def epochs_done(self) -> float:
        """Passes over the training set, with the fraction of the current one."""
        state, loader, settings = self.run_state, self.train_loader, self.run.settings
        if loader is not self._counted[0]:  # asked after each update
            self._counted = loader, loader.num_batches
        batches = self._counted[1]
        if batches is None:
            assert settings.max_num_train_steps is not None
            return state.epochs + state.updates_in_epoch / settings.max_num_train_steps
        return state.epochs + min(state.updates_in_epoch * settings.gradient_accumulation_steps, batches) / batches

    def gather_padded(self, tensors: Any, padding_value: float) -> Any:
        """`gather` that keeps rows of nothing but padding: the labels of a row may all be -100."""
        uneven = self.run.uneven
        return (self._ranks if uneven is None else uneven).gather(tensors, padding_value)

    def evaluate_rows(
        self, loader: Any, evaluate_batch: Callable[[Any], Any], collector: PredictionCollector
    ) -> EvalLoopOutput:
        """The result of `collector`, from the output of `evaluate_batch` for each batch. All ranks must call it."""
        is_asked_for = self._ongoing_run is not None and self.run.evaluates_as_requested
        outer, self._evaluate_batch = self._evaluate_batch, evaluate_batch
        try:
            # A signal may end an evaluation that the loop requested: a resumed run repeats it.
            with contextlib.nullcontext() if is_asked_for else self._during_run(TrainSettings(num_epochs=1)):
                run = self.run
                with self._model_of_the_moment(run), self._pass_over(loader, run) as adapted:
                    output: EvalLoopOutput = run.predict(adapted, collector)
                    # Scripts tell the logs of an evaluation from those of training by the model's mode, which the
                    # next step of training changes.
                    self.model.eval()
                    return output
        finally:
            self._evaluate_batch = outer

    @contextlib.contextmanager
    def _model_of_the_moment(self, run: EngineRun) -> Iterator[None]:
        """The model that the Hugging Face trainer has now. A script may have replaced it for one evaluation."""
        trained, model = self.model, self._face.model
        if not run.is_prepared or bare_model(trained) is model:
            self.model = trained if run.is_prepared else model
            yield
            return
        prepared = PreparedModel(self.accelerator, model, None, for_training=False)
        self.model = prepared.model
        try:
            yield
        finally:
            prepared.release(model)
            self.model = trained

    def _pass_over(self, loader: Any, run: EngineRun) -> contextlib.AbstractContextManager[Any]:
        """This rank's part of `loader`. Its workers live until the training is over if they persist, else until the
        pass is.
        """
        if not (run.evaluates_as_requested and getattr(loader, "persistent_workers", False)):
            return run.loader_of_pass(loader, None)
        if loader not in self._kept_loaders:
            self._kept_loaders[loader] = self._kept_workers.enter_context(run.loader_of_pass(loader, None))
        return contextlib.nullcontext(self._kept_loaders[loader])

    def run_training(self, training: Training, dataset: Any, **arguments: Any) -> None:
        """Run the native training, and inform `training` of its progress."""
        self.training = training
        try:
            self.train(dataset, **arguments)
        finally:  # the workers of evaluations end with the training
            self._kept_loaders.clear()
            self._kept_workers.close()

    # ---------------------------------------------------------------------------------------------------------- hooks

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Mapping[str, Any] | None = None) -> Any:
        return self._face.get_train_dataloader()

    def count_batch_items(self, batch: Any) -> int | None:
        """The number of labels in a batch, for a loss that is their mean and takes their number."""
        return self._face.count_items(batch)  # type: ignore[no-any-return]

    def create_scheduler(self) -> Any:
        return self._face.lr_scheduler  # made with the optimizer

    def calculate_predict_batch_outputs(self, batch: Any) -> Any:
        assert self._evaluate_batch is not None
        return self._evaluate_batch(batch)

    def _create_accelerator(self) -> Accelerator:
        return create_accelerator(self.mixed_precision, **accelerator_arguments(self._face.args, self._face.model))

    def _create_run(self, settings: TrainSettings) -> EngineRun:
        if self._face.args.deepspeed is not None:
            # accelerate has one DeepSpeed config per process: restore ours if another trainer has changed it.
            self._accelerator = self._create_accelerator()
        run = super()._create_run(settings)
        assert isinstance(run, EngineRun)
        run.face, run.events = self._face, self.events
        if self.training is not None:
            run.training = self.training
        return run

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Make the optimizer and the schedule as soon as the length of the run is known."""
        face, run = self._face, self.run
        if not face.counts_items:
            run.count_items = None
        self._train_dataloader = run.adapted(self._train_dataloader, self._train_dl_kwargs)
        max_steps = run.training.plan(self._train_dataloader)
        run.settings = dataclasses.replace(run.settings, max_num_train_steps=max_steps)
        face.create_optimizer_and_scheduler(num_training_steps=max_steps)
        self.optimizer = face.optimizer
        check_optimizer_of(self, face)
        refuse_foreign_schedule(face.optimizer, face.lr_scheduler)
        super()._prepare_model_optimizer_and_dataloaders()
        self._has_trained = True
        face.model_wrapped = self.model

    def _create_run_config(self, *sizes: Any, **further: Any) -> TrainerRunConfig:
        config, args = super()._create_run_config(*sizes, **further), self._face.args
        if args.deepspeed is None or not args.bf16:
            return config
        return dataclasses.replace(config, mixed_precision="bf16")  # accelerate does not know that of DeepSpeed

    def _add_epoch_loss_to_run_history(self, metric_name: str) -> None:
        """Do nothing: the Hugging Face trainer logs losses when requested."""

    def _step_scheduler_after_epoch(self) -> None:
        """Do nothing: a schedule that watches a metric steps at evaluations."""


class _Moments(TrainerCallback):
    """Translates the events of the native run, after everything that belongs to them."""

    def __init__(self, engine: Engine, events: Events) -> None:
        self._engine, self._events = engine, events

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        self._engine.run.training.begin()

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        self._events.fire("on_epoch_begin")

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self._engine.run.training.end_epoch()

    def on_prediction_step_end(self, trainer: Any, **kwargs: Any) -> None:
        self._events.fire("on_prediction_step")

    def on_stop_training_error(self, trainer: Any, reason: str = "", **kwargs: Any) -> None:
        if self._engine.training is not None:  # else an evaluation was stopped before any training
            self._engine.training.stop_early(reason)

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        self._engine.run.training.end()

    def on_exception(self, trainer: Any, **kwargs: Any) -> None:
        self._events.close_displays()
