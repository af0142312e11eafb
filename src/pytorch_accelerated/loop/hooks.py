"""The parts of a run that a subclass of `Trainer` may override, each with its default."""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.data.building import build_loader, default_loader_kwargs, effective_kwargs, refuse_empty
from pytorch_accelerated.data.counting import Counter, counter_of, rows_left
from pytorch_accelerated.data.updates import Loaders
from pytorch_accelerated.facts.names import GivenArgument, GivenArguments, is_users_class, knows_other_names
from pytorch_accelerated.facts.order import HOOKS
from pytorch_accelerated.facts.run_state import RunState
from pytorch_accelerated.facts.settings import TrainSettings
from pytorch_accelerated.loop.batches import batch_loss, batch_predictions
from pytorch_accelerated.loop.context import Asked, Context, view
from pytorch_accelerated.loop.handler import CallbackHandler
from pytorch_accelerated.loop.own_parts import first_context
from pytorch_accelerated.loop.starting import new_context
from pytorch_accelerated.loop.states import States
from pytorch_accelerated.ranks.accelerators import Accelerator, create_accelerator, given_accelerator
from pytorch_accelerated.ranks.optimizers import as_one, create_schedules
from pytorch_accelerated.ranks.ranks import Ranks, limit_of_waiting
from pytorch_accelerated.record.bars import print_above_bars
from pytorch_accelerated.record.history import InMemoryRunHistory, RunHistory
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.run_config import TrainerRunConfig


