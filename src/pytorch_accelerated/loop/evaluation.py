"""Evaluations and predictions: passes over data, batch by batch, without gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pytorch_accelerated.data.building import empty_loader_error, refuse_rearranged
from pytorch_accelerated.data.updates import Round, RunLoader
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.seeding import generator_states, restore_generator_states
from pytorch_accelerated.loop.context import Context, Parts
from pytorch_accelerated.loop.hook_output import loss_and_size
from pytorch_accelerated.loop.hooks import counter_for
from pytorch_accelerated.loop.preparing import distributed
from pytorch_accelerated.prediction.collecting import PredictionCollector
from pytorch_accelerated.prediction.padded import remove_padding
from pytorch_accelerated.prediction.stored import collect_predictions
from pytorch_accelerated.ranks.keeping import kept
from pytorch_accelerated.ranks.ranks import map_tensors
from pytorch_accelerated.ranks.sharding import has_shards
from pytorch_accelerated.ranks.wrappers import PARALLEL
from pytorch_accelerated.record.loss import LossTracker

# A number of batches, not of seconds: sums of losses must be divided at the same places in each run.
_ROUNDS_BETWEEN_READINGS = 64


class Pass:
    """One pass over data, of the model without what training wraps around it, in evaluation mode.

    Args:
        context: of the call, whose model is prepared. During the pass, it has the model and the losses of the pass.
    """

    def __init__(self, context: Context) -> None:
        control = context.control
        self.context = context
        # Multiple ranks finish a pass together; a single one may abandon it.
        self.emit = control.emitter.emit_at_once if context.parts.ranks.count == 1 else control.emitter.emit
        self._lanes = self._seed = None
        if context.asked.given.lanes is not None:
            self._lanes = require("pytorch_accelerated.loop.lanes", needed_by="`lanes`")
            key = "pass", context.asked.seed, context.parts.state.updates
            self._seed = self._lanes.seeder(context.parts.ranks.device, *key)

    @contextlib.contextmanager
    def going_on(self, *, restores_modes: bool) -> Iterator[None]:
        """Context manager for the whole pass.

        Args:
            restores_modes: whether to restore the training or evaluation mode of the modules afterwards.
        """
        context = self.context
        with context.parts.mode.evaluating(), kept() as before:
            model = context.parts.model
            model = model.module if isinstance(model, PARALLEL) else model  # it would wait for ranks without a batch
            before.attributes(context.parts, model=model)
            before.attributes(context.parts.reports, losses=LossTracker(), position_in_pass=None)
            if context.parts.ranks.count > 1:
                context.parts.ranks.copy_from_first(list(model.buffers()))  # each rank has its own batch statistics
            if restores_modes:
                before.modes(model)
            generators = generator_states()
            model.eval()
            try:
                yield
            except StopTrainingError:
                restore_generator_states(generators)  # a resumed run repeats this pass
                raise
            if self._lanes is not None:  # ranks have drawn for different rows
                restore_generator_states(generators)

    def without_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager for all computations of the pass."""
        return torch.inference_mode() if self.context.asked.given.inference_mode else torch.no_grad()

    def rounds(self, loader: Any, give_up: Callable[[str], BaseException], hook: str) -> Iterator[Round]:
        """The rounds over `loader` for a hook, until a signal: then `give_up` makes the error that is raised."""
        loader = distributed(self.context, loader, self.context.parts.loaders.eval_kwargs)
        counter = counter_for(self.context.trainer, self.context.asked, loader, hook)
        rounds = loader.rounds(borrows=self._is_sharded, count_items=counter)
        return self.context.control.stopping.until_signal(rounds, give_up)

    @property
    def _is_sharded(self) -> bool:
        """Whether no rank has a whole model, so that all of them go through it together."""
        prepared = self.context.parts.prepared
        return prepared is not None and has_shards(prepared.model)

    def output_of(self, hook: Callable[[Any], Any], round_: Round) -> Any:
        """The output of `hook` for the batch of a round; None on a rank without one."""
        # An idle rank runs the model on a batch that counts nowhere.
        if round_.has_empty_rank and self._is_sharded:
            uneven = self.context.parts.uneven
            with uneven.counting_nothing() if uneven and round_.is_idle else contextlib.nullcontext():
                output = self._output_of(hook, round_)
            return None if round_.is_idle else output
        return self.take_part(round_, lambda: self._output_of(hook, round_))

    def take_part(self, round_: Round, work: Callable[[], Any]) -> Any:
        """The result of `work`. While some ranks have no samples, they answer what the others gather in it."""
        uneven = self.context.parts.uneven
        if uneven is None or not round_.has_empty_rank:
            return work()
        return uneven.take_part(work, is_idle=round_.is_idle)

    def emit_of_batch(self, round_: Round, event: str, **kwargs: Any) -> None:
        """Emit an event of a round, which callbacks of other ranks may handle."""
        if round_.has_empty_rank or self.context.parts.callbacks.acts_at[event]:
            self.take_part(round_, lambda: self.emit(event, **kwargs))

    def _output_of(self, hook: Callable[[Any], Any], round_: Round) -> Any:
        context = self.context
        if self._seed is not None:
            self._seed(round_.start)
        context.trainer._batch_samples = round_.samples
        try:
            return hook(round_.batch)
        except Exception as error:
            context.control.emitter.explain(error, hook, round_.batch, round_.start)
            raise
        finally:
            context.trainer._batch_samples = None


