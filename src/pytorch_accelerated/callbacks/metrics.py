"""Metrics in training and evaluation: objects of torchmetrics, and functions of all rows."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.named_metrics import NUMBER_NAMES, NamedMetrics, check_names
from pytorch_accelerated.callbacks.tasks import Asked, Task, kind_of_task, predicts_next
from pytorch_accelerated.errors import (
    ArgumentTypeError,
    ConfigurationError,
    HookOutputError,
    explained_loading,
    require_kinds,
)
from pytorch_accelerated.facts.error_notes import described
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.trees import would_broadcast
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.prediction.collecting import InMemoryPredictions, are_rows
from pytorch_accelerated.ranks.compat.extras import function_of_scorer, reductions_of, set_update_count
from pytorch_accelerated.ranks.wrappers import bare_model
from pytorch_accelerated.record.values import is_scalar, on_host, stored_value

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    from pytorch_accelerated.loop.callback import Trainer
    from pytorch_accelerated.ranks.ranks import Ranks


MetricFunction = Callable[[Any, Any], Any]

Choice = str | Callable[[Any], Any] | None
"""Which part: the usual one, one by name, or what a function returns."""

# The loop records "eval_loss_epoch" and "intermediate_eval_loss".
_NAMES_OF_LOSSES = ("loss", "loss_epoch")
_NAMED = "by name"  # the entry of a state; no class of torchmetrics is called so


class MetricsCallback(TrainerCallback):
    """Computes metrics over whole evaluations and training epochs, and records them in the run history.

    ::

        def accuracy(predictions, targets):
            return (predictions == targets).float().mean()

        Trainer(..., callbacks=[MetricsCallback(["accuracy", "f1"]), *DEFAULT_CALLBACKS])
        MetricsCallback({"accuracy": accuracy, "kappa": sklearn.metrics.cohen_kappa_score}, predictions="argmax")

    The first records ``train_accuracy``, ``train_f1``, ``eval_accuracy`` and ``eval_f1`` and, for evaluations within an
    epoch, ``intermediate_eval_accuracy`` and ``intermediate_eval_f1``. With named evaluation sets, the metrics of the
    first are also recorded under these names. Put this callback before the callbacks that log.

    **Names** are accuracy, balanced_accuracy, precision, recall, f1, iou, auc, average_precision, mcc and
    top_5_accuracy of classes, and mae, mse, rmse and r2 of numbers. auc and average_precision need torchmetrics. The
    loss function, shapes and dtypes tell the task, which is printed, and where they leave two readings, an error shows
    them, and the argument that decides. Scores of 0 or 1/2 divide two classes: logits or probabilities. Of two classes,
    precision, recall, f1, iou and average_precision belong to class 1; of more, means over classes, each with the same
    weight. Targets of -100, or of the loss's `ignore_index`, do not count. Of a causal language model of transformers
    with its own loss, the scores at a token are compared with the next one.

    **Functions** are called with (predictions, targets) of all samples of an evaluation, once, on rank 0: tensors in
    host memory, or nested containers of them, in the order of the dataset, from all ranks and batches, each sample
    once; a list with one result per sample, such as its boxes, stays a list. Functions of scikit-learn itself take the
    targets first, and so get them first. A function returns a number, or a dict of numbers, which are recorded by their
    own names. Functions are not computed in training. Memory: during an evaluation each rank keeps the predictions and
    targets of its own samples in host memory, and at its end, for a moment, of all samples; with
    ``predictions="argmax"`` these are two numbers a sample. For anything larger, pass metrics of torchmetrics, which
    need not keep rows.

    **Metrics of torchmetrics** are updated batch by batch, in training as well, and recorded as ``train_<name>``, too.
    On two or more ranks, the values equal one process's with all samples, if the metric can be merged: each rank
    updates its own copy, without waiting for the others, and the copies are merged when the value is computed. Ranks
    without a batch do not count. The copies are saved with training states, so a resumed epoch has the same metrics.

    Many metrics of torchmetrics check the values of each batch, which makes the host wait for the device, unless they
    are created with ``validate_args=False``. Metrics of probabilities, such as AUROC, convert a batch of logits only if
    a logit is outside [0, 1], so pass probabilities.

    Args:
        metrics: names, or a dict that records them under others, such as ``{"digit_accuracy": "accuracy"}``; or
            functions and metrics by name; or a metric of torchmetrics, a sequence of them, also among names, or a
            `MetricCollection`, named by their classes. Metrics are copied. A `MetricCollection` keeps its compute
            groups. Otherwise, each metric is updated by itself, because torchmetrics would group metrics whose states
            happen to be equal after the first batch.
        during_training: whether to compute metrics of torchmetrics, also those by name, in training.
        during_evaluation: whether to compute metrics in evaluations.
        predictions: how predictions come out of the model's outputs. None: the outputs, or the entry "logits" of a
            dict. ``"argmax"``: of the same, the index of the highest score in the last dimension. Any other string: the
            entry of that name. A function: what it returns for the outputs of a batch, on the device.
        targets: how targets come out of a batch. None: its second item, or the entry "labels" of a dict; for names, of
            the batch that a hook has passed on to the default one. A string: the entry of that name. A function: what
            it returns for the batch.
        task: for names: "binary", "multiclass", "labels" or "regression".
        classes_dim: the dimension of the outputs that has the classes, or the labels.
        ignore_index: the target that does not count; None: the loss function's, or -100.
        scores: "logits" or "probabilities".
        average: of precision, recall, f1, iou, auc and average_precision over the classes: "macro", "micro" or
            "weighted".

    Attributes:
        asked: what these last arguments say of outputs and targets.

    Raises:
        ArgumentTypeError: for a function without a name, or anything that isn't a metric.
        ConfigurationError: for the names "loss" and "loss_epoch", which the trainer uses.
        HookOutputError: in an evaluation, if there are no such predictions or targets, or a function fails or returns
            something else than numbers.
    """

    ranks_agree_after_each_update = False
    #: Whether averages of the weights are measured, too.
    measures_averages = False

    _ranks: Ranks | None = None

    @property
    def recorded_names(self) -> Iterable[str] | None:  # type: ignore[override]
        """Names of the metrics that it records; None for functions and objects, which may return dicts."""
        if self._functions or self.metrics is not None:
            return None
        prefixes = ("train", "eval", "intermediate_eval")
        return [f"{prefix}_{name}" for prefix in prefixes for name in self._recorded]

    def __init__(
        self,
        metrics: Sequence[str | Metric] | Metric | MetricCollection | Mapping[str, Any],
        *,
        during_training: bool = True,
        during_evaluation: bool = True,
        predictions: str | Callable[[Any], Any] | None = None,
        targets: str | Callable[[Any], Any] | None = None,
        task: str | None = None,
        classes_dim: int | None = None,
        ignore_index: int | None = None,
        scores: str | None = None,
        average: str | None = None,
    ) -> None:
        self._recorded, self._functions, others = _divided(metrics)
        self._names = list(dict.fromkeys(self._recorded.values()))
        dim = -1 if predictions == "argmax" and classes_dim is None else classes_dim
        self.asked = Asked(task, dim, ignore_index, scores, average)
        self._task: Task | None = None  # of the names, as soon as a batch has told it
        self._passes: dict[str, _Pass] = {}  # by the prefix of what they record; evaluations of models may overlap
        self._restored: dict[str, Any] = {}
        self._batches = 0
        self.metrics = None if others is None else _as_collection(others)
        self.during_training = during_training
        self.during_evaluation = during_evaluation
        self.predictions = predictions
        self.targets = targets

    def get_predictions_and_targets(self, batch: Any, batch_output: dict[str, Any]) -> tuple[Any, Any]:
        """The predictions and targets from which the metrics are computed.

        By default, they are what the arguments `predictions` and `targets` say. An override may also leave out rows, of
        both, such as padding.

        Args:
            batch: on the trainer's device.
            batch_output: the output of `calculate_train_batch_loss` or `calculate_eval_batch_loss`.
        """
        # Metrics by name take the scores, and find the classes themselves.
        choice = None if self._names and self.predictions == "argmax" else self.predictions
        if self._names and self.targets is None:
            batch = batch_output.get("batch", batch)  # a hook may have mixed rows, or left some out
        return _predictions_of(batch_output["model_outputs"], choice), _targets_of(batch, self.targets)

    @property
    def state_key(self) -> str:
        """The class; with `predictions`, `targets` or functions alone also the names: a run may have more than one."""
        if self.predictions is None and self.targets is None and (self._names or self.metrics is not None):
            return type(self).__name__
        of_torchmetrics = [] if self.metrics is None else map(str, self.metrics.keys())
        names = [*self._recorded, *self._functions, *of_torchmetrics]
        return f"{type(self).__name__}({', '.join(names)})"

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Reset the metrics, unless the epoch is resumed."""
        if self._measures_training:
            if trainer.run_state.updates_in_epoch == 0:
                self._forget(trainer, "train_")
            self._pass(trainer, "train_")

    def on_train_step_end(
        self, trainer: Trainer, batch: Any, batch_output: dict[str, Any], step: int = 0, **kwargs: Any
    ) -> None:
        """Update the metrics with a batch."""
        if self._measures_training:
            self._update(trainer, "train_", batch, batch_output)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the metrics of the epoch."""
        if self._measures_training:
            self._record(trainer, "train_", self._collected(trainer, "train_"))

    def on_eval_epoch_start(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Reset the metrics."""
        if self.during_evaluation:
            self._batches = 0
            self._forget(trainer, "eval_")

    def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """Update the metrics with a batch."""
        if self.during_evaluation:
            self._update(trainer, "eval_", batch, batch_output)

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Record the metrics of the evaluation."""
        if self.during_evaluation:
            prefix = "intermediate_eval_" if is_intermediate else "eval_"
            self._record(trainer, prefix, self._collected(trainer, "eval_"))

    def on_stop_training_error(self, trainer: Trainer, **kwargs: Any) -> None:
        """Forget an evaluation that was given up, or failed."""
        for key in [key for key in self._passes if key.endswith("eval_")]:
            del self._passes[key]

    on_exception = on_stop_training_error

    def state_dict(self) -> dict[str, Any]:
        """The task, and the metrics on every rank in an unfinished epoch. Must be called by all ranks.

        An evaluation that is interrupted begins again.
        """
        own = {key: each.state() for key, each in self._passes.items() if not key.endswith("eval_")}
        per_rank = [own] if self._ranks is None else self._ranks.exchange(own)
        keys = sorted({key for states in per_rank for key in states if states[key]})
        task = {} if self._task is None else {"task": dataclasses.asdict(self._task)}
        return {**self._restored, **task, **{key: [states.get(key, {}) for states in per_rank] for key in keys}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore these states; they are distributed over the ranks when they are needed."""
        lists = dict.fromkeys(set(state) - {"task"}, (list,)) if isinstance(state, dict) else {"its own": ()}
        require_kinds(state, lists, of=type(self).__name__)
        self._restored = {key: value for key, value in state.items() if key != "task" and not key.endswith("eval_")}
        if "task" in state and self._names:
            self._task = Task(**state["task"])

    def _key_of(self, trainer: Trainer, purpose: str) -> str:
        return trainer.run_history.metric_name_prefix + purpose

    def _forget(self, trainer: Trainer, purpose: str) -> None:
        """Begin a pass."""
        for known in (self._passes, self._restored):
            known.pop(self._key_of(trainer, purpose), None)

    def _pass(self, trainer: Trainer, purpose: str) -> _Pass:
        """The metrics of a pass, with what a resumed run knows of it; another model has its own, by its prefix."""
        key, ranks, device = self._key_of(trainer, purpose), trainer.run_context.parts.ranks, trainer.device
        self._ranks = ranks
        here = self._passes.setdefault(key, _Pass())
        saved = self._restored.pop(key, [])[ranks.index :: ranks.count]
        if self.metrics is not None and (saved or here.collection is None):
            here.collection = _as_collection(self.metrics).to(device)
            with explained_loading(type(self).__name__, "the training state"):
                _write_states(here.collection, saved, to_continue=True)
        if self._task is not None and (saved or here.named is None):
            here.named = NamedMetrics(self._names, self._task, self.asked, device)
            with explained_loading(type(self).__name__, "the training state"):
                _add_states(here.named, [state[_NAMED] for state in saved if _NAMED in state], to_continue=True)
        if self._functions and purpose == "eval_" and here.rows is None:
            source = "`predictions` and `targets` of MetricsCallback (or its `get_predictions_and_targets`)"
            here.rows = InMemoryPredictions(ranks, source=source)
        return here

    def _update(self, trainer: Trainer, purpose: str, batch: Any, batch_output: dict[str, Any]) -> None:
        predictions, targets = self.get_predictions_and_targets(batch, batch_output)
        if isinstance(predictions, torch.Tensor):
            predictions = predictions.detach()  # metrics that keep predictions would keep the graph of every batch
        pair = (predictions, targets)
        if self._names and self._predicts_next(trainer.model, trainer.loss_func, *pair):
            pair = (predictions[:, :-1], targets[:, 1:])
        if self._names:
            _refuse_other_rows(*pair)
        if self._names and self._task is None:
            loss_func = None if self._chooses or callable(self.predictions) else trainer.loss_func  # it gets others
            numbers = self._names[0] in NUMBER_NAMES
            self._begin(trainer, kind_of_task(loss_func, *pair, self.asked, numbers=numbers))
        here = self._pass(trainer, purpose)
        if here.collection is not None:
            here.collection.update(predictions, targets)
        if here.named is not None:
            here.named.update(*pair)
        if here.rows is not None:
            ranks, start = trainer.run_context.parts.ranks, trainer.run_context.parts.reports.position_in_pass
            if start is None:  # in a loop of the user's own, which probably deals batches out in turn
                start = self._batches * ranks.count + ranks.index
            self._batches += 1
            _refuse_broadcast(predictions, targets)
            if are_rows(predictions, None):
                here.rows.add(start, {"predictions": predictions, "targets": targets})
            else:  # a result for each sample, such as its boxes
                together = zip(predictions, targets, strict=True)
                here.rows.add(start, [{"predictions": each, "targets": target} for each, target in together])

    @property
    def _chooses(self) -> bool:
        """Whether a subclass chooses predictions and targets."""
        return type(self).get_predictions_and_targets is not MetricsCallback.get_predictions_and_targets

    def _predicts_next(self, model: Any, loss_func: Any, predictions: Any, targets: Any) -> bool:
        """Whether the loss of the model compares the scores at a place with the label at the next one.

        Raises:
            HookOutputError: if nothing tells.
        """
        are_tensors = isinstance(predictions, torch.Tensor) and isinstance(targets, torch.Tensor)
        are_tokens = are_tensors and predictions.ndim == 3 and predictions.shape[:2] == targets.shape
        if not are_tokens or loss_func is not None or self.targets is not None or self._chooses:
            return False
        is_next = predicts_next(bare_model(model))
        if is_next is None:
            raise HookOutputError(
                "The model has a loss of its own, and scores for each place of a sequence: whether these are for the "
                "label at the same place, or at the next one, cannot be told. Say it to MetricsCallback: "
                '`targets="labels"`, or for the next one `predictions=lambda outputs: outputs["logits"][:, :-1]` and '
                '`targets=lambda batch: batch["labels"][:, 1:]`.'
            )
        return is_next

    @property
    def _measures_training(self) -> bool:
        return self.during_training and (self.metrics is not None or bool(self._names))

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Forget the task of an earlier run, which may have had other data, unless this one is resumed."""
        if trainer.run_state.updates == 0:
            self._task = None

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Forget the task of an earlier run, which may have had other data."""
        self._task = None

    def _begin(self, trainer: Trainer, task: Task) -> None:
        self._task = task
        trainer.print(f"Metrics for {task.words}: {', '.join(self._names)}")

    def _agree(self, trainer: Trainer) -> None:
        """Give a rank that had no batch the task of the others. Must be called by all ranks."""
        if self._names:
            tasks = trainer.run_context.parts.ranks.exchange(self._task)
            task = next((each for each in tasks if each is not None), None)
            if task is not None and self._task is None:
                self._begin(trainer, task)

    def _collected(self, trainer: Trainer, purpose: str) -> dict[str, Any]:
        """The values of a pass over all ranks, by name, which ends it."""
        self._agree(trainer)
        here, ranks = self._pass(trainer, purpose), trainer.run_context.parts.ranks
        values: dict[str, Any] = {}
        if here.named is not None:
            named = here.named
            if ranks.count > 1:
                states = ranks.exchange(here.state()[_NAMED])
                named = NamedMetrics(self._names, self._task, self.asked, trainer.device)  # type: ignore[arg-type]
                _add_states(named, states)
            found = named.values()
            values = {recorded: found[name] for recorded, name in self._recorded.items()}
        if here.collection is not None:
            if ranks.count > 1:
                _write_states(here.collection, ranks.exchange(_read_states(here.collection)))
            values |= here.collection.compute()
        self._forget(trainer, purpose)
        if here.rows is not None:
            rows = here.rows.finish()
            if isinstance(rows, list):
                rows = {name: [row[name] for row in rows] for name in ("predictions", "targets")}
            values |= ranks.do_on_first(lambda: _values_of(self._functions, **rows))
        return values

    def _record(self, trainer: Trainer, name_prefix: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            value = stored_value(value)
            value = float(value) if is_scalar(value) else value  # numpy's would be printed as such
            trainer.run_context.parts.reports.record(name_prefix + name, value)


@dataclasses.dataclass
class _Pass:
    """What is measured in one pass, of training or of an evaluation: metrics of torchmetrics, those by name, rows."""

    collection: MetricCollection | None = None
    named: NamedMetrics | None = None
    rows: InMemoryPredictions | None = None

    def state(self) -> dict[str, Any]:
        """What this rank knows of its metrics, in host memory."""
        states = {} if self.collection is None else _read_states(self.collection)
        if self.named is not None:
            states[_NAMED] = self.named.state() | {"metrics": _read_states(self.named.metrics)}
        return states


def _add_states(named: NamedMetrics, states: Sequence[Mapping[str, Any]], *, to_continue: bool = False) -> None:
    """Give metrics by name the merged states of all ranks, or of an earlier run."""
    for state in states:
        named.add_state(state)
    _write_states(named.metrics, [state["metrics"] for state in states], to_continue=to_continue)


def _as_collection(metrics: Any) -> MetricCollection:
    """A fresh copy of `metrics` that does not exchange states itself.

    The exchange of torchmetrics fails if a rank has no state or a state of another type.
    """
    torchmetrics = require("torchmetrics", needed_by="MetricsCallback")
    if not isinstance(metrics, torchmetrics.MetricCollection):
        metrics = torchmetrics.MetricCollection(metrics, compute_groups=False)
    copied: MetricCollection = metrics.clone()
    for _, metric in _metrics_within(copied):
        metric.distributed_available_fn = bool  # which returns False
    copied.reset()
    return copied


def _metrics_within(modules: torch.nn.Module) -> Iterator[tuple[str, Metric]]:
    """Every metric of torchmetrics by its path, including metrics inside other metrics."""
    return ((name, each) for name, each in modules.named_modules() if hasattr(each, "update_called"))


def _read_states(collection: torch.nn.Module) -> dict[str, Any]:
    """Copies in host memory of the states of this rank's metrics, without metrics that were never updated."""
    return {
        name: {"updates": metric.update_count, "values": on_host(metric.metric_state)}
        for name, metric in _metrics_within(collection)
        if metric.update_called
    }


def _write_states(
    collection: torch.nn.Module, parts: Sequence[Mapping[str, Any]], *, to_continue: bool = False
) -> None:
    """Give the metrics the merged states of all `parts`, which are results of `_read_states`.

    Raises:
        ConfigurationError: for metrics that can be computed from merged states, but not updated after that.
    """
    for name, metric in _metrics_within(collection):
        states = [part[name] for part in parts if name in part]
        if states:
            values = _merged(metric, [state["values"] for state in states])
            if to_continue and len(states) > 1:
                _refuse_stacked(name, metric)
            for attribute, value in values.items():
                setattr(metric, attribute, value)
            metric.to(metric.device)  # the states too
            set_update_count(metric, sum(state["updates"] for state in states))


def _merged(metric: Metric, parts: list[dict[str, Any]]) -> dict[str, Any]:
    if len(parts) == 1:
        return parts[0]
    merged: dict[str, Any] = {}
    for attribute, reduction in reductions_of(metric).items():
        values = [part[attribute] for part in parts]
        if isinstance(values[0], list):
            merged[attribute] = [item for value in values for item in value]
        else:
            stacked = torch.stack(values)
            merged[attribute] = reduction(stacked) if callable(reduction) else stacked
    return merged


def _refuse_stacked(name: str, metric: Metric) -> None:
    reductions = reductions_of(metric).items()
    if any(reduction is None and isinstance(getattr(metric, state), torch.Tensor) for state, reduction in reductions):
        raise ConfigurationError(
            f"The metric {name!r} ({type(metric).__name__}) was saved within an epoch, and its states cannot be merged "
            "for fewer ranks. Resume on as many ranks, from a state between epochs, or without it in training."
        )


def _divided(metrics: Any) -> tuple[dict[str, str], dict[str, MetricFunction], Any]:
    """What the user has passed: names, each by that under which it is recorded; functions by name; the rest or None.

    The rest are metrics of torchmetrics in any form.

    Raises:
        ArgumentTypeError: for a callback, a function without a name, or something else.
        ConfigurationError: for an unknown name of a metric, or a name that the loop uses itself.
    """
    if isinstance(metrics, Mapping):
        if metrics and all(isinstance(each, str) for each in metrics.values()):
            check_names(list(metrics.values()))
            return dict(metrics), {}, None
        functions = {name: metric for name, metric in metrics.items() if not _is_of_torchmetrics(metric)}
        for name, function in functions.items():
            _check_function(name, function)
        return {}, functions, {name: metric for name, metric in metrics.items() if name not in functions} or None
    given = metrics if isinstance(metrics, (list, tuple)) else [metrics]
    if any(isinstance(each, TrainerCallback) for each in given):
        raise ArgumentTypeError(
            "A callback is among the metrics. Pass it in `callbacks`, and its metrics by name, or as objects, here."
        )
    names = [each for each in given if isinstance(each, str)]
    check_names(names)
    for each in given:
        if callable(each) and not _is_of_torchmetrics(each):
            name = getattr(each, "__name__", type(each).__name__)
            raise ArgumentTypeError(
                f"{name!r} is not a metric with a name to be recorded under. Pass a function under a name, "
                f"MetricsCallback({{{name!r}: function}}), or an instance of a metric of torchmetrics."
            )
    others = [each for each in given if not isinstance(each, str)] if names else metrics
    return dict(zip(names, names, strict=True)), {}, others if others or not names else None


def _check_function(name: str, function: Any) -> None:
    if name in _NAMES_OF_LOSSES:
        raise ConfigurationError(
            f"A metric cannot be called {name!r}, as the trainer's mean loss is. Use another name."
        )
    if (scored := function_of_scorer(function)) is not None:
        raise ArgumentTypeError(
            f"The metric {name!r} is a scorer of scikit-learn, {function!r}, which takes an estimator. Pass its "
            f"function, sklearn.metrics.{scored.__name__}, here, and what it needs in `predictions`."
        )
    if isinstance(function, type) or not callable(function):
        remedy = f"an instance, {function.__name__}(...)" if isinstance(function, type) else "a function"
        raise ArgumentTypeError(
            f"The metric {name!r} is {function!r}, neither a function nor a metric of torchmetrics. Pass {remedy}."
        )


def _refuse_broadcast(predictions: Any, targets: Any) -> None:
    if would_broadcast(predictions, targets):
        shapes = tuple(predictions.shape), tuple(targets.shape)
        raise HookOutputError(
            f"MetricsCallback has predictions of shape {shapes[0]} and targets of shape {shapes[1]}, so `==` would "
            "compare each with each. Give them one shape: predictions=lambda outputs: outputs.squeeze(-1) > 0."
        )


def _refuse_other_rows(outputs: Any, targets: Any) -> None:
    shapes = [each.shape for each in (outputs, targets) if isinstance(each, torch.Tensor) and each.ndim]
    if len(shapes) == 2 and shapes[0][0] != shapes[1][0] and shapes[0].numel() != shapes[1].numel():
        raise HookOutputError(
            f"A batch has {shapes[0][0]} rows of outputs and {shapes[1][0]} of targets, which metrics cannot compare. "
            "If a hook leaves rows out, let it return the batch that it has used as 'batch'."
        )


def _values_of(functions: Mapping[str, MetricFunction], predictions: Any, targets: Any) -> dict[str, float]:
    """The values of the functions, by name.

    Raises:
        HookOutputError: if a function fails, or returns something else than numbers.
    """
    found: dict[str, float] = {}
    for name, function in functions.items():
        try:
            rows = (targets, predictions) if _is_of_scikit_learn(function) else (predictions, targets)
            result = function(*rows)
        except Exception as error:
            raise HookOutputError(
                f"The function of the metric {name!r} failed with {type(error).__name__}: {error}. It was called with "
                f"the predictions {described(predictions)} and the targets {described(targets)}, in this order "
                "(targets first for scikit-learn's). `predictions` and `targets` of MetricsCallback say what they "
                "are: predictions='argmax' for functions of classes."
            ) from error
        for key, value in (result if isinstance(result, Mapping) else {name: result}).items():
            found[str(key)] = stored_value(value)
            if not is_scalar(found[str(key)]):
                where = "" if key == name else f" in the entry {key!r} of its dict"
                raise HookOutputError(
                    f"The metric {name!r} returned {value!r:.100}{where}. Return a number, or a dict of numbers."
                )
    return found


def _is_of_scikit_learn(function: Any) -> bool:
    """Whether a function, or what it wraps, is scikit-learn's, which takes the targets first."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        if str(getattr(function, "__module__", "")).startswith("sklearn."):
            break
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    return str(getattr(function, "__module__", "")).startswith("sklearn.")


def _is_of_torchmetrics(metric: Any) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")  # without it, there can't be one
    return torchmetrics is not None and isinstance(metric, (torchmetrics.Metric, torchmetrics.MetricCollection))


def _predictions_of(outputs: Any, choice: Choice) -> Any:
    """The predictions in a model's outputs; see `MetricsCallback`."""
    if callable(choice):
        return choice(outputs)
    if choice is None or choice == "argmax":
        predictions = _entry(outputs, "logits", "predictions") if isinstance(outputs, Mapping) else outputs
        return predictions if choice is None else _argmax(predictions)
    return _entry(outputs, choice, "predictions")


def _targets_of(batch: Any, choice: Choice) -> Any:
    """The targets in a batch; see `MetricsCallback`."""
    if callable(choice):
        return choice(batch)
    if choice is None and isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[1]
    return _entry(batch, choice or "labels", "targets")


def _entry(data: Any, name: str, of: str) -> Any:
    if isinstance(data, Mapping) and name in data:
        return data[name]
    has = f" with the entries {', '.join(map(repr, data))}" if isinstance(data, Mapping) else ""
    raise HookOutputError(
        f"MetricsCallback found no {of}: there is no entry {name!r} in a {type(data).__name__}{has}. Pass `{of}`: the "
        "name of an entry, or a function; or override `get_predictions_and_targets` to say where they are."
    )


def _argmax(predictions: Any) -> torch.Tensor:
    if not isinstance(predictions, torch.Tensor) or predictions.ndim < 2 or predictions.shape[-1] == 1:
        raise HookOutputError(
            f"predictions='argmax' needs multiple classes in the last dimension, but the model's outputs are "
            f"{described(predictions)}. Pass a function, for example predictions=lambda outputs: outputs[:, 0] > 0."
        )
    return predictions.argmax(dim=-1)
