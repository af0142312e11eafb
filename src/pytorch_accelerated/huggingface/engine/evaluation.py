"""An evaluation or prediction of the Hugging Face trainer, on the native pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.facts.context import Context
from pytorch_accelerated.huggingface.engine.training import FaceTraining
from pytorch_accelerated.models.preparation import PreparedModel
from pytorch_accelerated.models.wrappers import bare_model
from pytorch_accelerated.prediction.collecting import PredictionCollector
from pytorch_accelerated.training.evaluation import Prediction
from pytorch_accelerated.training.preparing import loader_of_pass


def evaluate(context: Context, loader: Any, collector: PredictionCollector, training: FaceTraining | None) -> Any:
    """The result of `collector` for all batches of `loader`.

    Args:
        context: of the call.
        loader: yields host batches.
        collector: collects what the engine computes of a batch.
        training: the one that has requested the evaluation, if any.
    """
    part: contextlib.AbstractContextManager[Any]
    give_up: Callable[[str], BaseException]
    if training is not None and getattr(loader, "persistent_workers", False):
        part = contextlib.nullcontext(training.kept_loader(loader))
    else:
        part = loader_of_pass(context, loader, None)
    give_up = StopTrainingError if training is not None else lambda reason: context.stopping.signals.exit()
    with _model_of_the_moment(context), part as adapted:
        return Prediction(context).run(adapted, collector, give_up)


@contextlib.contextmanager
def _model_of_the_moment(context: Context) -> Iterator[None]:
    """The model that the trainer that users see has now. A script may have replaced it for one evaluation."""
    trained, model = context.model, context.holder.model
    if context.prepared is None or bare_model(trained) is model:
        context.model = model if context.prepared is None else trained
        yield
        return
    prepared = PreparedModel(context.accelerator, model, None, for_training=False)
    context.model = prepared.model
    try:
        yield
    finally:
        prepared.release(model)
        context.model = trained
