"""The parts of a trainer that scripts override: its loss, optimizer, schedule and loaders."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, DataError
from pytorch_accelerated.huggingface.arguments.deepspeed import make_schedule_of_config
from pytorch_accelerated.huggingface.arguments.strategies import SamplingStrategy
from pytorch_accelerated.huggingface.arguments.training_arguments import TrainingArguments
from pytorch_accelerated.huggingface.engine.counting import operations_of
from pytorch_accelerated.huggingface.engine.optimizing import (
    decay_parameter_names,
    group_with,
    keep_embeddings_whole,
    make_optimizer,
    make_schedule,
    optimizer_class_and_arguments,
    parameter_groups,
)
from pytorch_accelerated.huggingface.models.collating import (
    RemoveColumnsCollator,
    default_data_collator,
    find_label_names,
    signature_columns,
    without_unused_columns,
)
from pytorch_accelerated.huggingface.models.knowledge import (
    accepts_loss_kwargs,
    outputs_of,
    own_loss,
    refuse_missing_column,
    refuse_missing_parameters,
)
from pytorch_accelerated.huggingface.models.loading import (
    LengthGroupedSampler,
    LoadersBySet,
    PaddingCollator,
    refuse_missing,
    row_lengths,
)
from pytorch_accelerated.huggingface.models.smoothing import LabelSmoother
from pytorch_accelerated.prediction.padded import PADDING


class TrainerHooks:
    """The parts of a trainer, with its methods to override. Its arguments are those of the trainer."""

    def __init__(
        self,
        args: TrainingArguments,
        data_collator: Callable[[list[Any]], Any] | None,
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: Any,
        model_init: Callable[..., nn.Module] | None,
        compute_loss_func: Callable[..., torch.Tensor] | None,
        optimizers: tuple[Any, Any],
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None,
    ) -> None:
        self.args = args
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        if data_collator is None:
            pads = callable(getattr(processing_class, "pad", None))
            data_collator = PaddingCollator(processing_class) if pads else default_data_collator
        self.data_collator = data_collator
        epsilon = args.label_smoothing_factor
        self.label_smoother = LabelSmoother(epsilon) if epsilon else None
        self._train_batch_size = args.train_batch_size
        self._eval_loaders = LoadersBySet()

    def _take_model(self, model: Any) -> None:
        """Use a model, and find out what it takes."""
        self.model = model
        names = self.args.label_names
        if names is None:
            names = find_label_names(model) or (["labels"] if self._loss_takes_labels else [])
        self.label_names: list[str] = list(names)
        self.model_accepts_loss_kwargs = accepts_loss_kwargs(model)
        self._signature_columns: list[str] | None = None  # found out when they are first needed

    # ----------------------------------------------------------------------------------------------- model and loss

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of a batch, in training and in evaluation. Override it for a loss of your own.

        Args:
            model: to call; wrapped if there are several processes.
            inputs: the batch.
            return_outputs: whether to return a pair of loss and outputs.
            num_items_in_batch: labels of the whole update, or of an evaluated batch. Divide by it if it is given, and
                take the mean if it is None.

        Raises:
            DataError: if the model returns no loss, or needs an input that the batch does not have.
        """
        labels = None
        if self._loss_takes_labels and "labels" in inputs:
            labels = inputs["labels"]
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = outputs_of(model, inputs, bare_model=self.model)
        if labels is None:
            loss = own_loss(outputs, inputs)
        elif self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        else:
            assert self.label_smoother is not None
            named = {"logits": outputs} if isinstance(outputs, torch.Tensor) else outputs
            predicts_next_token = type(self.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
            loss = self.label_smoother(named, labels, shift_labels=predicts_next_token)
        return (loss, outputs) if return_outputs else loss

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any], **arguments: Any) -> Any:
        """Call `compute_loss` in its context, with a clear error for a removed column or a missing parameter."""
        try:
            with self.compute_loss_context_manager():
                return self.compute_loss(model, inputs, **arguments)
        except KeyError as error:
            if self.args.remove_unused_columns:
                refuse_missing_column(error, type(self).__name__, self.model, self.label_names, self.train_dataset)
            raise
        except TypeError as error:
            refuse_missing_parameters(error, type(self).__name__, self.compute_loss)
            raise

    @property
    def counts_items(self) -> bool:
        """Whether the loss is told the number of labels in an update."""
        return self.compute_loss_func is not None or self.model_accepts_loss_kwargs

    def count_items(self, batch: Any) -> int | None:
        """The labels in a batch that count, None if it has none."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        return int((labels != PADDING).sum()) if isinstance(labels, torch.Tensor) else None

    @property
    def _loss_takes_labels(self) -> bool:
        """Whether the loss is computed from outputs and labels, so that the model itself gets no labels."""
        return self.label_smoother is not None or self.compute_loss_func is not None

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """The context of `compute_loss`. Mixed precision needs none: it is part of the model's forward."""
        return contextlib.nullcontext()

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> float:
        """Estimate the operations of the forward and backward pass of a batch."""
        return operations_of(self.model, inputs.get(self._main_input_name))

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model from `model_init`, which may take the trial."""
        assert self.model_init is not None
        needed = [
            parameter.name
            for parameter in inspect.signature(self.model_init).parameters.values()
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        ]
        if len(needed) > 1:
            raise ArgumentTypeError(
                f"`model_init` needs the arguments {', '.join(needed)}, but it is called with a trial, which is None, "
                "or with nothing. Give the others a default, for example with functools.partial."
            )
        model = self.model_init(trial) if needed else self.model_init()
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(f"`model_init` returned {model!r}, which is not an nn.Module. Return a new model.")
        return model

    @property
    def _main_input_name(self) -> str:
        return str(getattr(self.model, "main_input_name", "input_ids"))

    # -------------------------------------------------------------------------------------------- optimizer, schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make `optimizer` and `lr_scheduler`, unless they exist. Override this, or one of the two methods it calls."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps, optimizer=self.optimizer)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make `optimizer` for the trainable parameters of the model, unless it exists, and return it."""
        if self.optimizer is None:
            model = self.model if model is None else model
            decay = self.args.weight_decay
            groups = parameter_groups(model, self.get_decay_parameter_names(model), decay)
            kind, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            keep_embeddings_whole(model, kind, arguments)
            self.optimizer = make_optimizer(kind, arguments, groups)
        return self.optimizer  # type: ignore[no-any-return]

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make `lr_scheduler` for a run of so many updates, unless it exists, and return it."""
        optimizer = self.optimizer if optimizer is None else optimizer
        if self.lr_scheduler is None:
            self.lr_scheduler = make_schedule_of_config(self.args, optimizer, num_training_steps)
        if self.lr_scheduler is None:
            self.lr_scheduler = make_schedule(
                self.args.lr_scheduler_type,
                optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                arguments=self.args.lr_scheduler_kwargs,  # type: ignore[arg-type]  # a dict by now
            )
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """The parameters with weight decay: all but biases and those of norm layers."""
        return decay_parameter_names(model)

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: Any = None
    ) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The class of the optimizer in the arguments, and its own arguments."""
        return optimizer_class_and_arguments(args)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._existing_optimizer().param_groups]

    def get_optimizer_group(self, param: str | torch.Tensor | None = None) -> Any:
        """The optimizer's group with a parameter, given itself or by name; by default the parameters of all groups.

        Raises:
            ConfigurationError: a ValueError, without an optimizer, or if no group has it.
        """
        groups = self._existing_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return group_with(param, groups, self.model)

    def get_num_trainable_parameters(self) -> int:
        """The number of trainable numbers in the model."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def _existing_optimizer(self) -> Any:
        if self.optimizer is None:
            raise ConfigurationError(
                "There is no optimizer yet: it is made when the training begins. Call `create_optimizer` before, or "
                "ask in a callback."
            )
        return self.optimizer

    # ----------------------------------------------------------------------------------------------------------- data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of a training run, with all rows: the engine distributes them over the processes."""
        refuse_missing(self.train_dataset, "train on", "train_dataset")
        return self._make_loader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            sampler=self._get_train_sampler(),
            drop_last=self.args.dataloader_drop_last,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The loader of an evaluation: every row once, in order. With persistent workers, each dataset keeps its own.

        Args:
            eval_dataset: a dataset, or the name of one in the dict ``self.eval_dataset``; default: that itself.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
            if eval_dataset not in sets:
                raise ConfigurationError(
                    f"There is no evaluation set {eval_dataset!r}, only "
                    f"{', '.join(map(repr, sets)) or 'none by name'}. Give one of these, or a dataset."
                )
            dataset = sets[eval_dataset]
        refuse_missing(dataset, "evaluate", "eval_dataset")
        if not self.args.dataloader_persistent_workers:
            return self.get_test_dataloader(dataset)
        return self._eval_loaders.get(dataset, self.get_test_dataloader)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """The loader of a prediction: every row once, in order."""
        if test_dataset is None:
            refuse_missing(test_dataset, "predict", "test_dataset")
        return self._make_loader(
            test_dataset,
            batch_size=self.args.eval_batch_size,
            sampler=self._get_eval_sampler(test_dataset),
            drop_last=False,  # no row is left out of a metric
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """The order of the training rows; None for a dataset that has its own."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return None
        if self.args.train_sampling_strategy == SamplingStrategy.SEQUENTIAL:
            return SequentialSampler(dataset)
        if self.args.train_sampling_strategy == SamplingStrategy.GROUP_BY_LENGTH:
            lengths = row_lengths(dataset, self.args.length_column_name, self._main_input_name)
            return LengthGroupedSampler(lengths, self._train_batch_size * self.args.gradient_accumulation_steps)
        return RandomSampler(dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """The order of the rows of an evaluation; None for that of the dataset."""
        return None

    def _make_loader(
        self, dataset: Any, *, batch_size: int, sampler: Sampler[int] | None, drop_last: bool
    ) -> DataLoader[Any]:
        """A loader of all rows. Its ``total_batch_size`` is the number of rows of a batch over all processes."""
        args, collator = self.args, self.data_collator
        used = self._remove_unused_columns(dataset)
        if used is dataset:
            collator = self._get_collator_with_removed_columns(collator)
        is_stream = isinstance(used, IterableDataset)
        if not is_stream and not hasattr(used, "__getitem__"):
            raise DataError(
                f"A dataset is a {type(used).__name__}, which has no rows by number. Make a list of it, or give an "
                "object of a torch `IterableDataset` whose `__iter__` restarts it for each pass."
            )
        of_rows: dict[str, Any] = {} if is_stream else {"sampler": sampler, "drop_last": drop_last}
        loader: DataLoader[Any] = DataLoader(
            used,
            batch_size=batch_size,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            **of_rows,
        )
        loader.total_batch_size = batch_size * args.world_size
        return loader

    def _set_signature_columns_if_needed(self) -> None:
        """Set ``_signature_columns``, the columns to keep. Override it to keep others."""
        if self._signature_columns is None:
            self._signature_columns = signature_columns(self.model, self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """`dataset` without the columns that the model does not take, if it is one of `datasets`."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        return without_unused_columns(dataset, self._signature_columns or ())

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """`data_collator`, with the columns removed that the model does not take."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        return RemoveColumnsCollator(data_collator, self._signature_columns or ())

    def num_examples(self, dataloader: Any) -> int:
        """Rows of one pass over `dataloader`, over all processes."""
        dataset = getattr(dataloader, "dataset", None)
        if dataset is not None and hasattr(dataset, "__len__"):
            return len(dataset)
        if hasattr(dataloader, "__len__"):
            return len(dataloader) * (getattr(dataloader, "batch_size", None) or 1)
        raise DataError(
            f"Neither the {type(dataloader).__name__} nor its dataset has a length, so the number of rows is unknown. "
            "Give the dataset a `__len__`, or count the rows yourself."
        )
