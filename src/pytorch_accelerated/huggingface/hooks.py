"""The parts of a trainer that scripts override: its step, loss, optimizer, schedule and loaders."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, DataError
from pytorch_accelerated.facts.accumulation import Accumulation
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.trees import length_of
from pytorch_accelerated.huggingface import knowledge
from pytorch_accelerated.huggingface.arguments.fields import SamplingStrategy
from pytorch_accelerated.huggingface.arguments.parallel import deepspeed
from pytorch_accelerated.huggingface.engine import optimizing
from pytorch_accelerated.huggingface.training_args import TrainingArguments
from pytorch_accelerated.prediction.padded import PADDING
from pytorch_accelerated.ranks.accelerators import send_to_device

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.engine.engine import Engine

_BATCHES_PER_POOL = 50  # for group_by_length
_MAX_EVALUATION_LOADERS = 8  # with workers that persist


class TrainerHooks:
    """The methods of a trainer that scripts override; `Trainer` has the attributes."""

    #: Whether `compute_loss` returns a batch's share of its update, which is not weighted any more. None: it does where
    #: it gets a number of items.
    loss_is_scaled_for_ga: bool | None = None

    args: TrainingArguments
    _engine: Engine
    model: Any
    model_init: Callable[..., nn.Module] | None
    model_accepts_loss_kwargs: bool
    compute_loss_func: Callable[..., torch.Tensor] | None
    label_names: list[str]
    label_smoother: Any
    optimizer: Any
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None
    lr_scheduler: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[list[Any]], Any]
    _train_batch_size: int
    _signature_columns: list[str] | None = None  # found out when they are first needed
    _eval_dataloaders: dict[Any, Any]

    # ---------------------------------------------------------------------------------------- step, model and loss

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Add the gradients of one batch, and return its share of the loss of the update, detached.

        The shares of all batches add up to that loss.

        Args:
            model: to call; wrapped if there are multiple processes.
            inputs: the batch, on the device.
            num_items_in_batch: labels of the whole update, if the loss takes their number.

        Raises:
            DataError: if the loss is not a single number, or has no gradient.
        """
        inputs, engine = self._prepare_inputs(inputs), self._engine
        engine.is_in_step = True
        try:
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        finally:
            engine.is_in_step = False
        knowledge.refuse_no_loss(loss, is_learnt_from=True)
        share = engine.training.step.share_of_update(loss, num_items_in_batch)
        engine.backward_step(share)
        return share.detach()  # type: ignore[no-any-return]

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of an update, and the number of their items over all processes, by which a loss is divided.

        Override it to change the batches, to leave some out, or to count other items. Must be called by all ranks.

        Args:
            epoch_iterator: yields the batches of the update on this process.
            num_batches: how many there are.
            device: of the batches.
        """
        batches = list(itertools.islice(epoch_iterator, num_batches))
        counts = [self.count_items(batch) for batch in batches] if self.counts_items else [None]
        own, unknown = sum(int(count or 0) for count in counts), None in counts
        in_total, is_unknown = self._engine.ranks.sum([own, unknown])
        return batches, None if is_unknown else knowledge.items_of_update(own, int(in_total), self.args)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """A batch on the device of this process, in a container of its own, which `compute_loss` may change."""
        if self.args.deepspeed is not None:
            inputs = deepspeed().in_precision_of(self.model, inputs)
        device, kind = self._engine.ranks.device, type(inputs)
        parts = inputs.values() if kind is dict else inputs if kind in (list, tuple) else [inputs]
        for part in parts:
            if type(part) is not torch.Tensor or part.device != device:
                return send_to_device(inputs, device)
        return inputs if kind is torch.Tensor else kind(inputs)  # the loop has moved it

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch, in training and in evaluation. Override it for a loss of your own.

        It is the mean over the batch or, in training with a number of items, the batch's share of the update: a sum
        divided by that number. Set `loss_is_scaled_for_ga` for a loss of another scale.

        Args:
            model: to call; wrapped if there are multiple processes.
            inputs: the batch.
            return_outputs: whether to return a pair of loss and outputs.
            num_items_in_batch: labels of the whole update, or of an evaluated batch, if the model or the loss function
                takes their number.

        Raises:
            DataError: if the model returns no loss, or needs an input that the batch does not have.
        """
        if num_items_in_batch is not None and not self.counts_items:
            num_items_in_batch = None  # nothing is divided by it
        # A `training_step` of the user scales as for transformers: by the number of the whole update, if at all.
        is_of_user = model.training and not self._engine.is_in_step
        items = None if num_items_in_batch is None or is_of_user else self.count_items(inputs)
        items = num_items_in_batch if items is None else items
        labels, has_own_loss = None, (self.label_smoother or self.compute_loss_func) is not None
        if has_own_loss and "labels" in inputs:
            labels = inputs["labels"]
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
        if self.model_accepts_loss_kwargs and items is not None:
            inputs = {**inputs, "num_items_in_batch": items}  # its loss is the mean of the batch, divided or not
        outputs = model(**inputs)
        if labels is None:
            loss = knowledge.own_loss(outputs, inputs)
        elif self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
            items = num_items_in_batch  # by which it is divided
        else:
            named = {"logits": outputs} if isinstance(outputs, torch.Tensor) else outputs
            number = {} if items is None else {"num_items_in_batch": items}
            loss = self.label_smoother(named, labels, shift_labels=knowledge.predicts_next_token(self.model), **number)
        if num_items_in_batch is not None and model.training:
            knowledge.refuse_no_loss(loss, is_learnt_from=True)
            # Gradients are averaged over the ranks.
            ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
            precise = torch.promote_types(loss.dtype, torch.float32)
            loss = loss * (torch.as_tensor(items, dtype=precise, device=loss.device) * ranks / num_items_in_batch)
            if isinstance(outputs, dict) and "loss" in outputs:
                outputs["loss"] = loss
        return (loss, outputs) if return_outputs else loss

    @property
    def counts_items(self) -> bool:
        """Whether the loss is told the number of labels in an update."""
        return self.compute_loss_func is not None or self.model_accepts_loss_kwargs

    def count_items(self, batch: Any) -> Any:
        """The labels in a batch that count, as a number or a tensor; None if it has none.

        Where a subclass overrides it, evaluations are means over these items, whatever the batch size, too. Otherwise
        the losses of batches are weighted by their rows, as in transformers' Trainer.
        """
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor):
            return None
        return ((labels[..., 1:] if knowledge.leaves_out_first_label(self.model) else labels) != PADDING).sum()

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[Any]:
        """The context of `compute_loss`. Mixed precision needs none: it is part of the model's forward."""
        return contextlib.nullcontext()

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> float:
        """Estimate the operations of the forward and backward pass of a batch: 6 per token and parameter that is not
        an embedding; 0.0 if the model does not know their number.
        """
        tokens = inputs.get(knowledge.main_input_name(self.model))
        if not isinstance(tokens, torch.Tensor) or not hasattr(self.model, "num_parameters"):
            return 0.0
        return 6.0 * tokens.numel() * int(self.model.num_parameters(exclude_embeddings=True))

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model from `model_init`, which may take the trial."""
        assert self.model_init is not None
        needs_trial = any(
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            for parameter in inspect.signature(self.model_init).parameters.values()
        )
        model = self.model_init(trial) if needs_trial else self.model_init()
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(f"`model_init` returned {model!r}, which is not an nn.Module. Return a new model.")
        return model

    # -------------------------------------------------------------------------------------------- optimizer, schedule

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make `optimizer` and `lr_scheduler`, unless they exist. Override this, or one of the two methods it calls.

        What an override returns without assigning it is used, too.
        """
        optimizer = self.create_optimizer()
        self.optimizer = optimizer if self.optimizer is None else self.optimizer
        # Many take the number of steps alone.
        arguments: dict[str, Any] = (
            {"optimizer": self.optimizer} if knowledge.takes(self.create_scheduler, "optimizer") else {}
        )
        schedule = self.create_scheduler(num_training_steps=num_training_steps, **arguments)
        self.lr_scheduler = schedule if self.lr_scheduler is None else self.lr_scheduler

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make `optimizer` for the trainable parameters of the model, unless it exists, and return it."""
        if self.optimizer is None:
            model = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(model))
            groups: Any = [{"params": [], "weight_decay": decay} for decay in (self.args.weight_decay, 0.0)]
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    groups[name not in decayed]["params"].append(parameter)
            kind, given = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
            arguments = dict(given)
            for name in ("params", "model", "optimizer_dict"):  # under which subclasses give groups of their own
                groups = arguments.pop(name, groups)
            if arguments.get("optim_bits") == 8 and kind.__module__.partition(".")[0] == "bitsandbytes":
                optimizing.extras().keep_embeddings_whole(model)
            self.optimizer = kind(groups, **arguments)
        return self.optimizer  # type: ignore[no-any-return]

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make `lr_scheduler` for a run of this many updates, unless it exists, and return it."""
        optimizer = self.optimizer if optimizer is None else optimizer
        if self.lr_scheduler is None:
            self.lr_scheduler = optimizing.make_schedule(
                self.args.lr_scheduler_type,
                optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                arguments=self.args.lr_scheduler_kwargs,  # type: ignore[arg-type]  # a dict by now
            )
        return self.lr_scheduler

    def _move_model_to_device(self, model: Any, device: torch.device) -> Any:
        """Move a new model to the device of this process. Override it for one that is in its place."""
        return model.to(device)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """The parameters with weight decay: all but biases and the parameters of norm layers."""
        exempt = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            for name, _ in module.named_parameters(recurse=False)
            if "bias" in name or "norm" in type(module).__name__.lower()
        }
        return [name for name, _ in model.named_parameters() if name not in exempt]

    get_optimizer_cls_and_kwargs = staticmethod(optimizing.get_optimizer_cls_and_kwargs)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in existing_optimizer(self).param_groups]

    def get_optimizer_group(self, param: str | torch.Tensor | None = None) -> Any:
        """The optimizer's group with a parameter, given itself or by name; by default the parameters of all groups.

        Raises:
            ConfigurationError: a ValueError, without an optimizer, or if no group has it.
        """
        groups = existing_optimizer(self).param_groups
        if param is None:
            return [group["params"] for group in groups]
        wanted = dict(self.model.named_parameters()).get(param) if isinstance(param, str) else param
        for group in groups:
            if any(one is wanted for one in group["params"]):
                return group
        raise ConfigurationError(f"{param!r:.100} is in no group of the optimizer, or is not a parameter of the model.")

    def get_num_trainable_parameters(self) -> int:
        """The number of trainable numbers in the model."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    # ----------------------------------------------------------------------------------------------------------- data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of a training run, with all rows: the engine distributes them over the processes."""
        knowledge.refuse_missing(self.train_dataset, "train on", "train_dataset")
        return self._get_dataloader(
            self.train_dataset,
            "Training",
            self._train_batch_size,
            sampler_fn=lambda dataset: self._get_train_sampler(),  # older scripts override it without a parameter
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The loader of an evaluation: every row once, in order. With persistent workers, each dataset keeps its own.

        Args:
            eval_dataset: a dataset, or the name of one in the dict ``self.eval_dataset``; default: that itself.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            dataset = self.eval_dataset[eval_dataset]
        knowledge.refuse_missing(dataset, "evaluate", "eval_dataset")
        if not self.args.dataloader_persistent_workers:
            return self.get_test_dataloader(dataset)
        kept = self._eval_dataloaders
        # With its dataset, so that no other one can get its address.
        pair = kept.pop(id(dataset), None) or (dataset, self.get_test_dataloader(dataset))
        kept[id(dataset)] = pair
        for oldest in list(kept)[:-_MAX_EVALUATION_LOADERS]:
            del kept[oldest]
        return pair[1]

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """The loader of a prediction: every row once, in order."""
        if test_dataset is None:
            knowledge.refuse_missing(test_dataset, "predict", "test_dataset")
        return self._get_dataloader(
            test_dataset, "Evaluation", self.args.eval_batch_size, sampler_fn=self._get_eval_sampler
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """The order of the training rows; None for a dataset that has its own."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return None
        if self.args.train_sampling_strategy == SamplingStrategy.SEQUENTIAL:
            return SequentialSampler(dataset)
        if self.args.train_sampling_strategy == SamplingStrategy.RANDOM:
            return RandomSampler(dataset)
        module = require("pytorch_accelerated.extras.huggingface.lengths", needed_by="`train_sampling_strategy`")
        lengths = module.row_lengths(dataset, self.args.length_column_name, knowledge.main_input_name(self.model))
        # Rows are sorted within a pool: an update, or as many as make rows of similar length and epochs that differ.
        pool = self.get_total_train_batch_size(self.args)
        if self.args.train_sampling_strategy == SamplingStrategy.GROUP_BY_LENGTH:
            pool = _BATCHES_PER_POOL * pool // self._engine.ranks.count
        return module.LengthGroupedSampler(lengths, pool)  # type: ignore[no-any-return]

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """The order of the rows of an evaluation; None for the dataset's."""
        return None

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Sampler[int] | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        """A loader of all rows. Its ``total_batch_size`` is the number of rows of a batch over all processes.

        Args:
            dataset: the rows.
            description: what they are for, for overriding methods, as is `dataloader_key`.
            batch_size: rows of a batch on one process.
            sampler_fn: returns the order of the dataset; default: the order of the rows.
            is_training: whether rows that don't fill a batch may be left out, if the arguments say so.
        """
        args, collator = self.args, self.data_collator
        used = self._remove_unused_columns(dataset, description)
        if used is dataset:
            collator = self._get_collator_with_removed_columns(collator, description)
        is_stream = isinstance(used, IterableDataset)
        if not is_stream and not hasattr(used, "__getitem__"):
            kind = type(used).__name__
            raise DataError(f"A {kind} has no rows by number. Make a list of it, or an `IterableDataset`.")
        of_rows: dict[str, Any] = {}
        if not is_stream:
            drops = is_training and args.dataloader_drop_last  # in an evaluation no row is left out of a metric
            of_rows = {"sampler": None if sampler_fn is None else sampler_fn(dataset), "drop_last": drops}
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
        loader.total_batch_size = batch_size * self._engine.ranks.count
        return loader

    def _set_signature_columns_if_needed(self) -> None:
        """Set ``_signature_columns``, the columns to keep. Override it to keep others."""
        if self._signature_columns is None:
            self._signature_columns = knowledge.signature_columns(self.model, self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """`dataset` without the columns that the model does not take, if it is one of `datasets`."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        return knowledge.without_unused_columns(dataset, self._signature_columns or ())

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """`data_collator`, with the columns removed that the model does not take."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        return knowledge.RemoveColumnsCollator(data_collator, self._signature_columns or ())

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The rows of an update, over all processes."""
        return self._train_batch_size * Accumulation.of(args).batches(1) * self._engine.ranks.count

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, float, int, int, int]:
        """The length of a run. An override may change the first and the last number, which the run goes by.

        Returns:
            The epochs, begun ones too; the updates of an epoch; the rows of an epoch, of the run and of an update; the
            batches of an epoch on a process; the updates of the run. Without a length, the run is one epoch of
            `max_steps` as far as updates, rows and batches go.
        """
        rows, limit = self.get_total_train_batch_size(args), args.max_steps
        batches = dataloader.num_batches if isinstance(dataloader, RunLoader) else length_of(dataloader)
        if batches is None:
            return sys.maxsize, limit, rows * limit, rows * limit, rows, Accumulation.of(args).batches(limit), limit
        if not isinstance(dataloader, RunLoader):  # has the rows of all processes
            batches = -(-batches // self._engine.ranks.count)
        updates, examples = Accumulation.of(args).updates(batches), self.num_examples(dataloader)
        if limit > 0:
            return -(-limit // max(1, updates)), updates, examples, limit * rows, rows, batches, limit
        epochs = args.num_train_epochs
        return math.ceil(epochs), updates, examples, examples * epochs, rows, batches, math.ceil(epochs * updates)

    def num_examples(self, dataloader: Any) -> int:
        """Rows of one pass over `dataloader`, over all processes."""
        dataset = getattr(dataloader, "dataset", None)
        if dataset is not None and hasattr(dataset, "__len__"):
            return len(dataset)
        return len(dataloader) * (getattr(dataloader, "batch_size", None) or 1)


def loss_takes_labels(trainer: TrainerHooks) -> bool:
    """Whether the loss is computed from outputs and labels, so that the model itself gets no labels."""
    return trainer.label_smoother is not None or trainer.compute_loss_func is not None


def existing_optimizer(trainer: TrainerHooks) -> Any:
    """The optimizer, or a ConfigurationError, a ValueError, without one."""
    if trainer.optimizer is None:
        raise ConfigurationError("There is no optimizer yet: it is made when the training begins.")
    return trainer.optimizer
