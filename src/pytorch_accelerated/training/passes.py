"""Evaluation and prediction: every sample once, without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from pytorch_accelerated.callbacks.handler import CallbackHandler
from pytorch_accelerated.data.updates import Loaders, Round
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.models.wrappers import for_evaluation
from pytorch_accelerated.prediction.collecting import PredictionCollector
from pytorch_accelerated.processes.ranks import Ranks
from pytorch_accelerated.seeding import generator_states, restore_generator_states
from pytorch_accelerated.steps.hook_output import loss_and_size
from pytorch_accelerated.training.emitting import Emitter
from pytorch_accelerated.training.hooks import TrainerHooks, own_events

Record = Callable[[Any, Any], None]


class Passes:
    """Computes the rounds of evaluations and predictions.

    Args:
        hooks: the trainer, whose hooks are called.
        emitter: calls callbacks and hooks.
        ranks: the processes.
        without_gradients: returns a context for all computations of a pass.

    Attributes:
        start: the position of the first sample of the batch that is being evaluated, in the whole evaluation; None if
            no batch is, or a loop of the user's own goes through the batches.
    """

    def __init__(
        self,
        hooks: TrainerHooks,
        emitter: Emitter,
        ranks: Ranks,
        without_gradients: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._hooks = hooks
        self._emitter = emitter
        self._ranks = ranks
        self.without_gradients = without_gradients
        self.start: int | None = None
        # Several ranks finish a pass together; a single one may abandon it.
        self.emit = emitter.emit_at_once if ranks.count == 1 else emitter.emit

    def evaluate(self, round_: Round, record: Record) -> None:
        """Compute the loss of a round.

        Args:
            round_: one batch per rank.
            record: receives the mean loss of the batch, and the number of items that it is the mean of.
        """
        acts_at = self._hooks.callback_handler.acts_at
        if acts_at["on_eval_step_start"]:
            self.emit("on_eval_step_start")
        hook = self._hooks.calculate_eval_batch_loss
        output = self._emitter.output_of(hook, round_.batch, round_.samples, round_.start)
        loss, size = loss_and_size(output, hook="calculate_eval_batch_loss")
        record(loss, size if round_.items is None else round_.items)
        if acts_at["on_eval_step_end"]:
            self.emit("on_eval_step_end", batch=round_.batch, batch_output=output)

    def predict(self, round_: Round, collector: PredictionCollector) -> None:
        """Compute the predictions of a round and collect them."""
        hook = self._hooks.calculate_predict_batch_outputs
        predictions = self._emitter.output_of(hook, round_.batch, round_.samples, round_.start)
        collector.add(round_.start, predictions, round_.samples)
        self.emit("on_prediction_step_end", batch=round_.batch, predictions=predictions)

    @contextlib.contextmanager
    def on_bare_model(self, *, restore_modes: bool) -> Iterator[None]:
        """Use the model without its wrapper, which would wait for ranks that have no batch.

        Args:
            restore_modes: whether to restore the training or evaluation mode of the modules afterwards.
        """
        hooks = self._hooks
        wrapped = hooks.model
        hooks.model = for_evaluation(wrapped)
        if self._ranks.count > 1:
            # Each rank has its own batch statistics.
            self._ranks.copy_from_first(list(hooks.model.buffers()))
        modes = [(module, module.training) for module in hooks.model.modules()] if restore_modes else []
        generators = generator_states()
        try:
            yield
        except StopTrainingError:
            restore_generator_states(generators)  # a resumed run repeats this pass
            raise
        finally:
            for module, is_training in modes:
                module.training = is_training
            hooks.model = wrapped

    @contextlib.contextmanager
    def on_other_model(self, model: nn.Module, *, metric_name_prefix: str, callbacks: Iterable[Any]) -> Iterator[None]:
        """Make the trainer's hooks use another model and other callbacks, and record under other names."""
        hooks = self._hooks
        own_model, own_handler, own_prefix = hooks.model, hooks.callback_handler, hooks.run_history.metric_name_prefix
        hooks.model = model
        hooks.callback_handler = CallbackHandler(callbacks, custom_events=own_events(hooks))
        hooks.run_history.set_metric_name_prefix(metric_name_prefix)
        try:
            yield
        finally:
            hooks.model, hooks.callback_handler = own_model, own_handler
            hooks.run_history.set_metric_name_prefix(own_prefix)


class EvaluationSets:
    """Makes one evaluation set after the other the current one.

    Args:
        hooks: the trainer.
        loaders: those of the run, with the loader of each set.
    """

    def __init__(self, hooks: TrainerHooks, loaders: Loaders) -> None:
        self._hooks = hooks
        self._loaders = loaders

    @property
    def names(self) -> list[str]:
        """The names of the sets; one empty name if there is one set, which has none."""
        return list(self._loaders.eval_sets) or [""]

    @property
    def is_last(self) -> bool:
        """Whether, in an evaluation, no other set comes after the current one."""
        return self._hooks.run_state.evaluated_sets + 1 >= len(self.names)

    @contextlib.contextmanager
    def current(self, name: str) -> Iterator[None]:
        """Context in which the loader, the trainer's `eval_dataset` and the names of metrics are those of a set."""
        if not name:
            yield
            return
        hooks, loaders = self._hooks, self._loaders
        given, first = hooks.eval_dataset, (loaders.eval, loaders.eval_kwargs)
        hooks.eval_dataset = loaders.eval_sets[name]
        loaders.eval, loaders.eval_kwargs = loaders.further_eval.get(name, first)
        try:
            with hooks.run_history.measuring_on(name):
                yield
        finally:
            hooks.eval_dataset = given
            if name in loaders.further_eval:
                loaders.further_eval[name] = loaders.eval, loaders.eval_kwargs
                loaders.eval, loaders.eval_kwargs = first

    def evaluate_each(self, evaluate: Callable[..., None], **kwargs: Any) -> None:
        """Call `evaluate` with the loader of each set, in order. A resumed run leaves out those done before.

        Args:
            evaluate: evaluates a loader.
            kwargs: its other arguments.
        """
        state, names = self._hooks.run_state, self.names
        if state.evaluated_sets >= len(names):  # there were more in the run that is resumed
            state.evaluated_sets = 0
        for name in names[state.evaluated_sets :]:
            with self.current(name):
                evaluate(self._loaders.eval, **kwargs)
            state.evaluated_sets += 1
        state.evaluated_sets = 0
