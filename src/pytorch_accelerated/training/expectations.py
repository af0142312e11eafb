"""Which metrics a run will record, as far as is known before its first update."""

from __future__ import annotations

from pytorch_accelerated.callbacks.evaluation import StepBasedEvaluationCallback
from pytorch_accelerated.callbacks.expected import ExpectedMetrics, expected_of, in_sets
from pytorch_accelerated.data.loaders import Loaders
from pytorch_accelerated.training.hooks import TrainerHooks
from pytorch_accelerated.training.names import is_users_class
from pytorch_accelerated.training.settings import TrainSettings


def expected_metrics(hooks: TrainerHooks, loaders: Loaders, settings: TrainSettings) -> ExpectedMetrics:
    """The names of the metrics that a training run will record.

    They are complete only if the trainer and all callbacks are of this library: hooks and callbacks of users may record
    anything.
    """
    callbacks = list(hooks.callback_handler)
    names = ["train_loss_epoch"]
    sets = list(loaders.eval_sets) or [""]
    if loaders.eval is not None:
        names += ["eval_loss_epoch", *in_sets(["eval_loss_epoch"], sets)]
        names += ["intermediate_eval_loss", *in_sets(["intermediate_eval_loss"], sets)]
    if settings.gradient_clip_norm is not None:
        names.append("gradient_norm")
    if settings.nonfinite_policy is not None:
        names.append("skipped_updates")
    if settings.split_on_oom:
        names.append("split_batch_size")
    of_callbacks = expected_of(callbacks, sets)
    names += of_callbacks.names
    if not any(isinstance(callback, StepBasedEvaluationCallback) for callback in callbacks):
        names = [name for name in names if not name.startswith("intermediate_")]
    names += hooks.run_history.get_metric_names()
    has_own_code = any(is_users_class(type(part)) for part in (hooks, hooks.run_history)) or any(
        callable(value) and hasattr(type(hooks), name) for name, value in vars(hooks).items()
    )
    return ExpectedMetrics(
        tuple(dict.fromkeys(names)),
        of_callbacks.others + (("",) if has_own_code else ()),
        has_evaluation=hooks.eval_dataset is not None,
    )
