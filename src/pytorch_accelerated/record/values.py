"""Names of metrics and what they say, the form in which a history keeps values, and the hyper-parameters of a run."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from pytorch_accelerated.errors import UnknownMetricError
from pytorch_accelerated.facts.trees import map_leaves, plain_parts_of
from pytorch_accelerated.ranks.wrappers import bare_model
from pytorch_accelerated.run_config import TrainerRunConfig, plain_value

Place = TypeVar("Place")

_KIND = re.compile(r"\A(?:(?:intermediate_)?eval(?:uation)?_)?")  # it matches every name
# The prefix of a name says what was measured on: train_loss_epoch and ema_model_eval_loss_epoch are both losses.
_ROLES = re.compile(
    "(?:(?:(?:ema|swa)_model|intermediate|training|train|evaluation|eval|validation|valid|val|test)[_/])*"
)
# The one table of directions: whoever shows, keeps, compares or warns of a best value asks `greater_is_better`.
_LESS_IS_BETTER = re.compile(
    "loss|logloss|nll|error|err|(r|nr)?mse|n?mae|s?mape|(r?ms)le|perplexity|ppl|bpc|bpb|[cmpw]er|eer|brier|ece|fid|lpips"
)
_MORE_IS_BETTER = re.compile(
    r"accuracy|acc|f[12]|fbeta|precision|recall|sensitivity|specificity|auc|auroc|auprc|m?ap\d*|m?iou|jaccard|dice|"
    r"kappa|mcc|matthews\w*|r2|pearsonr?|spearmanr?|kendall\w*|psnr|(ms)?ssim|(sacre)?bleu\d*|rouge(\d|l|lsum)?|meteor|"
    "chrf|ndcg|mrr"
)


class MetricRecord(NamedTuple):
    """One value of a metric.

    Attributes:
        name: of the metric, with its prefix.
        value: a float for any number, including NaN and infinities, with `item()` if a tensor or an array was recorded;
            otherwise the recorded object.
        epoch: the epoch in which it was recorded, counted from 1.
        update: the number of optimizer updates since the history was reset.
    """

    name: str
    value: Any
    epoch: int
    update: int

    @property
    def is_scalar(self) -> bool:
        """Whether the value is a number. Tables, plots and logs have only those, and only those can be watched."""
        return is_scalar(self.value)


def unknown_metric(name: str, known: Iterable[str], what: str = "value") -> UnknownMetricError:
    """The error about a metric that has no value, or none of the kind that is wanted."""
    names = ", ".join(map(repr, known))
    others = f"Known metrics: {names}." if names else "Nothing has been recorded yet."
    return UnknownMetricError(f"The metric {name!r} has no {what}. {others}")


def joined(entries: Iterable[tuple[Place, Mapping[str, Any]]]) -> list[tuple[Place, dict[str, Any]]]:
    """The rows of a table: neighbours of one place are one row, unless a name has another value there.

    >>> joined([(1, {"loss": 0.5}), (1, {"accuracy": 0.8}), (2, {"loss": 0.4})])
    [(1, {'loss': 0.5, 'accuracy': 0.8}), (2, {'loss': 0.4})]
    """
    rows: list[tuple[Place, dict[str, Any]]] = []
    for place, values in entries:
        if rows and rows[-1][0] == place and not rows[-1][1].keys() & values.keys():
            rows[-1][1].update(values)
        else:
            rows.append((place, dict(values)))
    return rows


def columns_of(records: Iterable[MetricRecord]) -> dict[str, Any]:
    """The records as a state holds them: numbers in a matrix, which takes no JSON, and other values by their place.

    A row of the matrix has the place of the name in `names`, the value, the epoch and the update. In float64 this is
    exact: integers are below 2**53.
    """
    places: dict[str, int] = {}
    rows, objects = [], []
    for index, (name, value, epoch, update) in enumerate(records):
        if not is_scalar(value):
            objects.append([index, value])
            value = math.nan
        rows.append((places.setdefault(name, len(places)), value, epoch, update))
    table = torch.from_numpy(np.array(rows, dtype=np.float64).reshape(-1, 4))
    return {"names": list(places), "table": table, "objects": objects}


def records_in(columns: Mapping[str, Any] | Sequence[Any]) -> list[MetricRecord]:
    """The records of `columns_of`, or those in a state of version 1.0, a list with a list for each."""
    if not isinstance(columns, Mapping):
        return [MetricRecord(*record) for record in columns]
    names = columns["names"]
    records = [
        MetricRecord(names[int(place)], value, int(epoch), int(update))
        for place, value, epoch, update in columns["table"].tolist()
    ]
    for index, value in columns["objects"]:
        records[index] = records[index]._replace(value=value)
    return records


def stored_value(value: Any) -> Any:
    """A float for a number, a numpy scalar, or a 0-dim array or tensor (which waits for its device).

    The float is numpy's for what is not a number of Python, because scripts call `item()` of what they recorded. Other
    tensors and arrays, including those in lists, tuples and dicts, are copied to the host, tensors without their
    graph: later changes of a confusion matrix must not change the record. Everything else is returned unchanged.
    """
    if type(value) is float:
        return value
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and value.ndim == 0:
        scalar = value.item()
        if isinstance(scalar, numbers.Real):
            return np.float64(scalar)
    elif isinstance(value, numbers.Real):
        return float(value)
    return on_host(value)


def is_scalar(value: Any) -> bool:
    """Whether a value from `stored_value` is a number, which can be used in tables, plots and comparisons."""
    return isinstance(value, float)


def on_host(value: Any) -> Any:
    """`value` with its tensors and arrays, including those in lists, tuples and dicts, replaced by host copies."""
    return map_leaves(_copy_on_host, value, parts=plain_parts_of)


def _copy_on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value.copy() if isinstance(value, np.ndarray) else value


def name_in_set(name: str, set_name: str) -> str:
    """The name under which a metric is recorded when it is measured on the evaluation set `set_name`.

    >>> name_in_set("eval_loss_epoch", "noisy")
    'eval_noisy_loss_epoch'
    >>> name_in_set("intermediate_eval_accuracy", "noisy"), name_in_set("evaluation_loss", "noisy")
    ('intermediate_eval_noisy_accuracy', 'evaluation_noisy_loss')
    >>> name_in_set("errors", "noisy"), name_in_set("eval_loss_epoch", "")
    ('noisy_errors', 'eval_loss_epoch')
    """
    return _KIND.sub(lambda kind: f"{kind[0]}{set_name}_", name) if set_name else name


def role_and_quantity(name: str) -> tuple[str, str]:
    """The role and the quantity of a metric: ``("eval_", "loss")`` for "eval_loss_epoch".

    What the Hugging Face trainer logs as "loss" is the training loss.

    >>> role_and_quantity("eval_accuracy"), role_and_quantity("loss")
    (('eval_', 'accuracy'), ('train_', 'loss'))
    """
    if name == "loss":
        return "train_", name
    end = _ROLES.match(name).end()  # type: ignore[union-attr]  # it matches the empty string too
    return name[:end], name[end:].removesuffix("_epoch") or name


def greater_is_better(quantity: str) -> bool | None:
    """Whether more of a quantity is better, by the words in its name; None if they do not tell.

    >>> greater_is_better("f1"), greater_is_better("noisy_loss"), greater_is_better("learning_rate")
    (True, False, None)
    >>> greater_is_better("MulticlassF1Score"), greater_is_better("mIoU"), greater_is_better("neg_log_loss")
    (True, True, None)
    """
    parts = re.split("[_/ @-]", quantity)
    # Classes of torchmetrics are names, too: `BinaryF1Score` has the words "binary", "f1" and "score".
    words = {
        each.lower() for part in parts for each in [part, *re.findall(r"[A-Z]+\d*(?![a-z\d])|[A-Z]?[a-z\d]+", part)]
    }
    if any(map(_LESS_IS_BETTER.fullmatch, words)):
        return None if "neg" in words else False  # scikit-learn's negative of a loss, or the loss of negatives
    return True if any(map(_MORE_IS_BETTER.fullmatch, words)) else None


def hyperparameters_of(
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    run_config: TrainerRunConfig | None = None,
    own: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What trackers log of a run: its config, the classes of its parts with their numbers, and values of your own.

    Values are None, bools, numbers and strings. Names of nested values are joined by dots; lists become strings. Does
    not wait for the device.

    >>> hyperparameters_of(nn.Linear(3, 1), own={"data": {"size": 8}})["data.size"]
    8

    Args:
        model: wrapped or not.
        optimizer: any object; of its parameter groups, everything but the parameters is included.
        scheduler: any object.
        run_config: of the run.
        own: values by name; they replace others of the same name.
    """
    bare = bare_model(model)
    total = _elements(bare.parameters())
    trainable = _elements(parameter for parameter in bare.parameters() if parameter.requires_grad)
    nested = {
        **({} if run_config is None else run_config.to_dict()),
        "model": type(bare),
        "model.parameters": total,
        "model.trainable_parameters": trainable,
        "model.trainable_share": trainable / total if total else 0.0,
        # accelerate's wrappers name their own class
        "optimizer": getattr(optimizer, "optimizer", optimizer),
        "scheduler": getattr(scheduler, "scheduler", scheduler),
    }
    for index, group in enumerate(getattr(optimizer, "param_groups", None) or []):
        prefix = f"optimizer.group_{index}" if index else "optimizer"
        settings = {name: value for name, value in group.items() if name != "params"}
        values = {"parameters": _elements(group["params"]), **settings}
        nested |= {f"{prefix}.{name}": value for name, value in values.items()}
    return dict(_flat({**nested, **(own or {})}))


def _elements(parameters: Iterable[torch.Tensor]) -> int:
    return sum(each.numel() for each in parameters if not nn.parameter.is_lazy(each))


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # a learning rate may be a tensor; this is before the first update
        plain = plain_value(value)
        yield f"{prefix}{name}", str(plain) if isinstance(plain, list) else plain
