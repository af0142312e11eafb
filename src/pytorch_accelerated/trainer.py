"""`Trainer`: what users call, and the order of a run.

The order is near the end, in `_run_training`, `_run_epoch`, `_run_train_epoch` and `_run_eval_epoch`: begin there.
`loop/hooks.py` has the methods that a subclass may override, `loop/context.py` what one call works with, and
`loop/step.py` the computation of an update. `docs/events.md` has the order of hooks and events for every way a run
can end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.defaults import DEFAULT_CALLBACKS, chosen_callbacks
from pytorch_accelerated.facts.names import Replaceable, knows_other_names, refuse_method_of_others
from pytorch_accelerated.facts.order import explain_run
from pytorch_accelerated.facts.placeholders import TrainerPlaceholderValues, replace_trainer_placeholder_values
from pytorch_accelerated.facts.run_state import RunPhase
from pytorch_accelerated.facts.settings import TrainSettings, check_parts, check_positive_count
from pytorch_accelerated.loop import checks, preparing
from pytorch_accelerated.loop.context import Context
from pytorch_accelerated.loop.evaluation import Evaluation, gather_rows, predict_rows
from pytorch_accelerated.loop.guarded import RollBack
from pytorch_accelerated.loop.starting import at_work, ending
from pytorch_accelerated.loop.tools import TrainerTools
from pytorch_accelerated.loop.training import Training
from pytorch_accelerated.ranks.wrappers import bare_model
from pytorch_accelerated.record.history import RunHistory
from pytorch_accelerated.record.values import hyperparameters_of
from pytorch_accelerated.states.loading import load_checkpoint

__all__ = [
    "DEFAULT_CALLBACKS",
    "Trainer",
    "TrainerPlaceholderValues",
    "TrainerWithTimmScheduler",
    "replace_trainer_placeholder_values",
]


class Trainer(TrainerTools):
    """Trains and evaluates any PyTorch model, predicts with it, and saves it.

    ::

        trainer = Trainer(model, loss_func=nn.CrossEntropyLoss(), optimizer=optimizer)
        trainer.train(train_dataset, num_epochs=3, eval_dataset=eval_dataset, per_device_batch_size=32)

    A subclass may override every hook (`loop/hooks.py` has them). Those whose names begin with `create`, `calculate`,
    `count` or `get` return a value, the others change state. A run calls them, and then the callbacks' events, in the
    order that `explain` shows. A callback may replace a hook within a run; those whose names begin with `_`, only
    before it.

    The constructor stores its arguments; their types and values are checked when a run starts. A subclass may use the
    names of the keyword-only ones, `current_run` and `is_last_epoch` for something else: the trainer does not read
    them.

    Args:
        model: any module. It is the bare module before and after a run; during training it may be wrapped.
        loss_func: a function of the model's outputs and the targets that returns the mean over the batch. For dict
            batches, a function of the outputs and the whole batch, or None if the model returns its own loss.
        optimizer: an optimizer of the model's parameters; or several, in a list or a dict by name, each for its own
            parameters, which make one update together, as `Optimizers`. None if a subclass has optimizers of its own,
            and overrides `optimizer_step` and `optimizer_zero_grad`.
        callbacks: `TrainerCallback` classes or instances; events are fired in this order. ``...`` among them stands for
            the default ones: ``callbacks=[..., EarlyStoppingCallback(3)]``.
        run_history: where metrics are recorded; default `InMemoryRunHistory`.
        metrics: what to measure, such as ``["accuracy", "f1"]``: short for a `MetricsCallback` of these, in front.
        seed: the seed of everything random in training runs: order of samples, augmentations, dropout. None: derived
            from the state of torch's generator when a run starts, without changing it.
        mixed_precision: "no", "fp16" (not on the CPU), "bf16" or "fp8"; None: as accelerate is configured.
        compile_model: compile the model in place when a run starts; a dict holds arguments for `torch.compile`, and
            optionally ``"regional": True`` to compile repeated blocks instead of the whole model. With
            ``{"mode": "reduce-overhead"}`` torch uses CUDA graphs.
        accelerator: an `accelerate.Accelerator`, or a function that returns one. It must not accumulate gradients
            itself.
        inference_mode: evaluate and predict in `torch.inference_mode` instead of `torch.no_grad`: a little faster, but
            a module that keeps a tensor from an evaluation, such as a cache, then fails in training.
        timeout: seconds that a process waits for the others before it gives up with a `LostPeerError`; it must be
            longer than anything that one process does alone, such as a save. None: torch's limit, half an hour with
            gloo and ten minutes with NCCL.
        lanes: train to the same bits on any number of processes up to this one. An update has `per_device_batch_size`
            rows for each lane, whatever the number of processes; these share the lanes, and add up what the lanes
            compute in one fixed order. A run may be resumed on another number. Everything that draws, such as
            dropout, is seeded for each batch of a lane; buffers such as BatchNorm's become the mean of the lanes'.
            Not for streams, sharded models, and optimizers that step within a batch. None: a batch for each process.
    """

    def __repr__(self) -> str:
        """Model, loss function, optimizer, callbacks, and how far it has trained: a line for each."""
        known = hyperparameters_of(bare_model(self.model), self.optimizer)
        trained = f"{known['model.trainable_parameters']:,} of {known['model.parameters']:,} parameters trained"
        numbers = [f"{name} {known[key]}" for name in ("lr", "weight_decay") if (key := f"optimizer.{name}") in known]
        loss = getattr(self.loss_func, "func", self.loss_func)  # of a `functools.partial`
        facts = {
            "loss function": "the model's own" if loss is None else getattr(loss, "__name__", type(loss).__name__),
            "optimizer": ", ".join([str(known["optimizer"]).rpartition(".")[2], *numbers]),
            "callbacks": ", ".join(type(each).__name__ for each in self.callback_handler) or "none",
            "history": repr(self.run_history).partition("(")[2].removesuffix(")"),
        }
        head = f"{type(self).__name__} of {type(bare_model(self.model)).__name__}, {trained}, on {self.device}"
        return "\n".join([head, *(f"  {f'{name}:':<14} {value}" for name, value in facts.items())])

    if not TYPE_CHECKING:  # to a type checker it would mean that every name is there

        def __getattr__(self, name: str) -> Any:
            """An error that says what a method of other libraries, such as `fit`, is called here."""
            refuse_method_of_others(self, name)
            return super().__getattribute__(name)  # raises the original error, also one from inside a property

    # ------------------------------------------------------------------------------------------------ what users call

    @knows_other_names
    def train(
        self,
        train_dataset: Any,
        num_epochs: int | None,
        eval_dataset: Any = None,
        per_device_batch_size: int = 8,
        max_num_train_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_clip_value: float | None = None,
        create_scheduler_fn: Callable[..., Any] | Mapping[str, Any] | Sequence[Any] | None = None,
        train_dataloader_kwargs: Mapping[str, Any] | None = None,
        eval_dataloader_kwargs: Mapping[str, Any] | None = None,
        reset_run_history: bool = True,
        collate_fn: Callable[..., Any] | None = None,
        resume_from: str | Path | None = None,
        *,
        must_resume: bool = False,
        gradient_clip_norm: float | Mapping[str, float | None] | Sequence[float | None] | None = None,
        max_duration: float | str | None = None,
        eval_per_device_batch_size: int | None = None,
        step_scheduler: str = "update",
        scheduler_metric: str = "eval_loss_epoch",
        nonfinite_policy: str | None = None,
        max_skipped_updates: int = 10,
        overfit_batches: int | None = None,
        record_every_n_steps: int | None = None,
        detect_anomaly: bool = False,
        leave_out: Mapping[str, Sequence[int]] | None = None,
        max_samples: int | None = None,
        max_tokens: int | None = None,
    ) -> RunHistory:
        """Train, and evaluate after each epoch if there is an evaluation set. Must be called by all ranks.

        Datasets may be map-style or iterable, with or without a length; tensors or arrays, or tuples and dicts of them;
        or ready `DataLoader` objects.

        Few of them are needed; they come in groups:

        - Data: `train_dataset`, `eval_dataset`, `per_device_batch_size`, `eval_per_device_batch_size`, `collate_fn`,
          `train_dataloader_kwargs`, `eval_dataloader_kwargs`, `leave_out`, `overfit_batches`
        - Length: `num_epochs`, `max_num_train_steps`, `max_samples`, `max_tokens`, `max_duration`
        - Updates: `gradient_accumulation_steps`, `gradient_clip_norm`, `gradient_clip_value`, `create_scheduler_fn`,
          `step_scheduler`, `scheduler_metric`
        - Resuming: `resume_from`, `must_resume`, `reset_run_history`
        - Mistakes: `nonfinite_policy`, `max_skipped_updates`, `detect_anomaly`
        - Recording: `record_every_n_steps`

        Args:
            train_dataset: the training data.
            eval_dataset: the evaluation data; or multiple sets in a dict by name, which are evaluated one after the
                other. Their metrics have the name in theirs: ``eval_<name>_loss_epoch``. The loss of the first set is
                also recorded as ``eval_loss_epoch``, on which callbacks and schedules go by default. A dict with
                tensors, arrays or dicts as values is one set in columns.
            per_device_batch_size: samples of a batch on one rank.
            eval_per_device_batch_size: default: `per_device_batch_size`.
            collate_fn: combines samples into a batch, for both datasets.
            train_dataloader_kwargs: override the defaults of `get_default_train_dl_kwargs`. ``num_workers=0`` says that
                no row may be fetched ahead, for a dataset that depends on the run. ``is_sharded=True`` says that an
                iterable dataset itself gives each rank different samples. A `generator`, here or in your own
                loader or sampler, determines the order of samples instead of the trainer's `seed`.
            eval_dataloader_kwargs: the same for evaluation.
            leave_out: training data to pass over: ``{"rows": [...]}``, indices in the dataset that no update uses any
                more, ``{"updates": [...]}``, updates whose samples are passed over, or both. With `resume_from` from
                that state on. The run equals one whose order never had them. Later states keep it.
            overfit_batches: train on the first batches of each rank only, the same ones in every epoch, in the order of
                the dataset, and evaluate on them instead of `eval_dataset`: a model that cannot learn these by heart
                has a bug. Schedules follow the short epochs; augmentations stay random.
            num_epochs: passes over the training data; None if `max_num_train_steps`, `max_samples` or `max_tokens` is
                given, which override it. Of these three, one may be given.
            max_num_train_steps: optimizer updates after which the run ends.
            max_samples: samples over all ranks, after which the run ends: with the update that reaches the number.
                Schedules know how many updates that takes, unless the data is a stream. Batches of a stream whose size
                is unknown count as one.
            max_tokens: the same for what `count_batch_items` counts, which must be overridden. How many updates that
                takes is not known beforehand, so a schedule needs numbers instead of placeholders for the length.
            max_duration: seconds, or "HH:MM:SS", after which the run stops at the end of an update. They count from the
                end of the first update of this call: starting workers and compiling take none of them.
            gradient_accumulation_steps: batches of a rank per update. The update equals the update of one large batch.
            gradient_clip_norm: limit of the gradient's global norm, which is recorded as ``gradient_norm``; or a limit
                for each of several optimizers, by name or in order.
            gradient_clip_value: limit each entry of the gradient to [-value, value], once per update.
            create_scheduler_fn: creates the scheduler from the optimizer; or a function for each of several optimizers,
                as these are given. A `functools.partial` may hold `TrainerPlaceholderValues`.
            step_scheduler: step the scheduler per "update" or per "epoch". `ReduceLROnPlateau` always steps after
                evaluation.
            scheduler_metric: the metric that a `ReduceLROnPlateau` watches.
            resume_from: a training state, or a folder of them, to resume from until `num_epochs` in total. From a
                folder, the newest complete state is used; a folder without any starts a new run, a state that does not
                exist (``.../final``) is an error. A URL such as ``"s3://bucket/run"`` works as well: one rank of each
                machine downloads the state, unless the local folder of `SaveTrainingStateCallback` has a newer one.
            must_resume: True: a folder without any training state is an error, too, instead of a new run.
            reset_run_history: False to continue the epoch numbers and keep the metrics of earlier runs.
            nonfinite_policy: what to do with an update whose loss or gradient is NaN or infinite. None: apply it;
                callbacks are told about the loss, and `TerminateOnNaNCallback` ends the run. "skip": skip the update.
                "rollback": go back to the newest training state of this run, and continue without the update. To check,
                the run waits for the device once per update.
            max_skipped_updates: the number of updates in a row that `nonfinite_policy` may skip.
            detect_anomaly: look for NaN in every backward pass with `torch.autograd.set_detect_anomaly`. The first one
                is an error; a warning of torch's shows the line of the forward pass. Much slower: for finding a
                mistake.
            record_every_n_steps: optimizer updates of an epoch between two entries of `RunHistory.step_records`. None:
                1 in runs of up to 255 updates, 4 from 512 on, and from 8,192 on as many as give a run between 1,024
                and 2,047 records, besides those at the ends of epochs. If the number of updates is unknown, the
                distance grows with those that are done. Losses and weights do not depend on it.

        Returns:
            A copy of the run history, which a later `evaluate` does not change.

        Raises:
            ArgumentTypeError, ConfigurationError, DataError: for invalid input, before any work is done.
            NonFiniteLossError: if `TerminateOnNaNCallback` saw a loss that is NaN or infinite, or more updates in a row
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
            overfit_batches=overfit_batches,
            record_every_n_steps=record_every_n_steps,
            detect_anomaly=detect_anomaly,
            leave_out=leave_out,
            max_samples=max_samples,
            max_tokens=max_tokens,
        )
        if overfit_batches is not None:
            eval_dataset = train_dataset
        # All arguments are checked before anything changes, so that a wrong one costs nothing.
        checks.check_training(
            self.run_context,
            settings,
            train_dataset,
            eval_dataset,
            create_scheduler_fn,
            resumes=resume_from is not None,
        )
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.collate_fn = collate_fn
        self.create_scheduler_fn = create_scheduler_fn
        with self._during_run(settings) as context:
            arguments = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "collate_fn": collate_fn}
            arguments |= {
                "train_dataloader_kwargs": train_dataloader_kwargs,
                "create_scheduler_fn": create_scheduler_fn,
            }
            context.asked.last_training = settings, {**arguments, "eval_dataloader_kwargs": eval_dataloader_kwargs}
            training = context.control.training = self._create_training(context)
            state = context.control.states.find(resume_from, must_exist=must_resume)
            preparing.prepare_training(
                context, train_dataloader_kwargs, eval_dataloader_kwargs, state, resets_history=reset_run_history
            )
            if state is not None:
                self.print(training.describe_resumption())
            self._run_training()
        return self.run_history.copy()

    @knows_other_names
    def evaluate(
        self,
        dataset: Any = None,
        per_device_batch_size: int = 8,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        *,
        reset_run_history: bool = True,
    ) -> dict[str, Any]:
        """Evaluate once; the run history is reset and holds the metrics. Must be called by all ranks.

        Args:
            dataset: the data, or multiple sets by name, as in `train`; default: the last evaluation dataset.
            per_device_batch_size: samples of a batch on one rank.
            dataloader_kwargs: override the defaults of `get_default_eval_dl_kwargs`.
            collate_fn: combines samples into a batch; default: the last one given.
            reset_run_history: False to add the metrics to the last training's, for the same epoch and update.

        Returns:
            The metrics of this evaluation, by the names that they have in training: ``eval_loss_epoch`` is the mean
            loss per sample, or per item if items are counted. Of multiple sets, each has an
            ``eval_<name>_loss_epoch``, and ``eval_loss_epoch`` is the first set's. Losses are also there as
            ``evaluation_loss`` and ``evaluation_<name>_loss``, their names in the run history.

        Raises:
            ConfigurationError: without any dataset.
            DataError: if the dataset is empty.
        """
        self._refuse_within_a_run("evaluate", "Call `trainer.request_evaluation()` instead.")
        check_positive_count("per_device_batch_size", per_device_batch_size)
        checks.check_evaluation(self, dataset)
        self.eval_dataset = dataset if dataset is not None else self.eval_dataset
        self.collate_fn = collate_fn if collate_fn is not None else self.collate_fn
        settings = TrainSettings(num_epochs=1, eval_per_device_batch_size=per_device_batch_size)
        if reset_run_history:
            self.run_history.reset()
        records_before = len(self.run_history.records)
        with self._during_run(settings) as context:
            preparing.prepare_evaluation(context, per_device_batch_size, dataloader_kwargs)
            self._run_evaluation()
        new_names = {record.name for record in self.run_history.records[records_before:]}
        metrics = {
            name: self.run_history.get_latest_metric(name)
            for name in self.run_history.get_metric_names()
            if reset_run_history or name in new_names
        }
        losses = [name for name in metrics if name.startswith("evaluation_") and name.endswith("loss")]
        return metrics | {f"{name.replace('evaluation', 'eval', 1)}_epoch": metrics[name] for name in losses}

    @knows_other_names
    def predict(
        self,
        dataset: Any,
        per_device_batch_size: int = 8,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        output_path: str | Path | None = None,
    ) -> Any:
        """All predictions, each once and in dataset order, on any number of ranks. Must be called by all ranks.

        A loader with its own sampler determines which samples come in which order. Batches may have targets or not; see
        `calculate_predict_batch_outputs`. May be called from a callback.

        Args:
            dataset: the data; an empty dataset gives an empty result.
            per_device_batch_size: samples of a batch on one rank.
            dataloader_kwargs: override the library's defaults for evaluation.
            collate_fn: combines samples into a batch; default: the last one given.
            output_path: a folder to write predictions to as they are computed, so that memory use stays constant.

        Returns:
            Nested tensors on the CPU, structured as the hook returned them; a list with one result per sample, if the
                hook returns such lists; with `output_path` a `StoredPredictions`.

        Raises:
            ConfigurationError: if the loader shuffles, or drops samples with `drop_last`.
        """
        check_positive_count("per_device_batch_size", per_device_batch_size)
        check_parts(self.model, self.loss_func)
        loader = preparing.prediction_loader(
            dataset, per_device_batch_size, dataloader_kwargs, collate_fn or self.collate_fn
        )
        with (
            self._during_run(TrainSettings(num_epochs=1)) as context,
            preparing.loader_of_pass(context, loader, dataloader_kwargs) as adapted,
        ):
            return predict_rows(context, adapted, output_path)

    def save_checkpoint(
        self,
        save_path: str | Path,
        checkpoint_kwargs: Mapping[str, Any] | None = None,
        save_optimizer: bool = True,
        save_per_node: bool = True,
        *,
        save_scheduler: bool = True,
    ) -> None:
        """Write model, optimizer and scheduler to one portable `.pt` file, completely or not at all. Must be called by
        all ranks; when it returns, all can load the file.

        What DeepSpeed has cut up is gathered tensor by tensor: the first rank of each node needs host memory for all of
        the file, and each device memory for the largest tensor.

        Args:
            save_path: the path of the file; its folder is created if needed.
            checkpoint_kwargs: further entries; plain values, containers and tensors.
            save_optimizer: whether to write ``optimizer_state_dict``.
            save_per_node: True: the first rank of each node writes; False: only the first of all.
            save_scheduler: whether to write ``scheduler_state_dict``, if there is a scheduler.

        Raises:
            CheckpointError: if an entry could not be read back without running code; the message names it.
            NonFiniteLossError: if a parameter is NaN or infinite; an existing file is left as it is.
        """
        parts = self.run_context.parts
        self.run_context.control.states.write_file(
            save_path,
            self.get_model(),
            parts.optimizer if save_optimizer else None,
            parts.scheduler if save_scheduler else None,
            checkpoint_kwargs or {},
            per_node=save_per_node,
        )

    def load_checkpoint(
        self, checkpoint_path: str | Path, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Load a file written by `save_checkpoint`, on every rank that calls it. Nothing in the file is executed.

        Args:
            checkpoint_path: the path of the file.
            load_optimizer: load the optimizer's state, if there is one.
            load_scheduler: load the scheduler's state, if there is one and the trainer has a scheduler.

        Returns:
            The whole checkpoint.

        Raises:
            MissingCheckpointError: a FileNotFoundError, if there is no such file.
            InvalidCheckpointError: if the file is damaged or belongs to another model or optimizer; then nothing is
                changed.
        """
        context = self.run_context
        scheduler = context.parts.scheduler if load_scheduler else None
        return load_checkpoint(
            checkpoint_path, self.get_model(), context.parts.optimizer, scheduler, loads_optimizer=load_optimizer
        )

    def save_training_state(
        self, output_dir: str | Path, checkpoint_kwargs: Mapping[str, Any] | None = None, *, background: bool = False
    ) -> None:
        """Write the complete state of this run to a folder, which appears whole or not at all. Must be called by all
        ranks.

        Within an update, or before all callbacks of an event have been called, it is written right afterwards.

        Args:
            output_dir: the folder of this state.
            checkpoint_kwargs: further entries, returned by `load_training_state`.
            background: within a run, wait only for a copy in host memory, as large as the state, and write it while the
                run continues. It is complete before the next one starts and before `on_training_run_end`; errors until
                then are raised in between. Outside of a run it is written at once.
        """
        context, folder, extra = self.run_context, Path(output_dir).absolute(), dict(checkpoint_kwargs or {})
        training, is_at_work = context.control.training, context.control.is_at_work
        if is_at_work and training is not None and training.requests.defers_saves:
            training.requests.states.append((folder, extra, background))
        else:
            context.control.states.write(folder, extra, background and is_at_work)

    def load_training_state(self, input_dir: str | Path) -> dict[str, Any]:
        """Load a folder written by `save_training_state`, or the newest of several. Must be called by all ranks.

        Use ``train(resume_from=...)`` to continue a run.

        Returns:
            The `checkpoint_kwargs` of the save, and ``current_epoch``.
        """
        context = self.run_context
        state = context.control.states.find(input_dir, must_exist=True)
        return context.control.states.load(state, restores_position=context.control.is_at_work)

    def gather(self, tensor: Any, padding_value: float | None = None) -> Any:
        """Tensors of all ranks, concatenated on their first dimension. Must be called by all ranks with a batch.

        In the hooks and events of a batch it works for any size of the dataset: a rank without a batch in this round
        contributes no rows.

        Args:
            tensor: a tensor, or a nested tuple, list or dict of tensors; first dimensions may differ between ranks.
            padding_value: pads other dimensions that differ. Rows of the result that contain nothing else are removed,
                also on one process: scripts mark "nothing here" by such a row.

        Returns:
            The same structure, with the rows of all ranks; a 0-dim tensor counts as one row.
        """
        return gather_rows(self.run_context.parts, tensor, padding_value)

    @property
    def device(self) -> torch.device:
        """The device of batches and the model."""
        return self._ranks.device

    def get_model(self, keep_torch_compile: bool = True) -> Any:
        """The bare module, without wrappers that training needs.

        Args:
            keep_torch_compile: False to also remove the wrapper of the user's own `torch.compile(model)`.
        """
        return bare_model(self.model, keeps_compiled=keep_torch_compile)

    def request_evaluation(self) -> None:
        """Request an evaluation as soon as possible, recorded as ``intermediate_eval_loss``.

        It happens when the current update is finished, or after the current event with all its callbacks. For
        callbacks, during training; every rank must request it.
        """
        if self.run_context.control.training is not None:
            self.run_context.control.training.requests.evaluation = True

    def explain(self, num_epochs: int = 1, evaluate: bool = True) -> str:
        """The order of hooks and events of a run as text, with the callbacks that handle each event."""
        return explain_run(
            type(self), self.callback_handler, self.custom_events, num_epochs=num_epochs, evaluate=evaluate
        )

    @Replaceable
    def current_run(self) -> Context:
        """What the current call of `train`, `evaluate` or `predict` works with, or the last one did."""
        return self.run_context

    @Replaceable
    def is_last_epoch(self) -> bool:
        """Whether, as far as is known, the training run ends with the current epoch."""
        return self.run_context.is_last_epoch

    # --------------------------------------------------------------------------------------------- the order of a run

    def _run_training(self) -> None:
        """Run epoch after epoch, until the run is complete or something stops it."""
        training = self.run_context.control.training
        # A callback may ask for a save at any event. It is written at the next safe point, where weights, optimizer,
        # counters and the position in the data belong to the same update.
        training.requests.defers_saves = True
        # The last hook and event come when the run is complete or was stopped, not after an exception.
        with ending(training.context, self.training_run_end, "on_training_run_end"):
            training.start_part(self.training_run_start, "on_training_run_start")
            while not training.is_complete:
                # A resumed run may begin in the middle of an epoch, or between its training and its evaluation: the
                # phase says which parts are left, and `_run_epoch` runs only these.
                if self.run_state.phase is RunPhase.EPOCH_CLOSED:
                    self.run_state.start_epoch()
                try:
                    self._run_epoch(training)
                except RollBack as request:  # on all ranks: an update was not finite, and the run continues without it
                    training.go_back_to(request.state)

    def _run_epoch(self, training: Training) -> None:
        """One epoch and its evaluation; after a resume, their remaining parts."""
        parts, control, state = self.run_context.parts, self.run_context.control, self.run_state
        # `close_part` notes in the phase that a part is over, and only then serves requests: a state that is saved
        # there resumes with the next part.
        if state.phase is RunPhase.TRAINING:
            training.set_epoch()
            self._run_train_epoch(parts.loaders.train)
            training.close_part(RunPhase.TRAINING_EPOCH_CLOSED)
        if state.phase is RunPhase.TRAINING_EPOCH_CLOSED:
            if parts.loaders.eval is not None:
                training.evaluate()
            # If the epoch ended early, the resumed run steps the scheduler, once the epoch is complete.
            if control.states.early_end is None:
                self._step_scheduler_after_epoch()
            training.close_part(RunPhase.EVALUATED)
        control.emitter.announce(self.training_run_epoch_end, "on_training_run_epoch_end")
        state.finish_epoch()
        self.run_history._increment_epoch()
        training.close_part(RunPhase.EPOCH_CLOSED)

    def _run_train_epoch(self, train_dl: Any) -> None:
        """One pass over the training data, or over the rest of it."""
        parts, control, training = self.run_context.parts, self.run_context.control, self.run_context.control.training
        training.begin_pass()
        self.model.train()
        parts.mode.train()  # optimizers such as schedulefree's train and evaluate with different weights
        # Deferring is for loops of the user's own; `_run_training` does it for the whole run.
        with training.requests.deferring_saves(), training.watching_for_anomalies():
            training.start_part(self.train_epoch_start, "on_train_epoch_start")
            training.start_epoch()
            # Accumulation is part of the data: each batch knows its share of the update, and whether it is the last.
            for batch in training.batches(train_dl):
                training.step.add(batch)
                if batch.is_last:
                    training.step.apply()
                    # Between two updates every rank is at the same place. While batches are left, losses are read,
                    # states are written, and the ranks agree to stop only here.
                    training.act_at_safe_point()
            training.finish_epoch(train_dl)
            control.emitter.call(self.train_epoch_end)
            self._add_epoch_loss_to_run_history("train_loss_epoch")
            training.step.record(self.run_history)
            control.emitter.emit("on_train_epoch_end")
            # For loops of the user's own, too: the states that wait are written when this block ends.
            self.run_state.phase = RunPhase.TRAINING_EPOCH_CLOSED

    def _run_eval_epoch(self, valid_dl: Any, is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate every sample once and record the mean loss.

        Args:
            valid_dl: yields batches.
            is_training: whether this belongs to a training run.
            is_intermediate: whether this happens inside a training epoch.
        """
        reports, control = self.run_context.parts.reports, self.run_context.control
        metric_name = "evaluation_loss"
        if is_training:
            metric_name = "intermediate_eval_loss" if is_intermediate else "eval_loss_epoch"
        evaluation = Evaluation(self.run_context)
        # Within a training epoch, the modules go back to the modes that they had; else the next pass sets them.
        with evaluation.going_on(restores_modes=is_intermediate):
            control.emitter.announce(self.eval_epoch_start, "on_eval_epoch_start", is_intermediate=is_intermediate)
            control.stopping.stop_if_asked()
            evaluation.run(valid_dl, self._update_loss_tracker)
            reports.report_non_finite(reports.losses, metric_name)
            control.emitter.call(self.eval_epoch_end)
            self._add_epoch_loss_to_run_history(metric_name)
            control.emitter.emit("on_eval_epoch_end", is_intermediate=is_intermediate)

    def _add_epoch_loss_to_run_history(self, metric_name: str) -> None:
        """Record the mean loss per item over all ranks, and start a new mean."""
        reports = self.run_context.parts.reports
        reports.record_mean(reports.losses, metric_name)

    def _step_scheduler_after_epoch(self) -> None:
        """Step schedulers that count epochs, or watch a metric."""
        self.run_context.control.training.step_scheduler_after_epoch()

    def _run_evaluation(self) -> None:
        """The run of `evaluate`."""
        control = self.run_context.control
        with ending(self.run_context, self.evaluation_run_end, "on_evaluation_run_end"):
            control.emitter.announce(self.evaluation_run_start, "on_evaluation_run_start")
            control.stopping.stop_if_asked()
            control.evaluation_sets.evaluate(is_training=False)
            control.stopping.stop_if_asked()

    # ---------------------------------------------------------------------------------------------------- making a run

    @contextlib.contextmanager
    def _during_run(self, settings: TrainSettings) -> Iterator[Context]:
        """A context for a call with `settings`; within a run, the run's."""
        if self.run_context.control.is_at_work:
            # A pass of a callback's own uses what the run has prepared. No resumed run would repeat it, so a request to
            # stop waits for its end.
            with self.run_context.control.stopping.finishing_passes():
                yield self.run_context
            return
        if str(self._accelerator.mixed_precision) != self._precision_at_start:
            # accelerate has one precision per process, and another trainer has changed it.
            self._accelerator = self._create_accelerator()
        self.run_context = self._create_context(settings)
        with at_work(self.run_context) as context:
            yield context

    def _create_training(self, context: Context) -> Training:
        """What a run of `train` does between its updates."""
        return Training(context)

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Move the model to its device, wrap what must be wrapped, and distribute the loaders over the ranks."""
        context = self.run_context
        preparing.prepare_model(context, for_training=context.parts.loaders.train is not None)
        preparing.prepare_loaders(context)

    _create_run_config = preparing.create_run_config
    _choose_callbacks = staticmethod(chosen_callbacks)


class TrainerWithTimmScheduler(Trainer):
    """A `Trainer` for timm's schedulers, which it tells the number of updates and epochs.

    Attributes:
        num_updates: applied updates of this run, as last passed to the scheduler.
    """

    num_updates = 0

    def scheduler_step(self) -> None:
        """Pass the number of updates to the scheduler."""
        self.num_updates = self.run_state.applied_updates + 1  # the current one is counted right after
        if self.scheduler is not None:
            self.scheduler.step_update(num_updates=self.num_updates)

    def _step_scheduler_after_epoch(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step(self.run_state.epochs + 1)
