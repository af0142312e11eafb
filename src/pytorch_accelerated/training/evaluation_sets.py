"""The evaluation sets of a run: one at a time is the trainer's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from pytorch_accelerated.data.loaders import Loaders
from pytorch_accelerated.training.hooks import TrainerHooks


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