class Evaluation(Pass):
    """An evaluation of one set."""

    def run(self, loader: Any, record: Callable[[Any, Any], None]) -> None:
        """Compute the losses of all batches.

        Args:
            loader: yields them.
            record: receives the mean loss of a batch, and the number of items that it is the mean of.

        Raises:
            DataError: if there is no batch.
        """
        context, number = self.context, 0
        losses = None if self._lanes is None else self._lanes.LaneLosses(context.parts.ranks)
        with self.without_gradients():
            rounds = self.rounds(loader, StopTrainingError, "calculate_eval_batch_loss")
            for number, round_ in enumerate(rounds, start=1):
                context.parts.reports.position_in_pass = round_.start
                self._evaluate(round_, record if losses is None else functools.partial(losses.add, round_.start))
                if number % _ROUNDS_BETWEEN_READINGS == 0:
                    context.parts.reports.losses.read()
        if number == 0:
            raise empty_loader_error(loader, "evaluate")
        context.parts.reports.position_in_pass = None
        if losses is not None:
            losses.record(record)
        context.parts.reports.losses.read()

    def _evaluate(self, round_: Round, record: Callable[[Any, Any], None]) -> None:
        self.emit_of_batch(round_, "on_eval_step_start")
        output = self.output_of(self.context.trainer.calculate_eval_batch_loss, round_)
        if not round_.is_idle:
            loss, size = loss_and_size(output, hook="calculate_eval_batch_loss")
            self.context.parts.reports.batch_weight = size if round_.items is None else round_.items
            record(loss, self.context.parts.reports.batch_weight)
        self.emit_of_batch(round_, "on_eval_step_end", batch=round_.batch, batch_output=output)


class Prediction(Pass):
    """A prediction for one set."""

    def run(self, loader: RunLoader, collector: PredictionCollector, give_up: Callable[[str], BaseException]) -> Any:
        """The result of `collector`, which gets the predictions for every batch of `loader`.

        Args:
            loader: yields batches.
            collector: collects predictions.
            give_up: makes the error for a prediction that a signal ends.
        """
        try:
            with self.going_on(restores_modes=True):
                self.emit("on_prediction_run_start", num_batches=loader.num_batches)
                with self.without_gradients():
                    for round_ in self.rounds(loader, give_up, "calculate_predict_batch_outputs"):
                        self._predict(round_, collector)
                self.emit("on_prediction_run_end")
        except BaseException:
            collector.abort()
            raise
        return collector.finish()

    def _predict(self, round_: Round, collector: PredictionCollector) -> None:
        predictions = self.output_of(self.context.trainer.calculate_predict_batch_outputs, round_)
        if not round_.is_idle:
            collector.add(round_.start, predictions, round_.samples)
        self.emit_of_batch(round_, "on_prediction_step_end", batch=round_.batch, predictions=predictions)


def predict_rows(context: Context, loader: RunLoader, output_path: str | Path | None) -> Any:
    """The predictions of the trainer for all rows of `loader`, in order; see `Trainer.predict`."""
    refuse_rearranged(loader)
    collector = collect_predictions(context.parts.ranks, output_path)
    return Prediction(context).run(loader, collector, lambda reason: context.control.stopping.signals.exit())


def gather_rows(parts: Parts, rows: Any, padding_value: float | None) -> Any:
    """The rows of all ranks; see `Trainer.gather`."""
    gathered = (parts.uneven or parts.ranks).gather(rows, padding_value)
    if padding_value is None:
        return gathered
    return map_tensors(lambda of_all_ranks: remove_padding(of_all_ranks, padding_value), gathered)