class TrainerHooks:
    """The override points of `Trainer`, and the attributes that they work on.

    Methods whose name begins with `create`, `calculate`, `count` or `get` return a value; the others change state.
    `Trainer.explain` shows when each is called. Takes the arguments of `Trainer`.
    """

    #: Names of events that a subclass fires itself, for `explain`, and if they resemble built-in ones.
    custom_events: tuple[str, ...] = ()
    model = view("parts.model")
    optimizer = view("parts.optimizer")
    scheduler = view("parts.scheduler")
    run_history: RunHistory = view("parts.history")
    run_state: RunState = view("parts.state")
    run_config: TrainerRunConfig = view("parts.config")
    callback_handler: CallbackHandler = view("parts.callbacks")
    _accelerator: Accelerator = view("parts.accelerator")
    _ranks: Ranks = view("parts.ranks")
    _loss_tracker = view("parts.reports.losses")
    _train_dataloader = view("parts.loaders.train")
    _eval_dataloader = view("parts.loaders.eval")
    _train_dl_kwargs = view("parts.loaders.train_kwargs")
    _eval_dl_kwargs = view("parts.loaders.eval_kwargs")
    seed = GivenArgument()
    mixed_precision = GivenArgument()
    compile_model = GivenArgument()
    inference_mode = GivenArgument()
    timeout = GivenArgument()
    lanes = GivenArgument()
    _batch_samples: int | None = None  # of the batch that a hook is computing, as far as the loader knows
    _counters: Mapping[str, Counter | None] = {}  # what counts the items of a batch that an override passes on to ours
    _kind_of_states = States
    _makes_optimizer = False  # True if a subclass creates the optimizer when a run starts

    @functools.cached_property
    def run_context(self) -> Context:
        """What the current or last call holds; made at first use, since a subclass may assign attributes before our
        constructor.
        """
        return first_context(self)

    @knows_other_names
    def __init__(
        self,
        model: nn.Module,
        loss_func: Callable[..., Any] | None,
        optimizer: torch.optim.Optimizer | Sequence[Any] | Mapping[str, Any] | Any,
        callbacks: Iterable[Any] = (...,),
        run_history: RunHistory | None = None,
        *,
        metrics: Any = None,
        seed: int | None = None,
        mixed_precision: str | None = None,
        compile_model: bool | Mapping[str, Any] = False,
        accelerator: Accelerator | Callable[[], Accelerator] | None = None,
        inference_mode: bool = False,
        timeout: float | None = None,
        lanes: int | None = None,
    ) -> None:
        self.run_context.asked.given = GivenArguments(
            seed, mixed_precision, compile_model, accelerator, inference_mode, timeout, lanes
        )
        self.run_context.parts.loaders = Loaders()
        self.model = model
        self.loss_func = loss_func
        self.optimizer = as_one(optimizer)
        self.run_history = run_history if run_history is not None else InMemoryRunHistory()
        self.scheduler = None
        self.create_scheduler_fn: Any = None
        self.collate_fn: Callable[..., Any] | None = None
        self.train_dataset: Any = None
        self.eval_dataset: Any = None
        self._callbacks = self._choose_callbacks(callbacks, metrics)
        self._pad_uneven_eval_batches = False  # scripts read it; nothing is padded
        self._accelerator = self._create_accelerator()
        self._ranks = Ranks(self._accelerator, timeout=limit_of_waiting(timeout))
        self.callback_handler = self._create_callback_handler()
        self._precision_at_start = str(self._accelerator.mixed_precision)
        self.run_context = self._create_context(TrainSettings(num_epochs=1))
        warn_about_misspelt_hooks(self, self._ranks)
        self.callback_handler.call_event("on_init_end", self)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on the first process of each node."""
        print_above_bars(self._ranks, *args, **kwargs)

    # --------------------------------------------------------------------------------------------------------- set-up

    def _create_accelerator(self) -> Accelerator:
        """The accelerate object behind this trainer."""
        given = self.run_context.asked.given
        limit = limit_of_waiting(given.timeout)
        if given.accelerator is None:
            return create_accelerator(given.mixed_precision, timeout=limit)
        return given_accelerator(given.accelerator, limit)

    def _choose_callbacks(self, callbacks: Iterable[Any], metrics: Any) -> list[Any]:
        """The callbacks, with the default ones in place of ``...``."""
        raise NotImplementedError

    def _create_callback_handler(self) -> CallbackHandler:
        """The handler of the callbacks given to the constructor."""
        return CallbackHandler(self._callbacks, custom_events=self.custom_events)

    def _create_context(self, settings: TrainSettings) -> Context:
        """What a call with `settings` works with."""
        context = new_context(self.run_context, settings, self._kind_of_states)
        context.asked.count_items = self.count_batch_items if overrides(self, "count_batch_items") else None
        return context

    def create_train_dataloader(
        self, batch_size: int, train_dl_kwargs: Mapping[str, Any] | None = None
    ) -> Iterable[Any]:
        """The training loader: any iterable of batches. A torch `DataLoader` is distributed over the ranks.

        Args:
            batch_size: samples of a batch on one rank; a `batch_size` in `train_dl_kwargs` takes precedence.
            train_dl_kwargs: override the defaults.
        """
        defaults = self.get_default_train_dl_kwargs(batch_size)
        self._train_dl_kwargs = effective_kwargs(defaults, train_dl_kwargs)
        return build_loader(self.train_dataset, defaults, train_dl_kwargs, self.collate_fn)

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Mapping[str, Any] | None = None) -> Iterable[Any]:
        """The evaluation loader; see `create_train_dataloader`."""
        defaults = self.get_default_eval_dl_kwargs(batch_size)
        self._eval_dl_kwargs = effective_kwargs(defaults, eval_dl_kwargs)
        return build_loader(self.eval_dataset, defaults, eval_dl_kwargs, self.collate_fn)

    def get_default_train_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Default keyword arguments of the training `DataLoader`."""
        return default_loader_kwargs(self.train_dataset, batch_size=batch_size, shuffle=True)

    def get_default_eval_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Default keyword arguments of the evaluation `DataLoader`."""
        return default_loader_kwargs(self.eval_dataset, batch_size=batch_size, shuffle=False)

    def create_scheduler(self) -> Any:
        """The scheduler of the run, or None. The run config and the loaders exist when this is called."""
        if self.create_scheduler_fn is None:
            return None
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return create_schedules(self, self.create_scheduler_fn, optimizer)

    def count_batch_items(self, batch: Any) -> int | None:
        """The number of items that the mean loss of a batch is taken over, if these are not samples but, for example,
        tokens.

        An override is called for each batch in host memory, in training and in evaluation. Gradients and recorded
        losses are then means per item, however the items are distributed over batches. Return an integer, or None for
        samples. If the number is known only later, return ``num_items_in_batch`` from `calculate_train_batch_loss` and
        `calculate_eval_batch_loss` instead; if that is a tensor, each update waits for the device once.
        """
        return None

    def _check_eval_batch_size(self) -> None:
        """Reject an evaluation without batches. Any batch size works with any number of ranks."""
        refuse_empty(self._eval_dataloader, "evaluate")

    # ------------------------------------------------------------------------------------------------------------ run

    def training_run_start(self) -> None:
        """A training run begins."""

    def training_run_epoch_end(self) -> None:
        """An epoch of a training run and its evaluation have ended."""

    def training_run_end(self) -> None:
        """A training run has ended, possibly after an early stop."""

    def evaluation_run_start(self) -> None:
        """`evaluate` begins."""

    def evaluation_run_end(self) -> None:
        """`evaluate` ends."""

    # ------------------------------------------------------------------------------------------------- training epoch

    def train_epoch_start(self) -> None:
        """A training epoch begins. The loop has called ``self.model.train()``; for other modes, set them here."""
        self.model.train()  # where a loop of the user's own calls this

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        """The loss of a training batch.

        Args:
            batch: the batch, on the trainer's device.

        Returns:
            A dict with `loss` (the mean over the batch, a 0-dim tensor), `model_outputs` and `batch_size`; optionally
                `num_items_in_batch`, if the mean is not taken over samples (then for every batch); `batch`, if the loss
                was computed from another one, as with mixup, for metrics by name; and anything else that callbacks
                should see.
        """
        hook = "calculate_train_batch_loss"
        if hook in self._counters:
            return self._counted_loss(batch, hook)
        return batch_loss(self.model, self.loss_func, batch, self._batch_samples, hook=hook)

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        """Add the gradients of one batch. `step` counts batches of this rank in the epoch, from 0."""
        self.run_context.control.training.step.compute(batch, step)

    def _update_loss_tracker(self, batch_loss: torch.Tensor, batch_size: Any) -> None:
        """Add the mean loss of a batch to the epoch's. Does not wait for the device."""
        self.run_context.parts.reports.losses.update(batch_loss, batch_size)

    def backward_step(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, which is already weighted by its share of the update."""
        accelerator = self._accelerator
        if accelerator.scaler is None and getattr(accelerator, "deepspeed_engine_wrapped", None) is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            accelerator.backward(loss)

    def _clip_gradients(self) -> None:
        """Clip the complete gradient, once per update."""
        self.run_context.control.training.step.clip()

    def optimizer_step(self) -> None:
        """Update the parameters."""
        self.optimizer.step()

    def scheduler_step(self) -> None:
        """Step the scheduler: once per applied update, or once per epoch if `step_scheduler` says so.

        A `ReduceLROnPlateau` is not stepped here, but after each evaluation.
        """
        if self.scheduler is not None and not isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step()

    def optimizer_zero_grad(self) -> None:
        """Set the gradients to None."""
        self.optimizer.zero_grad()

    def train_epoch_end(self) -> None:
        """A training epoch has ended; its loss is recorded next."""

    # ----------------------------------------------------------------------------------------------- evaluation epoch

    def eval_epoch_start(self) -> None:
        """An evaluation begins. The loop has called ``self.model.eval()``; for other modes, set them here."""
        self.model.eval()  # where a loop of the user's own calls this

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """The loss of an evaluation batch, without gradients; see `calculate_train_batch_loss`."""
        hook = "calculate_eval_batch_loss"
        if hook in self._counters:
            return self._counted_loss(batch, hook)
        return batch_loss(self.model, self.loss_func, batch, self._batch_samples, hook=hook)

    def _counted_loss(self, batch: Any, hook: str) -> dict[str, Any]:
        """The result of a default hook that an override has called, perhaps with a part of the batch."""
        output = batch_loss(self.model, self.loss_func, batch, rows_left(batch, self._batch_samples), hook=hook)
        counter = self._counters[hook]
        items = None if counter is None else counter.count(batch, self._batch_samples)
        counts = {} if items is None else {"num_items_in_batch": items}
        return {**output, **counts, "batch": batch}

    def eval_epoch_end(self) -> None:
        """An evaluation has ended; its loss is recorded next."""

    def calculate_predict_batch_outputs(self, batch: Any) -> Any:
        """The predictions of a batch, without gradients.

        By default, the model receives a tensor, the first item of a tuple or list, or the entries of a dict by name,
        without labels.

        Returns:
            A tensor, or nested tuples, lists and dicts of tensors, with one row per sample; or a list with one result
                per sample.
        """
        return batch_predictions(self.model, batch, hook="calculate_predict_batch_outputs")


def own_hooks(trainer: TrainerHooks, hooks: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """The versions of `hooks`, methods of `TrainerHooks`, that a subclass or this trainer has, by name."""
    methods = {hook: getattr(trainer, hook) for hook in hooks}
    return {
        hook: method
        for hook, method in methods.items()
        if getattr(method, "__func__", None) is not getattr(TrainerHooks, hook)
    }


def overrides(trainer: TrainerHooks, hook: str) -> bool:
    """Whether a subclass or this trainer overrides the method of `TrainerHooks`."""
    return bool(own_hooks(trainer, [hook]))


def counter_for(trainer: TrainerHooks, asked: Asked, loader: Any, hook: str) -> Counter | None:
    """What counts the items of the batches that `hook` gets; None if they are the rows that the loader counts."""
    is_predicting = hook == "calculate_predict_batch_outputs"
    if (count := asked.count_items) is not None and not is_predicting:
        return Counter(lambda batch, samples: count(batch), are_tokens=True)
    counter = counter_of(None if is_predicting else trainer.loss_func, loader)
    if not overrides(trainer, hook):
        return counter
    trainer._counters = {**trainer._counters, hook: counter}
    return None


def warn_about_misspelt_hooks(trainer: TrainerHooks, ranks: Ranks) -> None:
    """Warn about methods of the user's subclasses whose names resemble a hook's but are never called."""
    for kind in type(trainer).__mro__:
        if not issubclass(kind, TrainerHooks) or not is_users_class(kind):
            continue
        for name, value in vars(kind).items():
            # Properties and private helpers are the user's own, and so are overrides of methods of another base.
            is_plain = isinstance(value, types.FunctionType) and not name.startswith("_")
            if not is_plain or any(hasattr(base, name) for base in kind.__bases__):
                continue
            # Names such as `calculate_test_batch_loss` are less similar, and intended.
            for hook in difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.92):
                warn_user(ranks, f"{kind.__name__}.{name} is not called: no hook has that name. Did you mean {hook!r}?")
