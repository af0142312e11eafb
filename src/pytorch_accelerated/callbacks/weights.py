"""Averages of the weights, computed and saved while training."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.callbacks.saving import SaveBestModelCallback, tell_of_earlier
from pytorch_accelerated.callbacks.stopping import KINDS_OF_BEST
from pytorch_accelerated.errors import ConfigurationError, DuplicateCallbackError, NonFiniteLossError, require_kinds
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.ranks.averaging import ModelEma, ShardedEma
from pytorch_accelerated.ranks.compat.torch import is_batch_norm
from pytorch_accelerated.ranks.keeping import kept
from pytorch_accelerated.ranks.sharding import has_shards, whole
from pytorch_accelerated.record.text import folded, format_count
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.states.weights import canonical_state_dict, check_model_finite, load_canonical

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer


class ModelEmaCallback(SaveBestModelCallback):
    """Keeps an exponential moving average of the model's weights, and saves the best one.

    The average starts as a copy of the model when a run begins, and is updated after each applied optimizer update. It
    is evaluated after each evaluation of the model; the names of its metrics begin with its own name. Training states
    contain the average, so a resumed run continues it. The trainer's own model is never changed.

    The file has the average as ``model_state_dict``, for `Trainer.load_checkpoint`, but no state of the optimizer or
    scheduler, because they belong to the model itself.

    On two or more ranks, the averages of parameters are equal. Averages of buffers that each rank has for itself (the
    statistics of BatchNorm) differ; rank 0's are evaluated and saved. Of a sharded model, each rank averages its
    own parts, and the average takes the model's place while it is evaluated and saved.

    >>> callbacks = [..., ModelEmaCallback(decay=0.999, save_path="ema.pt")]

    Args:
        decay: the weight of the past, in [0, 1).
        evaluate_during_training: whether to evaluate the average and save the best one. Otherwise, the average is saved
            at the end of the run.
        save_path: the path of the file.
        watch_metric: the metric that decides which average is the best.
        greater_is_better: whether larger values are better.
        model_ema: creates the average from the model and ``decay``; a subclass of `ModelEma` can have another rule.
        callbacks: classes or instances whose events are fired while the average is evaluated, besides the metrics of
            ``Trainer(metrics=...)``.
        name: of the average, with which its metrics begin, and after which its file is called. Multiple averages that
            have the same name are called after their files.

    Attributes:
        ema_model: the average, with its model as ``ema_model.module``; None before the first run.
        best_metric: the best value so far, or None.
        best_metric_epoch: the epoch of the best value, from 1, or None.

    Source: Tarvainen and Valpola (2017), "Mean teachers are better role models", arXiv 1703.01780.
    """

    ranks_agree_after_each_update = False

    _ema_model: Any = None  # a `ModelEma`, or a `ShardedEma`
    _loaded_weights: dict[str, Any] | None = None
    _applied_updates = 0
    _is_finished = True  # whether the average can be evaluated: in `SWACallback` only when its last epoch is in it

    recorded_names = None  # what metrics measure on the averages, too

    def __init__(
        self,
        decay: float = 0.99,
        evaluate_during_training: bool = True,
        save_path: str | Path | None = None,
        watch_metric: str | None = None,
        greater_is_better: bool = False,
        model_ema: Callable[..., ModelEma] = ModelEma,
        callbacks: Iterable[Any] = (),
        name: str = "ema_model",
    ) -> None:
        path, metric = save_path or f"{name}.pt", watch_metric or f"{name}_eval_loss_epoch"
        super().__init__(path, metric, greater_is_better, load_saved_checkpoint=False)
        self.name = name
        self.save_optimizer = self.save_scheduler = False  # their states belong to the model itself
        self.decay = decay
        self.evaluate_during_training = evaluate_during_training
        self.model_ema = model_ema
        # Created once, because their state should outlast an evaluation.
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]

    @property
    def ema_model(self) -> Any:
        """The average, a `ModelEma`; None before the first run. That of a sharded model has no ``module``."""
        average = self._ema_model
        if average is not None and self._loaded_weights is not None:
            is_sharded = isinstance(average, ShardedEma)
            average.load(self._loaded_weights) if is_sharded else load_canonical(average, self._loaded_weights)
            self._loaded_weights = None
        return average

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Start the average with a copy of the model, or continue the average of the run that is being resumed."""
        averages = [each for each in trainer.callback_handler if isinstance(each, ModelEmaCallback)]
        same = [each for each in averages if each.name == self.name]
        for each in same if len(same) > 1 else ():
            metric = each.watch_metric.removeprefix(f"{each.name}_")
            each.name = Path(each.save_path).stem
            each.watch_metric = f"{each.name}_{metric}"
        if len({each.name for each in averages}) < len(averages):
            raise DuplicateCallbackError(f"Multiple averages are called {self.name!r}. Give each its own `name`.")
        if self._evaluates(trainer):
            super().on_training_run_start(trainer, **kwargs)
        elif trainer.run_state.updates == 0:
            self._refuse_shared_path(trainer.callback_handler)
            tell_of_earlier(trainer.print, [self._absolute(self.save_path)], "the average of this run will replace it")
        if trainer.run_state.updates == 0:
            self._loaded_weights = None
        self._ema_model = None
        self._average(trainer)

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Read how far the run is, because it may have returned to a training state."""
        self._applied_updates = trainer.run_state.applied_updates

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Update the average, unless the optimizer update was skipped. Does not wait for the device."""
        if trainer.run_state.applied_updates > self._applied_updates:
            self._applied_updates = trainer.run_state.applied_updates
            with trainer.run_context.parts.mode.evaluating():
                self._average(trainer).update(trainer.get_model())

    def on_eval_epoch_end(self, trainer: Trainer, *, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Evaluate the average at the end of a training epoch."""
        is_training = trainer.run_context.parts.loaders.train is not None
        if is_training and not is_intermediate and self._is_finished and self._evaluates(trainer):
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        # The metrics of `Trainer(metrics=...)` are of every model that is evaluated.
        measures = [each for each in trainer.callback_handler if getattr(each, "measures_averages", False)]
        callbacks = [*self.callbacks, *(each for each in measures if each not in self.callbacks)]
        evaluate = trainer.run_context.control.evaluation_sets.evaluate_other_model
        with self._as_module(trainer) as module:
            evaluate(module, metric_name_prefix=f"{self.name}_", callbacks=callbacks)

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Save the average if it is the best so far."""
        if self._is_finished and self._evaluates(trainer):
            super().on_training_run_epoch_end(trainer, **kwargs)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Save the average if it was never evaluated."""
        self._tell_of_lost(trainer.run_context.parts.ranks)
        if not self._evaluates(trainer):
            self._save_at_end(trainer)

    def _save_at_end(self, trainer: Trainer) -> None:
        if not isinstance(self._average(trainer), ShardedEma):
            trainer.run_context.parts.ranks.copy_from_first(list(self._average(trainer).buffers()))
        try:
            self._save(trainer, {})
        except NonFiniteLossError as error:
            warn_user(
                trainer.run_context.parts.ranks,
                f"The average of the weights was not saved to {self.save_path}. {error}",
            )

    def state_dict(self) -> dict[str, Any]:
        """The average and the best value so far."""
        average = self.ema_model
        weights = None
        if average is not None:
            weights = average.averages if isinstance(average, ShardedEma) else dict(canonical_state_dict(average))
        return {**super().state_dict(), "ema_model": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the average of the run that is being resumed."""
        super().load_state_dict(state)
        require_kinds(state, {"ema_model": (dict, OrderedDict, type(None))}, of=type(self).__name__)
        self._loaded_weights = state["ema_model"]  # a resumed run loads states before it makes the average

    def _evaluates(self, trainer: Trainer) -> bool:
        """Whether the run evaluates the average, and saves it if it is the best."""
        return self.evaluate_during_training

    def _average(self, trainer: Trainer) -> Any:
        if self._ema_model is None:
            model = trainer.get_model()
            kind = ShardedEma if self.model_ema is ModelEma and has_shards(model) else self.model_ema
            self._ema_model = kind(model, decay=self.decay)
        return self.ema_model

    @contextlib.contextmanager
    def _as_module(self, trainer: Trainer) -> Iterator[Any]:
        """The average as a module: its own one, or the sharded model of the run with the average in it."""
        average = self._average(trainer)
        if isinstance(average, ShardedEma):
            with average.in_place_of(trainer.get_model()):
                yield trainer.model
        else:
            yield average.module

    def _save(self, trainer: Trainer, entries: dict[str, Any], state: Any = None) -> None:
        with self._as_module(trainer) as module:
            check_model_finite(module, trainer.run_context.parts.ranks)
            super()._save(trainer, {**entries, "model_state_dict": whole(canonical_state_dict(module))})


class SWACallback(ModelEmaCallback):
    """Averages the weights that the model has at the ends of the last epochs: stochastic weight averaging.

    The average is evaluated, if there is an evaluation set, and saved at the end of the run, also of one that ends
    early: by early stopping, another callback, a signal or a limit. Weights within an epoch don't belong to it. The
    names of its metrics begin with its own name. The statistics of its BatchNorm layers are computed again before, in
    one pass over the training data; for a sharded model they are averages, too. The trainer's own model is never
    changed. A rate that stays high, such as with torch's ``SWALR``, makes it useful.

    >>> callbacks = [..., SWACallback(start=0.75, save_path="swa.pt")]

    Args:
        start: the share of the epochs after which averaging begins, in [0, 1).
        evaluate_during_training: whether to evaluate the average on the evaluation set, if there is one.
        save_path, callbacks, name: see `ModelEmaCallback`.

    Attributes:
        averaged_epochs: of how many epochs it is the average.

    Raises:
        ConfigurationError: if `start` is outside [0, 1).

    Source: Izmailov et al. (2018), "Averaging weights leads to wider optima", arXiv 1803.05407.
    """

    _kinds = {**KINDS_OF_BEST, "averaged_epochs": (int,)}
    _is_finished = False
    on_optimizer_step_end = TrainerCallback.on_optimizer_step_end

    def __init__(
        self,
        start: float = 0.75,
        evaluate_during_training: bool = True,
        save_path: str | Path | None = None,
        callbacks: Iterable[Any] = (),
        name: str = "swa_model",
    ) -> None:
        if not 0 <= start < 1:
            raise ConfigurationError(f"`start` is {start}, but it is a share of the epochs: give 0 or more, below 1.")
        super().__init__(0.0, evaluate_during_training, save_path, callbacks=callbacks, name=name)
        self.start = start
        self.averaged_epochs = 0

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Start a new average, or continue the one of the run that is being resumed."""
        if trainer.run_state.updates == 0:
            self.averaged_epochs = 0
        self._is_finished = False
        super().on_training_run_start(trainer, **kwargs)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Add the weights of the epoch to the average; in the last epoch, compute the statistics of its BatchNorm."""
        done, epochs = trainer.run_state.epochs + 1, trainer.run_config.num_epochs or 1
        if done > self.start * epochs:
            average = self._average(trainer)
            average.decay = self.averaged_epochs / (self.averaged_epochs + 1)
            average.update(trainer.get_model())
            self.averaged_epochs += 1
        self._is_finished = trainer.run_context.is_last_epoch and self.averaged_epochs > 0
        if self._is_finished:
            self._refresh_statistics(trainer)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Finish the average of a run that has ended early, and save what was not evaluated."""
        if not self.averaged_epochs:
            trainer.print(f"No average was saved: the run has ended before {self.start:.0%} of its epochs were done")
        elif self._is_finished:
            super().on_training_run_end(trainer, **kwargs)
        else:
            self._refresh_statistics(trainer)
            if self._evaluates(trainer):
                self._evaluate(trainer)
            self._save_at_end(trainer)
            epochs = format_count(self.averaged_epochs, "epoch", "epochs")
            trainer.print(folded(f"The run ended early. Saved the average of {epochs} to {self.save_path}"))

    def _evaluates(self, trainer: Trainer) -> bool:
        return super()._evaluates(trainer) and trainer.eval_dataset is not None

    def _refresh_statistics(self, trainer: Trainer) -> None:
        """Compute the statistics of BatchNorm layers over the training data. All ranks take the first one's."""
        average, context = self._average(trainer), trainer.run_context
        module = nn.Module() if isinstance(average, ShardedEma) else average.module
        layers = [layer for layer in module.modules() if is_batch_norm(layer)]
        if not layers:
            return
        with kept() as before, torch.no_grad():
            before.generators()
            before.attributes(context.parts, model=module)
            for layer in layers:
                layer.reset_running_stats()  # type: ignore[operator]
                before.attributes(layer, momentum=None)  # the mean over all batches
                layer.train()
            for batch in context.parts.loaders.train:
                trainer.calculate_predict_batch_outputs(batch)
        module.eval()
        context.parts.ranks.copy_from_first(list(module.buffers()))
