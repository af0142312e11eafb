"""`Trainer`: what users call.

The loop itself is in `loop.py`, what may come between its steps in `control.py`, what has to be in place before it runs
in `running.py`, what a subclass may override in `hooks.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accelerated.callbacks.defaults import DEFAULT_CALLBACKS
from pytorch_accelerated.callbacks.handler import CallbackHandler
from pytorch_accelerated.callbacks.limits import OuterLimit
from pytorch_accelerated.checkpointing.loading import all_or_nothing, check_same_kind, load_states
from pytorch_accelerated.checkpointing.optimizers import check_optimizer_state
from pytorch_accelerated.checkpointing.portable import load_portable, save_portable
from pytorch_accelerated.checkpointing.shared_disk import agree_on_resuming
from pytorch_accelerated.checkpointing.training_state import load_run, save_run
from pytorch_accelerated.checkpointing.verify import find_state
from pytorch_accelerated.checkpointing.weights import (
    canonical_state_dict,
    check_canonical,
    check_finite,
    load_canonical,
)
from pytorch_accelerated.data.building import build_loader, check_dataset
from pytorch_accelerated.data.checking import refuse_rearranged
from pytorch_accelerated.data.padding import remove_padding
from pytorch_accelerated.data.slicing import LIMIT_BATCHES_ENV_VAR, batch_limit_from_environment
from pytorch_accelerated.errors import (
    ConfigurationError,
    InvalidCheckpointError,
)
from pytorch_accelerated.models.deepspeed import is_engine
from pytorch_accelerated.models.preparation import PreparedModel
from pytorch_accelerated.models.sharding import has_shards, whole
from pytorch_accelerated.prediction.collecting import collect_predictions
from pytorch_accelerated.processes.gathering import map_tensors, without_rows
from pytorch_accelerated.processes.peers import limit_of_waiting
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.progress.display import above_bars
from pytorch_accelerated.steps.capturing import CapturedStepReport, refuse_what_cannot_be_captured
from pytorch_accelerated.steps.guarded import refuse_what_cannot_be_held_back
from pytorch_accelerated.steps.splitting import refuse_what_cannot_be_split
from pytorch_accelerated.tracking.history import InMemoryRunHistory, RunHistory
from pytorch_accelerated.tracking.loss import LossTracker
from pytorch_accelerated.training.explaining import explain_run
from pytorch_accelerated.training.hooks import warn_about_misspelt_hooks
from pytorch_accelerated.training.placeholders import TrainerPlaceholderValues, replace_trainer_placeholder_values
from pytorch_accelerated.training.preflight import PreflightReport, rehearse
from pytorch_accelerated.training.run_state import RunState
from pytorch_accelerated.training.running import TrainingRun
from pytorch_accelerated.training.settings import (
    TrainSettings,
    check_positive_count,
    check_run_arguments,
    check_scheduler_factory,
)

__all__ = [
    "DEFAULT_CALLBACKS",
    "Trainer",
    "TrainerPlaceholderValues",
    "TrainerWithTimmScheduler",
    "replace_trainer_placeholder_values",
]


class Trainer(TrainingRun):
    """Trains, evaluates, predicts with and saves any PyTorch model.

    ::

        trainer = Trainer(model, loss_func=nn.CrossEntropyLoss(), optimizer=optimizer)
        trainer.train(train_dataset, num_epochs=3, eval_dataset=eval_dataset, per_device_batch_size=32)

    Every method in the sections "set-up", "run", "training epoch" and "evaluation epoch" may be overridden. Those whose
    name begins with `create`, `calculate`, `count` or `get` return a value, the others change state. A run calls them,
    and the callbacks' events after them, in the order that `explain` shows.

    The constructor stores what it is given; kinds and values are checked when a run starts.

    Args:
        model: any module. It is the bare module before and after a run; while training it may be wrapped.
        loss_func: of the model's outputs and the targets, returning the mean over the batch. Where batches are dicts,
            of the outputs and the whole batch; or None if the model returns its own loss for them.
        optimizer: over the model's parameters.
        callbacks: `TrainerCallback` classes or instances; events are fired in this order.
        run_history: where metrics are recorded; default `InMemoryRunHistory`.
        seed: of everything random in training runs: order of samples, augmentations, dropout. None: derived from the
            state of torch's generator when a run starts, without changing it.
        mixed_precision: "no", "fp16" (not on the CPU), "bf16" or "fp8"; None: as accelerate is configured.
        compile_model: compile the model in place when a run starts; a dict holds arguments for `torch.compile`, and
            maybe ``"regional": True`` to compile repeated blocks instead of the whole.
        compile_step: "graph" to capture the training step as CUDA graphs and replay them, which pays where a step is
            many short kernels. Steps that cannot be captured run as always; `docs/design/captured-step.md` has the
            rules.
        accelerator: an `accelerate.Accelerator`, or a function that returns one. It must not accumulate gradients
            itself.
        inference_mode: evaluate and predict in `torch.inference_mode` instead of `torch.no_grad`: a little faster, but
            a module that keeps a tensor from an evaluation, a cache say, fails with it in training.
        timeout: seconds that a process waits for the others before it gives up with a `LostPeerError`; longer than
            whatever one process does alone, such as a save. None: torch's limit, half an hour with gloo and ten
            minutes with NCCL.
    """

    #: Names of events that a subclass fires itself, so that callbacks with such methods are not taken for misspelt.
    custom_events: tuple[str, ...] = ()

    def __init__(
        self,
        model: nn.Module,
        loss_func: Callable[..., Any] | None,
        optimizer: torch.optim.Optimizer | Any,
        callbacks: Iterable[Any] = DEFAULT_CALLBACKS,
        run_history: RunHistory | None = None,
        *,
        seed: int | None = None,
        mixed_precision: str | None = None,
        compile_model: bool | Mapping[str, Any] = False,
        compile_step: str | None = None,
        accelerator: Accelerator | Callable[[], Accelerator] | None = None,
        inference_mode: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.model: Any = model
        self.loss_func = loss_func
        self.optimizer: Any = optimizer
        self.run_history: RunHistory = run_history if run_history is not None else InMemoryRunHistory()
        self.seed = seed
        self.mixed_precision = mixed_precision
        self.compile_model = compile_model
        self.inference_mode = inference_mode
        self.timeout = timeout
        self.compile_step = compile_step
        self.captured_step_report: CapturedStepReport | None = None
        self.scheduler: Any = None
        self.create_scheduler_fn: Callable[..., Any] | None = None
        self.collate_fn: Callable[..., Any] | None = None
        self.train_dataset: Any = None
        self.eval_dataset: Any = None
        self.run_config = None  # type: ignore[assignment]  # there is none before the first run
        self.run_state = RunState()

        self._callbacks = callbacks
        self._given_accelerator = accelerator
        self._accelerator: Accelerator = self._create_accelerator()
        self._precision = str(self._accelerator.mixed_precision)
        self._ranks = Ranks(self._accelerator, timeout=limit_of_waiting(timeout))
        self.callback_handler: CallbackHandler = self._create_callback_handler()
        limit = batch_limit_from_environment()
        if limit is not None:
            self.callback_handler.add_callback(OuterLimit(limit, source=LIMIT_BATCHES_ENV_VAR))

        self._settings = TrainSettings(num_epochs=1)
        self._train_dataloader: Any = None
        self._eval_dataloader: Any = None
        self._train_dl_kwargs: Mapping[str, Any] = {}
        self._eval_dl_kwargs: Mapping[str, Any] = {}
        self._pad_uneven_eval_batches = False  # read by scripts; nothing is padded
        self._loss_tracker = LossTracker()
        self._gradient_norms = LossTracker()
        self._run_seed = 0
        self._training_runs = 0
        self._epochs_before_run = 0
        self._is_running = False
        self._prepared: PreparedModel | None = None
        self._reset_control()
        warn_about_misspelt_hooks(self)
        self._emit("on_init_end")

    # ------------------------------------------------------------------------------------------------ what users call

    def train(
        self,
        train_dataset: Any,
        num_epochs: int | None,
        eval_dataset: Any = None,
        per_device_batch_size: int = 8,
        max_num_train_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_clip_value: float | None = None,
        create_scheduler_fn: Callable[..., Any] | None = None,
        train_dataloader_kwargs: Mapping[str, Any] | None = None,
        eval_dataloader_kwargs: Mapping[str, Any] | None = None,
        reset_run_history: bool = True,
        collate_fn: Callable[..., Any] | None = None,
        resume_from: str | Path | None = None,
        *,
        gradient_clip_norm: float | None = None,
        max_duration: float | str | None = None,
        eval_per_device_batch_size: int | None = None,
        step_scheduler: str = "update",
        scheduler_metric: str = "eval_loss_epoch",
        nonfinite_policy: str | None = None,
        max_skipped_updates: int = 10,
        split_on_oom: bool = False,
    ) -> RunHistory:
        """Train, and evaluate after each epoch if there is an evaluation set. Must be called by all ranks.

        Datasets may be map-style or iterable, with or without a length; tensors or arrays, or tuples and dicts of
        them; or ready `DataLoader` objects.

        Args:
            train_dataset: what to train on.
            num_epochs: passes over it; None if `max_num_train_steps` is given.
            eval_dataset: what to evaluate on.
            per_device_batch_size: samples of a batch on one rank.
            max_num_train_steps: optimizer updates after which the run ends; overrides `num_epochs`.
            gradient_accumulation_steps: batches of a rank per update. The update equals that of one large batch.
            gradient_clip_value: limit each entry of the gradient to [-value, value], once per update.
            create_scheduler_fn: makes the scheduler from the optimizer. A `functools.partial` may hold
                `TrainerPlaceholderValues`.
            train_dataloader_kwargs: laid over the defaults of `get_default_train_dl_kwargs`. ``is_sharded=True`` says
                that an iterable dataset itself gives each rank samples of its own. A `generator`, here or in a loader
                or sampler of yours, decides on the order of samples instead of the trainer's `seed`.
            eval_dataloader_kwargs: the same for evaluation.
            reset_run_history: False to go on counting epochs and keep the metrics of earlier runs.
            collate_fn: makes a batch of samples, for both datasets.
            resume_from: a training state, or a folder of them (the newest complete one counts), to go on from until
                `num_epochs` in total. A folder without any: start afresh.
            gradient_clip_norm: limit of the gradient's global norm, which is recorded as ``gradient_norm``.
            max_duration: seconds, or "HH:MM:SS", after which the run stops at the end of an update.
            eval_per_device_batch_size: default: `per_device_batch_size`.
            step_scheduler: step the scheduler per "update" or per "epoch". `ReduceLROnPlateau` always steps after
                evaluation.
            scheduler_metric: what a `ReduceLROnPlateau` watches.
            nonfinite_policy: of an update whose loss or gradient is NaN or infinite. None: apply it; callbacks hear of
                the loss, and `TerminateOnNaNCallback` ends the run. "skip": leave the update out. "rollback": go back
                to the newest training state of this run, and on without the update. To look, the run waits for the
                device once per update.
            max_skipped_updates: so many updates in a row may be left out because of `nonfinite_policy`.
            split_on_oom: compute a batch that does not fit into memory in parts, and all later ones. With one process.

        Returns:
            A copy of the run history, which a later `evaluate` does not change.

        Raises:
            ArgumentTypeError, ConfigurationError, DataError: for input that cannot work, before work is lost.
            NonFiniteLossError: if `TerminateOnNaNCallback` met a loss that is NaN or infinite, or more updates in a row
                than `max_skipped_updates` could not be applied.
        """
        self._refuse_within_a_run("train", "Call it when the run is over, or use another trainer.")
        settings = TrainSettings(
            num_epochs=num_epochs,
            per_device_batch_size=per_device_batch_size,
            eval_per_device_batch_size=eval_per_device_batch_size,
            max_num_train_steps=max_num_train_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_clip_value=gradient_clip_value,
            gradient_clip_norm=gradient_clip_norm,
            max_duration=max_duration,
            step_scheduler=step_scheduler,
            scheduler_metric=scheduler_metric,
            nonfinite_policy=nonfinite_policy,
            max_skipped_updates=max_skipped_updates,
            split_on_oom=split_on_oom,
        )
        check_run_arguments(
            train_dataloader_kwargs=train_dataloader_kwargs,
            eval_dataloader_kwargs=eval_dataloader_kwargs,
            collate_fn=collate_fn,
            resume_from=resume_from,
        )
        check_scheduler_factory(create_scheduler_fn, has_own_call=self._overrides("create_scheduler"))
        self._check_parts()
        self._check_reduction(trains=True, evaluates=eval_dataset is not None)
        self._check_optimizer()
        if self.compile_step is not None:
            refuse_what_cannot_be_captured(self)
        if settings.nonfinite_policy is not None:
            refuse_what_cannot_be_held_back(self, settings)
        if settings.split_on_oom:
            refuse_what_cannot_be_split(self)
        num_passes = settings.num_epochs if settings.max_num_train_steps is None else None
        if not self._overrides("create_train_dataloader"):
            check_dataset(train_dataset, num_passes=num_passes)
        if eval_dataset is not None and not self._overrides("create_eval_dataloader"):
            check_dataset(eval_dataset, num_passes=num_passes)
        self._settings = settings
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.collate_fn = collate_fn
        self.create_scheduler_fn = create_scheduler_fn
        with self._running():
            agree_on_resuming(resume_from, self._ranks)
            state = None if resume_from is None else self._find_state(resume_from)
            if resume_from is not None and state is None:
                self.print(f"No training state in {resume_from}: starting afresh")
            self._start_training_run(train_dataloader_kwargs, eval_dataloader_kwargs, reset_run_history, state)
            if state is not None:
                self.print(f"Resuming from {state}: epoch {self.run_history.current_epoch}, {self.run_state.position}")
            self._run_training()
        return self.run_history.copy()

    def evaluate(
        self,
        dataset: Any = None,
        per_device_batch_size: int = 8,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> dict[str, Any]:
        """Evaluate once; the run history is reset and holds the metrics. Must be called by all ranks.

        Args:
            dataset: default: the last evaluation dataset.
            per_device_batch_size: samples of a batch on one rank.
            dataloader_kwargs: laid over the defaults of `get_default_eval_dl_kwargs`.
            collate_fn: makes a batch of samples; default: the last one given.

        Returns:
            The metrics, with the mean loss as ``evaluation_loss``: per sample, or per item where items are counted.

        Raises:
            ConfigurationError: without any dataset.
            DataError: if the dataset is empty.
        """
        self._refuse_within_a_run("evaluate", "Call `trainer.request_evaluation()` instead.")
        check_positive_count("per_device_batch_size", per_device_batch_size)
        check_run_arguments(dataloader_kwargs=dataloader_kwargs, collate_fn=collate_fn)
        self._check_parts()
        self._check_reduction(trains=False, evaluates=True)
        if dataset is None and self.eval_dataset is None:
            raise ConfigurationError(
                "`evaluate` was called without a dataset, and there was no evaluation dataset before that it could use "
                "again. Pass `dataset`."
            )
        if dataset is not None:
            if not self._overrides("create_eval_dataloader"):
                check_dataset(dataset)
            self.eval_dataset = dataset
        self.collate_fn = collate_fn if collate_fn is not None else self.collate_fn
        self._settings = TrainSettings(num_epochs=1, eval_per_device_batch_size=per_device_batch_size)
        self.run_history.reset()
        with self._running():
            self._seed_run()
            self._train_dataloader = None
            self._eval_dl_kwargs = dict(dataloader_kwargs or {})
            self._eval_dataloader = self.create_eval_dataloader(per_device_batch_size, dataloader_kwargs)
            self._prepare_model_optimizer_and_dataloaders()
            self.run_config = self._create_run_config(per_device_batch_size, None, 1, None, None)
            self._run_evaluation()
        return {name: self.run_history.get_latest_metric(name) for name in self.run_history.get_metric_names()}

    def predict(
        self,
        dataset: Any,
        per_device_batch_size: int = 8,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        output_path: str | Path | None = None,
    ) -> Any:
        """All predictions, in dataset order, each once, at any number of ranks. Must be called by all ranks.

        A loader with a sampler of its own decides itself which samples come in which order. Batches may have targets or
        not; see `calculate_predict_batch_outputs`. May be called from a callback.

        Args:
            dataset: what to predict for; an empty one gives an empty result.
            per_device_batch_size: samples of a batch on one rank.
            dataloader_kwargs: laid over the library's defaults for evaluation.
            collate_fn: makes a batch of samples; default: the last one given.
            output_path: a folder to write to as predictions come, so that memory stays flat.

        Returns:
            Nested tensors on the CPU, structured as the hook returned them; with `output_path` a `StoredPredictions`.

        Raises:
            ConfigurationError: if the loader shuffles, or leaves samples out with `drop_last`.
        """
        self._refuse_without_constructor()
        check_positive_count("per_device_batch_size", per_device_batch_size)
        check_run_arguments(dataloader_kwargs=dataloader_kwargs, collate_fn=collate_fn)
        self._check_parts()
        check_dataset(dataset)
        defaults = self._default_dl_kwargs(dataset, per_device_batch_size, shuffle=False)
        loader = build_loader(dataset, defaults, dataloader_kwargs, collate_fn or self.collate_fn)
        with self._running(), self._loader_of_pass(loader, dataloader_kwargs) as adapted:
            refuse_rearranged(adapted)
            return self._run_prediction(adapted, collect_predictions(self._ranks, output_path))

    def save_checkpoint(
        self,
        save_path: str | Path,
        checkpoint_kwargs: Mapping[str, Any] | None = None,
        save_optimizer: bool = True,
        save_per_node: bool = True,
        *,
        save_scheduler: bool = True,
    ) -> None:
        """Write model, optimizer and scheduler to one portable `.pt` file, whole or not at all.

        Args:
            save_path: of the file; its folder is made if needed.
            checkpoint_kwargs: further entries; plain values, containers and tensors.
            save_optimizer: whether to write ``optimizer_state_dict``.
            save_per_node: True: the first rank of each node writes; False: only the first of all.
            save_scheduler: whether to write ``scheduler_state_dict``, if there is a scheduler.

        Raises:
            CheckpointError: if an entry could not be read back without running code; the message names it.
            NonFiniteLossError: if a parameter is NaN or infinite; an existing file is left as it is.
        """
        model = self.get_model()
        self._check_finite()  # on every rank, so that all of them hear of it
        checkpoint: dict[str, Any] = {"model_state_dict": whole(canonical_state_dict(model))}
        if save_optimizer and self.optimizer is not None:
            checkpoint["optimizer_state_dict"] = whole(self.optimizer.state_dict())
        if not (self._ranks.is_first_of_node if save_per_node else self._ranks.is_first):
            return
        if save_scheduler and self.scheduler is not None:
            checkpoint["scheduler_state_dict"] = self.scheduler.state_dict()
        save_portable(save_path, {**checkpoint, **(checkpoint_kwargs or {})})

    def load_checkpoint(
        self, checkpoint_path: str | Path, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Take over what `save_checkpoint` wrote, on every rank that calls it. Nothing in the file is executed.

        Args:
            checkpoint_path: of the file.
            load_optimizer: take over the optimizer's state, if it is there.
            load_scheduler: take over the scheduler's state, if it is there and there is a scheduler.

        Returns:
            The whole checkpoint.

        Raises:
            MissingCheckpointError: a FileNotFoundError, if there is no such file.
            InvalidCheckpointError: if the file is damaged or belongs to another model or optimizer; nothing is changed
                then.
        """
        checkpoint = load_portable(checkpoint_path)
        if "model_state_dict" not in checkpoint:
            raise InvalidCheckpointError(
                f"{checkpoint_path} has no 'model_state_dict', only {', '.join(map(repr, checkpoint)) or 'nothing'}. "
                "Load a file that `save_checkpoint` wrote."
            )
        optimizer_state = (
            checkpoint.get("optimizer_state_dict") if load_optimizer and self.optimizer is not None else None
        )
        scheduler_state = (
            checkpoint.get("scheduler_state_dict") if load_scheduler and self.scheduler is not None else None
        )
        check_canonical(self.get_model(), checkpoint["model_state_dict"])
        if optimizer_state is not None:
            check_optimizer_state(self.optimizer, optimizer_state, source=checkpoint_path)
        others = []
        if scheduler_state is not None:
            check_same_kind(self.scheduler, scheduler_state, source=checkpoint_path)
            others = [(type(self.scheduler).__name__, self.scheduler, scheduler_state)]
        load_model = functools.partial(load_canonical, self.get_model(), checkpoint["model_state_dict"])
        with all_or_nothing() as undo:
            load_states(load_model, self.optimizer, optimizer_state, others, undo, source=checkpoint_path)
        return checkpoint

    def save_training_state(
        self,
        output_dir: str | Path,
        checkpoint_kwargs: Mapping[str, Any] | None = None,
        *,
        background: bool = False,
    ) -> None:
        """Write everything this run is to a folder that appears whole or not at all. Must be called by all ranks.

        Within an update, or while callbacks of an event are still due, it is written right after.

        Args:
            output_dir: the folder of this state.
            checkpoint_kwargs: further entries, returned by `load_training_state`.
            background: within a run, wait only for a copy in host memory, as large as the state, and write that while
                the run goes on. It is complete before the next one is begun and before `on_training_run_end`; what
                goes wrong until then is raised in between. Outside of a run it is written at once.
        """
        request = (Path(output_dir), dict(checkpoint_kwargs or {}), background)
        if self._is_running and self._defers_saves:
            self._requested_states.append(request)
        else:
            self._write_training_state(*request)

    def load_training_state(self, input_dir: str | Path) -> dict[str, Any]:
        """Take over a folder that `save_training_state` wrote, or the newest of several. Must be called by all ranks.

        Use ``train(resume_from=...)`` to continue a run.

        Returns:
            The `checkpoint_kwargs` of the save, and ``current_epoch``.
        """
        agree_on_resuming(input_dir, self._ranks)
        state = self._find_state(input_dir)
        if state is None:
            raise InvalidCheckpointError(f"There is no training state in {input_dir}. Check the path.")
        return load_run(self, state)

    def gather(self, tensor: Any, padding_value: float | None = None) -> Any:
        """Tensors of all ranks, concatenated on their first dimension. Must be called by all ranks with a batch.

        In the hooks and events of a batch it works for any size of the dataset: a rank without a batch in this round
        answers with no rows.

        Args:
            tensor: a tensor, or a nested tuple, list or dict of tensors; first dimensions may differ between ranks.
            padding_value: fills up other dimensions where they differ. Rows of the result that consist of nothing else
                are left out, also on one process: scripts mark "nothing here" by such a row.

        Returns:
            The same structure, with the rows of all ranks; a 0-dim tensor counts as one row.
        """
        rows = self._gather_rows(tensor, padding_value)
        if padding_value is None:
            return rows
        return map_tensors(lambda of_all_ranks: remove_padding(of_all_ranks, padding_value), rows)

    def _gather_rows(self, tensor: Any, padding_value: float | None) -> Any:
        """`gather`, with the rows that consist of padding."""
        if self._round_has_empty_rank:
            self._ranks.announce_gather(tensor, padding_value)
        elif self._gathers_no_rows:
            tensor = map_tensors(without_rows, tensor)
        return self._ranks.gather(tensor, padding_value)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on the first process of each node."""
        if self._ranks.is_first_of_node:
            with above_bars():
                print(*args, **{"flush": True, **kwargs})

    @property
    def device(self) -> torch.device:
        """Where batches and the model go."""
        return self._ranks.device

    def get_model(self, keep_torch_compile: bool = True) -> Any:
        """The bare module, without what training wraps around it.

        Args:
            keep_torch_compile: False to take off what the user's own `torch.compile(model)` put around it.
        """
        model = self.model
        while isinstance(model, DistributedDataParallel) or is_engine(model):
            model = model.module
        return model if keep_torch_compile else getattr(model, "_orig_mod", model)

    def request_evaluation(self) -> None:
        """Ask for an evaluation as soon as possible, recorded as ``intermediate_eval_loss``.

        That is when the current update is finished, or after the current event, with all its callbacks. For callbacks,
        during training; every rank must ask.
        """
        self._evaluation_requested = True

    def invalidate_captured_step(self) -> None:
        """Have what ``compile_step`` captured captured anew, some updates later.

        Needed after a change that cannot be seen from outside: a tensor or number that a hook uses was replaced, say.
        What modules, parameters and optimizer are, and loaded states, are looked after.
        """
        if self._captured_step is not None:
            self._captured_step.invalidate("something by `invalidate_captured_step`")

    def explain(self, num_epochs: int = 1, evaluate: bool = True) -> str:
        """The order of hooks and events of a run as text, with the callbacks that really act at each event."""
        return explain_run(
            type(self), self.callback_handler, self.custom_events, num_epochs=num_epochs, evaluate=evaluate
        )

    def preflight(
        self, train_dataset: Any, num_epochs: int | None, eval_dataset: Any = None, **train_arguments: Any
    ) -> PreflightReport:
        """Rehearse a run before it is started: one update, one evaluated batch, metric names, save, reload, disk space.

        Takes the arguments of `train`. Callbacks that print or write files are left out. Afterwards everything that
        the trainer can see is as before. Must be called by all ranks.

        Returns:
            What was found; print it.

        Raises:
            Whatever the run would have raised: better now than after the first epoch.
        """
        self._refuse_within_a_run("preflight", "Call it before `train`.")
        arguments = {"train_dataset": train_dataset, "num_epochs": num_epochs, "eval_dataset": eval_dataset}
        return rehearse(self, {**arguments, **train_arguments})

    # ---------------------------------------------------------------------------------------------------------- saving

    def _write_training_state(self, output_dir: Path, extra: dict[str, Any], background: bool) -> None:
        self._check_finite()
        background = background and self._is_running
        self._saves_in_background |= background
        save_run(self, output_dir, extra, self._state_writer if background else None)

    def _check_finite(self) -> None:
        """Refuse to save a model that is not finite. Of a sharded one each rank sees its part: all must call it."""
        model = self.get_model()
        if has_shards(model):
            self._ranks.do_on_all(lambda: check_finite(model.named_parameters()))
        else:
            check_finite(model.named_parameters())

    def _ranks_of_writer(self) -> Ranks:
        """The ranks on a channel for threads that write. Must be called by all ranks."""
        return Ranks(self._accelerator, channel="writer", timeout=limit_of_waiting(self.timeout))

    def _find_state(self, source: str | Path) -> Path | None:
        """The training state that `source` is or holds, the same for all ranks."""
        return self._ranks.do_on_first(lambda: find_state(source))


class TrainerWithTimmScheduler(Trainer):
    """A `Trainer` for timm's schedulers, which are told the number of updates and epochs.

    Attributes:
        num_updates: applied updates of this run, as last told to the scheduler.
    """

    num_updates = 0

    def scheduler_step(self) -> None:
        """Tell the scheduler how many updates there have been."""
        self.num_updates = self.run_state.applied_updates + 1  # the current one is counted right after
        if self.scheduler is not None:
            self.scheduler.step_update(num_updates=self.num_updates)

    def _step_scheduler_after_epoch(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step(self.run_state.epochs + 1)
