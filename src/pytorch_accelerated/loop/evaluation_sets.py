"""Multiple evaluation sets. One at a time is the trainer's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from pytorch_accelerated.loop.context import Parts
from pytorch_accelerated.loop.handler import CallbackHandler
from pytorch_accelerated.loop.stopping import Stopping
from pytorch_accelerated.ranks.keeping import kept


class EvaluationSets:
    """Makes one evaluation set after the other the current one.

    Args:
        trainer: evaluates each set.
        parts: of the call.
        stopping: of the call.
    """

    def __init__(self, trainer: Any, parts: Parts, stopping: Stopping) -> None:
        self._trainer, self._parts, self._stopping = trainer, parts, stopping

    @property
    def names(self) -> list[str]:
        """The names of the sets; one empty name if there is one set, which has none."""
        return list(self._parts.loaders.eval_sets) or [""]

    @property
    def is_last(self) -> bool:
        """Whether, in an evaluation, no other set comes after the current one."""
        return self._parts.state.evaluated_sets + 1 >= len(self.names)

    @contextlib.contextmanager
    def current(self, name: str) -> Iterator[None]:
        """In the block, the loader, the trainer's `eval_dataset` and the names of metrics belong to a set."""
        if not name:
            yield
            return
        trainer, loaders = self._trainer, self._parts.loaders
        given, first = trainer.eval_dataset, (loaders.eval, loaders.eval_kwargs)
        trainer.eval_dataset = loaders.eval_sets[name]
        loaders.eval, loaders.eval_kwargs = loaders.further_eval.get(name, first)
        try:
            with self._parts.history.measuring_on(name):
                yield
        finally:
            trainer.eval_dataset = given
            if name in loaders.further_eval:
                loaders.further_eval[name] = loaders.eval, loaders.eval_kwargs
                loaders.eval, loaders.eval_kwargs = first

    def evaluate(self, **kwargs: Any) -> None:
        """Evaluate each set, in order. A resumed run leaves out those done before.

        Args:
            kwargs: for the trainer's `_run_eval_epoch`.
        """
        state, names = self._parts.state, self.names
        if state.evaluated_sets >= len(names):  # there were more in the run that is resumed
            state.evaluated_sets = 0
        for name in names[state.evaluated_sets :]:
            with self.current(name):
                self._trainer._run_eval_epoch(self._parts.loaders.eval, **kwargs)
            state.evaluated_sets += 1
        state.evaluated_sets = 0

    def evaluate_other_model(self, model: nn.Module, *, metric_name_prefix: str, callbacks: Iterable[Any] = ()) -> None:
        """Evaluate `model` instead of the trainer's, for callbacks in `on_eval_epoch_end`. All ranks must call it.

        Args:
            model: the model, on the trainer's device.
            metric_name_prefix: the prefix of every metric that is recorded meanwhile.
            callbacks: the callbacks whose events are emitted meanwhile.
        """
        parts, history = self._parts, self._parts.history
        handler = CallbackHandler(callbacks, custom_events=self._trainer.custom_events)
        with kept() as before, self._stopping.finishing_passes():
            before.attributes(parts, model=model, callbacks=handler)
            before.call(history.set_metric_name_prefix, history.metric_name_prefix)
            history.set_metric_name_prefix(metric_name_prefix)
            self._trainer._run_eval_epoch(parts.loaders.eval)
