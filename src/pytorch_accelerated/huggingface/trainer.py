"""`Trainer` with the API of Hugging Face's: a translation onto the native loop.

The class has the methods that users call; `hooks.py` has most of those that they override. `engine/engine.py` is the
native trainer behind it and reports the events of a run to `engine/training.py`, which translates them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset

from pytorch_accelerated.data.counting import rows_left
from pytorch_accelerated.errors import ConfigurationError, MissingMethodError
from pytorch_accelerated.facts.names import knows_other_names
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.huggingface import evaluating, knowledge
from pytorch_accelerated.huggingface.arguments import parallel
from pytorch_accelerated.huggingface.arguments.fields import IntervalStrategy
from pytorch_accelerated.huggingface.checkpoints import saving, states
from pytorch_accelerated.huggingface.checkpoints.saving import TRAINER_STATE_NAME
from pytorch_accelerated.huggingface.engine import refusing
from pytorch_accelerated.huggingface.engine.engine import Engine
from pytorch_accelerated.huggingface.events import CallbackHandler, TrainerControl, exported_states, is_ours, new_state
from pytorch_accelerated.huggingface.hooks import TrainerHooks, loss_takes_labels
from pytorch_accelerated.huggingface.trainer_callback import (
    DEFAULT_CALLBACKS,
    PrinterCallback,
    ProgressCallback,
    reporting_callbacks,
)
from pytorch_accelerated.huggingface.trainer_utils import (
    EvalLoopOutput,
    PredictionOutput,
    TrainOutput,
    meter_memory,
    output_dir_of,
    rotate_checkpoints,
    speed_metrics,
)
from pytorch_accelerated.huggingface.training_args import TrainingArguments, logger
from pytorch_accelerated.prediction.padded import PADDING
from pytorch_accelerated.ranks.optimizers import as_one
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.states.publish import explained, write_whole

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["DEFAULT_CALLBACKS", "TRAINER_STATE_NAME", "Trainer"]  # scripts look for all of them here


class Trainer(TrainerHooks):
    """Trains, evaluates and predicts with a model that takes its inputs by name and returns its loss.

    ::

        trainer = Trainer(model, TrainingArguments("results"), train_dataset=rows, eval_dataset=other_rows)
        trainer.train()

    Args:
        model: a module whose forward takes the columns of a row by name; with labels, it returns its loss first, or as
            "loss".
        args: default: `TrainingArguments` with all defaults.
        data_collator: makes a batch, a dict, from rows; default: the method `pad` of the `processing_class`, if it has
            one, else `default_data_collator`.
        train_dataset: map-style or iterable, or one of `datasets`.
        eval_dataset: likewise, or a dict of several.
        processing_class: a tokenizer or the like, saved with the model; default for saving: the collator's
            ``tokenizer``. A training begins by giving its special tokens to the model's configuration.
        model_init: returns a new model for each call of `train`; instead of `model`.
        compute_loss_func: of ``(outputs, labels, num_items_in_batch=...)``, instead of the model's own loss. The number
            counts the labels other than -100 in the whole update, or in the evaluated batch, to divide a sum by; it is
            None without such labels.
        compute_metrics: of an `EvalPrediction`, returns a dict.
        callbacks: classes or instances, called after the default ones and before the one that shows progress.
        optimizers: an optimizer and a schedule; the arguments describe those that are None.
        optimizer_cls_and_kwargs: a class of optimizers and its arguments, instead of those in ``args``.
        preprocess_logits_for_metrics: of ``(logits, labels)`` of a batch, still on the device: what to keep of them.

    Attributes:
        model_wrapped: the model as called in training; `model` is the bare one.
        state: the progress of the run.
        control: the requests of callbacks.
        is_in_train: whether `train` is running.
        label_names: columns that are labels: those in ``args``, else those that forward names, else "labels" if a loss
            function or a label smoother takes them.
        model_accepts_loss_kwargs: whether the model gets the number of labels in an update, ``num_items_in_batch``, to
            divide by.

    Raises:
        ArgumentTypeError: for an argument of the wrong type.
        ConfigurationError: for arguments that cannot work together.
    """

    @knows_other_names
    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., Mapping[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        args = TrainingArguments() if args is None else args
        optimizers = as_one(optimizers[0]), optimizers[1]
        # Complaints are collected, so that one error names all that has to be changed.
        parts = model, model_init, optimizers, optimizer_cls_and_kwargs
        complaints = refusing.complaints_about_parts(args, *parts)
        args.check()
        refusing.refuse_hooks_that_do_not_exist(type(self))
        parallel.refuse_processes(args)
        if level := args.get_process_log_level():
            logger.setLevel(level)
        parallel.seed_run(args)  # before `model_init`, which draws the weights
        if type(self).prediction_step is Trainer.prediction_step and getattr(args, "predict_with_generate", False):
            complaints.append("`predict_with_generate` needs a Seq2SeqTrainer, or a `prediction_step` of your own")
        if (
            args.batch_eval_metrics
            and compute_metrics is not None
            and not knowledge.takes(compute_metrics, "compute_result")
        ):
            complaints.append(
                "`batch_eval_metrics` calls `compute_metrics` after each batch, but yours has no parameter "
                "`compute_result`, which is True after the last one: add it, gather what counts until then, and return "
                "the metrics, or leave `batch_eval_metrics` out"
            )
        self.args = args
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        if train_dataset is not None:
            complaints += _complaints_about_data(self)
        if complaints:
            refusing.refuse(complaints)
        self.processing_class = processing_class
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        if data_collator is None:
            pads = callable(getattr(processing_class, "pad", None))
            data_collator = knowledge.PaddingCollator(processing_class) if pads else knowledge.default_data_collator
        self.data_collator = data_collator
        self._eval_dataloaders = {}
        self.model = model if model_init is None else self.call_model_init()
        parallel.choose_gpus(args, self.model)
        self._train_batch_size = args.train_batch_size
        self.label_smoother = None
        if args.label_smoothing_factor:
            module = require("pytorch_accelerated.extras.huggingface.smoothing", needed_by="`label_smoothing_factor`")
            self.label_smoother = module.label_smoother(args.label_smoothing_factor, self.model)
        names = args.label_names
        if names is None:
            names = knowledge.find_label_names(self.model) or (["labels"] if loss_takes_labels(self) else [])
        self.label_names = list(names)
        self.model_accepts_loss_kwargs = knowledge.accepts_loss_kwargs(self.model)
        self.can_return_loss = knowledge.returns_loss_by_itself(self.model)
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.model_wrapped: Any = self.model
        self.is_in_train = False
        self._staged: saving.StagedCheckpoint | None = None  # while a checkpoint is written

        self.control = TrainerControl()
        # The display is the last one, so that it shows what the others have changed in the logs.
        shown_by = PrinterCallback if self.args.disable_tqdm else ProgressCallback
        reporters = reporting_callbacks(self.args.report_to)  # type: ignore[arg-type]  # a list by now
        every = [*DEFAULT_CALLBACKS, *reporters, *(callbacks or ()), shown_by]
        self.callback_handler = CallbackHandler(every, self.model, processing_class, *optimizers)
        is_placed = args.place_model_on_device
        # Sharding moves the parts of a model itself, and quantized or dispatched models can't be moved.
        stays = self.is_fsdp_enabled or self.args.deepspeed is not None or knowledge.has_own_place(self.model)
        self.place_model_on_device = not stays if is_placed is None else is_placed
        self._engine = Engine(self, optimizers, **parallel.native_arguments(self.args))
        self._make_model_ready()
        if self.args.should_save:  # scripts write to the folder before they train
            folder = output_dir_of(self.args)
            with explained(folder, "making the folder"):
                folder.mkdir(parents=True, exist_ok=True)
        self.state = new_state(self)
        self.callback_handler.fire("on_init_end", self)

    if not TYPE_CHECKING:  # to a type checker it would mean that every name is there

        def __getattr__(self, name: str) -> Any:
            """Attributes of `transformers`' trainer that scripts use, or an error that says what to do instead."""
            if name in refusing.READ_BY_SCRIPTS:
                return refusing.READ_BY_SCRIPTS[name](self)
            if name in refusing.METHODS_ELSEWHERE:
                raise MissingMethodError(f"{type(self).__name__} has no `{name}`. {refusing.METHODS_ELSEWHERE[name]}")
            return super().__getattribute__(name)  # raises the original error, also one from inside a property

    @property
    def model(self) -> Any:
        """The model, not wrapped for a training; in `DataParallel` if its user has put it into one."""
        return vars(self)["model"]

    @model.setter
    def model(self, model: Any) -> None:
        vars(self)["model"] = parallel.in_replicas(self, model, count=1)

    # ----------------------------------------------------------------------------------------------- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Sequence[str] | None = None,
    ) -> TrainOutput:
        """Train as the arguments say. Must be called by all ranks.

        Args:
            resume_from_checkpoint: a checkpoint's path, or True for the last one in ``args.output_dir``.
            trial: of a search, for a `model_init` that takes it.
            ignore_keys_for_eval: outputs of the model that evaluations leave out.

        Raises:
            ConfigurationError: a ValueError, if there is no such checkpoint, or nothing to train on.
            NonFiniteLossError: if a checkpoint was due and a parameter was NaN or infinite.
        """
        self.args.check()
        if complaints := _complaints_about_data(self):
            refusing.refuse(complaints)
        if self.model_init is not None:
            # Each training has a new model, with the same weights as the one before.
            parallel.seed_run(self.args)
            self.model = self.model_wrapped = self.call_model_init(trial)
            self.callback_handler.model = self.model
            self._signature_columns = None
            self._make_model_ready()
        if self.processing_class is not None:
            knowledge.take_over_special_tokens(self.model, self.processing_class, logs=self.is_world_process_zero())
        engine = self._engine
        # A second training keeps the optimizer, unless its model is a new one; a schedule of ours begins again.
        if engine.given_schedule is None:
            self.lr_scheduler = None
        if engine.given_optimizer is None and self.model_init is not None:
            self.optimizer = None
        checkpoint = states.agreed_checkpoint(resume_from_checkpoint, self.args, engine.ranks)
        return engine.run_training(checkpoint, ignore_keys_for_eval)

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train with different arguments, and return the best ones, by Optuna. For one process.

        Checkpoints of a trial are in ``run-<number>`` of ``args.output_dir``. The arguments are the given ones again
        afterwards; the model is the last trial's.

        Args:
            hp_space: arguments by name for a trial; default: rate, epochs, seed and batch size.
            compute_objective: the value of a trial from the metrics of an evaluation; default: their sum, or the loss.
            n_trials: how many.
            direction: "minimize" or "maximize"; a list for multiple objectives.
            backend: "optuna".
            hp_name: a name for a trial.
            kwargs: of `optuna.create_study` and `optuna.Study.optimize`, such as ``storage`` and ``timeout``.

        Returns:
            A named tuple with `run_id`, `objective` and `hyperparameters`; for multiple objectives a list of them, one
            for each trial that no other one beats.

        Raises:
            ConfigurationError: without `model_init`, on multiple processes, or for another backend.
        """
        if backend not in (None, "optuna"):
            raise ConfigurationError(f"`backend` is {backend!r}, but only 'optuna' is served. Leave it out.")
        module = require("pytorch_accelerated.extras.huggingface.search", needed_by="`hyperparameter_search`")
        folder = output_dir_of(self.args)
        return module.search(self, folder, hp_space, compute_objective, n_trials, direction, hp_name, **kwargs)

    def replay(self, checkpoints: str | Path, update: int, *, debug: bool = False) -> Any:
        """Go back to just before a step of a training that saved checkpoints, and look at it; see the native
        `Trainer.replay`.

        Callbacks that show progress or report it are left out. Must be called by all ranks.

        Args:
            checkpoints: the folder of the checkpoints, or one of them.
            update: the number of the step, from 1.
            debug: stop in the debugger before the forward pass of each batch of the step.

        Returns:
            A `Replay`; print it.
        """
        module = require("pytorch_accelerated.huggingface.replaying", needed_by="`replay`")
        return module.replay(self, self._engine, checkpoints, update, debug)

    def eject(self, path: str | Path) -> Path:
        """Write the training as one readable PyTorch script without this library; see the native `Trainer.eject`.

        Must be called in a single process, before the training.
        """
        module = require("pytorch_accelerated.extras.ejecting.face", needed_by="`eject`")
        return module.eject_face(self, path)  # type: ignore[no-any-return]

    def rows_of(self, update: int) -> list[Any]:
        """The rows of the training set in a step of the last training; see the native `Trainer.rows_of`. Must be called
        by all ranks.
        """
        return self._engine.rows_of(update)

    def updates_of(self, row: int) -> list[int]:
        """The steps of the last training that use a row; see the native `Trainer.updates_of`. Must be called by all
        ranks.
        """
        return self._engine.updates_of(row)

    def _make_model_ready(self) -> None:
        """Prepare a new model as the arguments say. Must be called by all ranks."""
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = self.args.use_cache
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self.args.device)
        parallel.enable_gradient_checkpointing(self.model, self.args)
        parallel.shard(self.model, self.args, self._engine.ranks)

    # ----------------------------------------------------------------------------------------- evaluating, predicting

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate, log the metrics and return them, the same on all ranks. Must be called by all ranks.

        Args:
            eval_dataset: a dataset, or a dict of several, whose names become part of the prefix; default: the
                trainer's.
            ignore_keys: outputs of the model to leave out.
            metric_key_prefix: the first word of the metrics' names.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, Mapping):
            if not dataset:
                knowledge.refuse_missing(dataset, "evaluate", "eval_dataset")
            several = [
                self.evaluate(
                    each if eval_dataset is not None else name,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=f"{metric_key_prefix}_{name}",
                )
                for name, each in dataset.items()
            ]
            return {name: value for metrics in several for name, value in metrics.items()}
        output, metrics = _measured_loop(
            self,
            self.get_eval_dataloader(eval_dataset),
            description="Evaluation",
            # Nothing but `compute_metrics` uses the predictions.
            prediction_loss_only=True if self.compute_metrics is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        _warn_without_metrics(self, output, metric_key_prefix)
        self.log(metrics)
        self.callback_handler.fire("on_evaluate", self, metrics=metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict all rows, in order, with labels or without; the other arguments are as for `evaluate`.

        Must be called by all ranks, which get the same result.
        """
        output, metrics = _measured_loop(
            self,
            self.get_test_dataloader(test_dataset),
            description="Prediction",
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        self.callback_handler.fire("on_predict", self, metrics=metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Make one pass over `dataloader`, without logging. Must be called by all ranks.

        Args:
            dataloader: yields host batches; a torch `DataLoader` is distributed over the ranks.
            description: of the pass, for overriding methods. With ``batch_eval_metrics``, the outputs are kept if it is
                "Prediction".
            prediction_loss_only: whether to keep only the loss; default: as the arguments say.
            ignore_keys: as in `evaluate`, like the prefix.
            metric_key_prefix: the first word of the metrics' names.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        collector = evaluating.EvaluationCollector(
            self._engine.ranks,
            self.args,
            compute_metrics=self.compute_metrics,
            prefix=metric_key_prefix,
            keeps_rows=description == "Prediction" or not self.args.batch_eval_metrics,
            prediction_padding=self.prediction_padding,
        )
        self.callback_handler.eval_dataloader = dataloader
        return self._engine.evaluate_rows(
            dataloader, lambda batch: _evaluated(self, batch, loss_only, ignore_keys), collector
        )

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, outputs and labels of one batch. Override it for models that are used in another way.

        The loss is None without labels. The outputs are one, or a tuple of several, each with the rows of the batch.
        The labels likewise: None if some are missing, an empty tuple for a model whose loss needs none.

        Args:
            model: to call.
            inputs: the batch.
            prediction_loss_only: whether outputs and labels may be None.
            ignore_keys: outputs of the model to leave out; default: those that its config names, or its caches.
        """
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            ignore_keys = knowledge.names_left_out(self.model)
        labels = evaluating.labels_in(inputs, self.label_names)
        is_by_itself = not self.label_names and inputs.get("return_loss", self.can_return_loss)
        returns_loss = labels is not None or bool(is_by_itself)
        count = self.count_items(inputs) if returns_loss and self.counts_items else None
        with torch.no_grad(), self.compute_loss_context_manager():
            if returns_loss:
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=count)
                loss = loss.detach().mean() if loss.ndim else loss.detach()
            else:
                loss, outputs = None, model(**inputs)
        if prediction_loss_only:
            return loss, None, None
        # If the loss is computed from labels outside the model, the model's outputs do not begin with it.
        is_outside = loss_takes_labels(self) and "labels" in inputs and is_ours(self.compute_loss)
        logits = evaluating.outputs_without_loss(outputs, ignore_keys, has_loss=returns_loss and not is_outside)
        kept = evaluating.detached(labels or ()) if returns_loss else None
        return loss, evaluating.detached(logits), kept[0] if kept is not None and len(kept) == 1 else kept

    @property
    def prediction_padding(self) -> int:
        """The value that shorter rows of predictions are padded with."""
        return PADDING

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: Sequence[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate during training, and step a schedule that watches a metric."""
        metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and not skip_scheduler:
            self.lr_scheduler.step(evaluating.metric_of(metrics, self.args.metric_for_best_model or "loss"))
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Note the metric in the state if it is the best so far, and return whether it is.

        Raises:
            MissingMetricError: a KeyError, if ``metric_for_best_model`` is not among `metrics`.
        """
        name, state = self.args.metric_for_best_model, self.state
        if name is None:
            return False
        value = evaluating.metric_of(metrics, name)
        if math.isnan(value):
            warn_user(
                self._engine.ranks,
                f"`metric_for_best_model`, {name!r}, is NaN at step {state.global_step}, so this is not the best model "
                "whatever others are. Look at the evaluation set, and at the logged losses for NaN.",
            )
        best, sign = state.best_metric, 1 if self.args.greater_is_better else -1
        if math.isnan(value) or (best is not None and not sign * value > sign * best):
            return False
        state.best_metric, state.best_global_step = value, state.global_step
        return True

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Gather nested tensors from all ranks. Must be called by all ranks with a batch."""
        padding = self.prediction_padding if name == "logits" else PADDING
        # Unlike the native `gather`, it keeps rows of nothing but padding: the labels of a row may all be -100.
        context = self._engine.run_context
        return None if tensors is None else (context.parts.uneven or context.parts.ranks).gather(tensors, padding)

    # -------------------------------------------------------------------------------------------------------- logging

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add an entry to the log history, and tell the callbacks.

        Args:
            logs: plain numbers by name, to which the epoch is added.
            start_time: of training. If tokens are counted, it adds ``train_runtime`` and ``train_tokens_per_second``.
        """
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                training = self._engine.training
                first = 0 if training is None else training.first_tokens
                tokens = self.state.num_input_tokens_seen - first
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.callback_handler.fire("on_log", self, logs=logs)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print a table of metrics on the first process, in the format of `metrics_format`; `split` is its heading."""
        if self.is_world_process_zero():
            self._engine.print(_results().as_table(split, metrics))

    @staticmethod
    def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics for people: durations, megabytes and gigaflops as strings, other fractions to four decimals."""
        return _results().formatted(metrics)  # type: ignore[no-any-return]

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to ``<split>_results.json`` in ``args.output_dir``, on the first process.

        If `combined`, add them to ``all_results.json`` too.

        Raises:
            TypeError: if JSON cannot hold a metric.
            CheckpointError: if the disk refuses.
        """
        if self.is_world_process_zero():
            _results().save_results(output_dir_of(self.args), split, metrics, combined=combined)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write or replace ``README.md`` in ``args.output_dir``, on the first process.

        It lists the model's class, the arguments that differ from the defaults, the last logged values and the
        versions. Its header, for the hub, has the values given here.

        Args:
            language: of the data, as a code.
            license: as an identifier, "mit" for example.
            tags: to find it by.
            model_name: default: the last part of ``args.output_dir``.
            finetuned_from: the original model.
            tasks: with these and a dataset, the metrics of the last evaluation become results.
            dataset_tags: names of the datasets on the hub.
            dataset: the same in words.
            dataset_args: their configurations.
        """
        if not self.is_world_process_zero():
            return
        header = {"language": language, "license": license, "tags": tags, "base_model": finetuned_from}
        datasets = dataset, dataset_tags, dataset_args
        _results().write_card(self, output_dir_of(self.args), model_name, tasks, datasets, header)

    # ---------------------------------------------------------------------------------------------- callbacks, facts

    def add_callback(self, callback: Any) -> None:
        """Add a callback, an instance or a class, after the others."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove the first callback of a class, or this instance, and return it; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove the first callback of a class, or this instance."""
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return self.args.process_index == 0

    @property
    def accelerator(self) -> Accelerator:
        """The accelerate object behind this trainer."""
        return self._engine.accelerator

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether the model is sharded over the processes."""
        return self.args.fsdp is not None

    # --------------------------------------------------------------------------------------------------------- saving

    def save_state(self) -> None:
        """Write `state` to ``trainer_state.json`` in ``args.output_dir``, on the first process."""
        if self.is_world_process_zero():
            write_whole(output_dir_of(self.args) / TRAINER_STATE_NAME, [self.state.to_json().encode()])

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write weights, configuration and arguments to a folder, by default ``args.output_dir``.

        Must be called by all ranks; the first one writes. What an override writes is the model of checkpoints, too.
        """
        is_left = self._staged is not None and self._staged.is_of(self.model, output_dir) and is_ours(self._save)
        context, folder = self._engine.run_context, output_dir or output_dir_of(self.args)
        with context.control.saves.saving(folder), context.parts.mode.evaluating():
            gathered = None if is_left else saving.gathered_weights(self.model)
            if self.args.should_save:
                # An override need not have the second parameter if the model is not sharded.
                self._save(output_dir, **({} if gathered is None else {"state_dict": gathered}))

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        """Do the work of `save_model` on the rank that writes."""
        folder, staged = Path(output_dir or output_dir_of(self.args)), self._staged
        if staged is not None and staged.is_of(self.model, folder) and state_dict is None:
            staged.lacks_weights = True
            saving.save_description(self.model, folder)
        else:
            saving.save_weights(self.model, folder, state_dict)
        processor = self.processing_class
        if processor is None:
            processor = getattr(self.data_collator, "tokenizer", None)
        saving.save_companions(folder, self.args, processor)

    def _save_optimizer_and_scheduler(self, output_dir: str | None) -> None:
        """Write the states of optimizer and schedule to a folder. Must be called by all ranks; the first one writes."""
        if output_dir is None:
            return
        parts = self._engine.states.of_optimizer()
        if self.args.should_save:
            saving.save_states(Path(output_dir), parts)
        if self._staged is not None:
            self._staged.has_optimizer = saving.OPTIMIZER_NAME in parts

    def _save_scaler(self, output_dir: str) -> None:
        """Write the state of the loss scaler to a folder, if there is one. The first process writes."""
        scaler = self.accelerator.scaler
        if scaler is not None and self.args.should_save:
            saving.save_states(Path(output_dir), {states.SCALER_NAME: scaler.state_dict()})

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the states of all ranks' generators to a folder. Must be called by all ranks; the first one writes."""
        parts = states.generators_of_all(self._engine.ranks)
        if self.args.should_save:
            saving.save_states(Path(output_dir), parts)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint of this step, atomically, and delete superfluous ones. All ranks must call it."""
        only_model = self.args.save_only_model
        folder = self._engine.states.checkpoint_folder()
        self._engine.states.note_best(folder)
        self.store_flos()
        self.state.stateful_callbacks = exported_states([*self.callback_handler.callbacks, self.control])

        def write_files(staged: saving.StagedCheckpoint) -> None:
            self._staged = None if only_model else staged
            try:
                self.save_model(str(staged.folder), _internal_call=True)
                if not only_model:
                    for save in (self._save_optimizer_and_scheduler, self._save_scaler, self._save_rng_state):
                        save(str(staged.folder))
            finally:
                self._staged = None
            if self.args.should_save:
                self.state.save_to_json(staged.folder / TRAINER_STATE_NAME)

        self._engine.states.write_checkpoint(folder, write_files, only_model=only_model)
        if self.args.should_save:
            rotate_checkpoints(output_dir_of(self.args), self.args.save_total_limit, self.state.best_model_checkpoint)

    def store_flos(self) -> None:
        """Add the operations of the latest batches, over all ranks, to the state. Must be called by all ranks."""
        if self._engine.training is not None:
            self.state.total_flos += self._engine.training.counter.take_flos(self._engine.ranks)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint, by default into the trainer's model."""
        saving.load_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """At every resume, after both are loaded with the rest of the run: for an override that loads more."""

    def _load_callback_state(self) -> None:
        """At every resume: recreate callbacks and control from ``self.state``, if the arguments say so."""
        if self.args.restore_callback_states_from_checkpoint:
            control = states.restore_callbacks(self.callback_handler.callbacks, self.state.stateful_callbacks)
            self.control = control or self.control


def _results() -> Any:
    return require("pytorch_accelerated.extras.huggingface.results", needed_by="A table, file or page of results")


def _complaints_about_data(trainer: Trainer) -> list[str]:
    """The reasons why a run cannot use these datasets, or would have nothing to do."""
    args, dataset, complaints = trainer.args, trainer.train_dataset, []
    if not args.num_train_epochs and args.max_steps <= 0:
        complaints.append("`num_train_epochs` is 0, so there is nothing to train: give more, or `max_steps`")
    evaluates_as_usual = all(map(is_ours, (trainer.evaluate, trainer.get_eval_dataloader, trainer._evaluate)))
    if args.eval_strategy != IntervalStrategy.NO and trainer.eval_dataset is None and evaluates_as_usual:
        complaints.append(f"`eval_strategy` is {str(args.eval_strategy)!r}, but there is no `eval_dataset`: pass one")
    ordered = str(args.train_sampling_strategy) in ("group_by_length", "batch_rebalance")
    chooses_order = is_ours(trainer._get_train_sampler) and is_ours(trainer.get_train_dataloader)
    if ordered and chooses_order and (isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")):
        complaints.append(
            f"`train_sampling_strategy` is {str(args.train_sampling_strategy)!r}, but the rows of the training set, a "
            f"{type(dataset).__name__}, come in an order of its own: sort them there, and leave the argument out"
        )
    if dataset is not None and not hasattr(dataset, "__len__") and args.max_steps <= 0:
        complaints.append(f"the training set, a {type(dataset).__name__}, has no length: set `max_steps`")
    return complaints


def _evaluated(
    trainer: Trainer, batch: Any, prediction_loss_only: bool, ignore_keys: Sequence[str] | None
) -> evaluating.EvaluatedBatch:
    loss, logits, labels = trainer.prediction_step(
        trainer._engine.model, batch, prediction_loss_only, ignore_keys=ignore_keys
    )
    size = rows_left(batch, trainer._engine._batch_samples) or evaluating.rows_in(batch)
    # Like transformers, losses of batches are weighted by rows, unless the user says what an item is.
    items = None if is_ours(trainer.count_items) else trainer.count_items(batch)
    items = size if items is None else items
    if prediction_loss_only:
        return evaluating.EvaluatedBatch(items, loss, size)
    if trainer.preprocess_logits_for_metrics is not None and logits is not None:
        logits = trainer.preprocess_logits_for_metrics(logits, labels)
    args, inputs = trainer.args, None
    if "inputs" in args.include_for_metrics:
        inputs = evaluating.inputs_for_metrics(batch, knowledge.main_input_name(trainer.model))
    losses = loss.expand(size) if "loss" in args.include_for_metrics and loss is not None else None
    parts = of_all = {"predictions": logits, "label_ids": labels, "inputs": inputs, "losses": losses}
    if args.batch_eval_metrics and args.world_size > 1:
        names = {"predictions": "logits", "label_ids": "labels", "inputs": "inputs"}
        of_all = {**parts, **{part: trainer._nested_gather(parts[part], name) for part, name in names.items()}}
    return evaluating.EvaluatedBatch(items, loss, size, parts, of_all)


def _measured_loop(
    trainer: Trainer, loader: Any, *, metric_key_prefix: str, **arguments: Any
) -> tuple[EvalLoopOutput, dict[str, Any]]:
    """The output of `evaluation_loop`, and its metrics with the times."""
    args, started = trainer.args, time.time()
    stage = "test" if arguments["description"] == "Prediction" else "eval"
    memory: Any = dict if args.skip_memory_metrics else meter_memory(stage, is_nested=trainer.is_in_train)
    output = trainer.evaluation_loop(loader, metric_key_prefix=metric_key_prefix, **arguments)
    metrics, samples = dict(output.metrics or {}), output.num_samples or 0
    steps = math.ceil(samples / (args.eval_batch_size * args.world_size))
    if trainer._engine.training is None:  # which would have prepared the model
        metrics[f"{metric_key_prefix}_model_preparation_time"] = round(trainer._engine.preparation_seconds, 4)
    metrics.update({**speed_metrics(metric_key_prefix, started, samples, steps), **memory()})
    return output, metrics


def _warn_without_metrics(trainer: Trainer, output: EvalLoopOutput, prefix: str) -> None:
    """Warn at the first evaluation that could not call `compute_metrics`."""
    engine = trainer._engine
    is_wanted = trainer.compute_metrics is not None and not trainer.args.prediction_loss_only
    keeps_none = trainer.args.batch_eval_metrics or output.predictions is None or output.label_ids is None
    has_none = keeps_none and not set(output.metrics or ()) - {f"{prefix}_loss"}
    if is_wanted and has_none and engine.warns_without_metrics:
        engine.warns_without_metrics = False
        warn_user(
            engine.ranks,
            "`compute_metrics` was not called, because there were no predictions or no labels: not all rows have the "
            f"labels {', '.join(map(repr, trainer.label_names)) or '(none is known)'}. Name them in `label_names`.",
        )
