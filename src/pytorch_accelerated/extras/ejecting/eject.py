"""Writes a run as one plain PyTorch script, which needs this library no more and ends with the same bits."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

import pytorch_accelerated
from pytorch_accelerated import callbacks as known
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TerminateOnNaNCallback,
)
from pytorch_accelerated.data import arguments_of_classes, as_array_dataset, has_ignored
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts import TrainSettings, is_users_class, trees
from pytorch_accelerated.ranks import kept
from pytorch_accelerated.states import write_whole
from pytorch_accelerated.utils import ModelEma

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

_TEMPLATE = Path(__file__).with_name("plain.txt")
# They look on or print, and change no bit.
_ONLOOKERS = (
    *("MoveModulesToDeviceCallback", "PrintProgressCallback", "ProgressBarCallback"),
    *("LogMetricsCallback", "PrintMetricsCallback", "MetricsCallback", "CSVLoggerCallback", "JSONLoggerCallback"),
    *("LearningRateMonitorCallback", "ReportCallback", "ResultCallback", "TrackerCallback", "ProfilerCallback"),
    "LossSpikeCallback",
)
_METRICS = {"train_loss_epoch": "train_loss", "eval_loss_epoch": "eval_loss"}
_SETTINGS = {
    *("num_epochs", "per_device_batch_size", "eval_per_device_batch_size", "max_num_train_steps"),
    *("gradient_accumulation_steps", "gradient_clip_value", "gradient_clip_norm", "step_scheduler"),
    *("scheduler_metric", "record_every_n_steps", "detect_anomaly"),
}
_ARGUMENTS = {"train_dataset", "eval_dataset", "create_scheduler_fn", "collate_fn", "reset_run_history"}
_ARGUMENTS |= {"train_dataloader_kwargs", "eval_dataloader_kwargs"}
# Of loaders; those after the first three change no bit.
_OF_LOADERS = {"batch_size", "shuffle", "drop_last", "num_workers", "pin_memory", "persistent_workers"}
_OF_LOADERS |= {"prefetch_factor"}
_CONDITION = re.compile(r"# (if|else|end)\b ?(.*)")


def eject(trainer: Trainer, path: str | Path, arguments: Mapping[str, Any]) -> Path:
    """The file that `Trainer.eject` has written."""
    path = Path(path)
    if path.exists():
        raise ConfigurationError(f"{path} exists. Give another name, or delete it first.")
    facts, flags, left_out = _facts_of(trainer, arguments)
    facts |= {"module": path.stem, "version": pytorch_accelerated.__version__}
    facts["left_out"] = f"Left out, because they change no bit: {', '.join(left_out)}.\n" if left_out else ""
    template = "\n".join(_kept(_TEMPLATE.read_text(encoding="utf-8").splitlines(), flags))
    text = string.Template(template).substitute(facts)
    write_whole(path, [f"{text}\n".encode()])
    return path


def _kept(lines: Iterable[str], flags: Mapping[str, bool]) -> Iterable[str]:
    """The lines of the template whose conditions hold: `# if NAME or NAME`, `# else` and `# end`, which may nest."""
    holds: list[bool] = []
    for line in lines:
        found = _CONDITION.fullmatch(line)
        if found is None:
            if all(holds):
                yield line
        elif found[1] == "if":
            holds.append(any(flags[name] for name in found[2].split(" or ")))
        elif found[1] == "else":
            holds[-1] = not holds[-1]
        else:
            holds.pop()


def _refused(what: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"The run can't be written as a plain script: {what}. {remedy}")


def _facts_of(trainer: Trainer, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bool], list[str]]:
    """What the template says about a run, which of its parts the run has, and the callbacks that are left out.

    Raises:
        ConfigurationError: for the first thing that no plain script of ours has.
    """
    _refuse_trainer(trainer)
    names = {field.name for field in dataclasses.fields(TrainSettings)}
    settings = TrainSettings(**{name: value for name, value in arguments.items() if name in names})
    defaults = {field.name: field.default for field in dataclasses.fields(TrainSettings)}
    for name in arguments.keys() - _SETTINGS - _ARGUMENTS:
        if arguments[name] not in (None, defaults.get(name)):
            raise _refused(f"`{name}` is given", "Leave it out.")
    train, evaluation = arguments["train_dataset"], arguments.get("eval_dataset")
    own = _loader_arguments(arguments.get("train_dataloader_kwargs"), "train_dataloader_kwargs")
    own_eval = _loader_arguments(arguments.get("eval_dataloader_kwargs"), "eval_dataloader_kwargs")
    datasets = [train] if evaluation is None else [train, evaluation]
    for dataset in datasets:
        _refuse_dataset(dataset)
    size = own.get("batch_size", settings.per_device_batch_size)
    eval_size = settings.eval_per_device_batch_size or settings.per_device_batch_size
    eval_size = own_eval.get("batch_size", eval_size)
    schedule = arguments.get("create_scheduler_fn")
    if isinstance(settings.gradient_clip_norm, (Mapping, list, tuple)):
        raise _refused("`gradient_clip_norm` has a limit for each optimizer", "Give one number.")
    if arguments.get("collate_fn") is not None:
        raise _refused("`collate_fn` is given", "Let the rows be pairs of inputs and targets that torch collates.")
    counts = _counts_targets(trainer.loss_func, train)
    counts_evaluated = evaluation is not None and _counts_targets(trainer.loss_func, evaluation)
    draws = any(as_array_dataset(each) is None for each in datasets)
    steps, limit = settings.gradient_accumulation_steps, settings.max_num_train_steps
    plateau = settings.scheduler_metric if schedule is not None and _is_plateau(trainer, schedule) else None
    parameters = [*["eval_dataset"] * (evaluation is not None), *["create_scheduler_fn"] * (schedule is not None)]
    flags = {
        "accumulates": steps > 1,
        "clips_norm": settings.gradient_clip_norm is not None,
        "clips_value": settings.gradient_clip_value is not None,
        "counts_evaluated": counts_evaluated,
        "counts_targets": counts,
        "draws": draws,
        "drops_last": bool(own.get("drop_last")),
        "evaluates": evaluation is not None,
        "has_arrays": type(train) is tuple,
        "has_eval_arrays": type(evaluation) is tuple,
        "has_seed": trainer.run_context.asked.given.seed is not None,
        "limits_updates": limit is not None,
        "moves_loss": isinstance(trainer.loss_func, nn.Module),
        "schedules": schedule is not None,
        "schedules_epochs": schedule is not None and plateau is None and settings.step_scheduler == "epoch",
        "schedules_updates": schedule is not None and plateau is None and settings.step_scheduler == "update",
        "shuffles": own.get("shuffle", True),
        "watches_plateau": plateau is not None,
    }
    facts: dict[str, Any] = {
        "batch_size": size,
        "clip_norm": settings.gradient_clip_norm,
        "clip_value": settings.gradient_clip_value,
        "device": trainer.device,
        "eval_batch_size": eval_size,
        "eval_items": "items_in(loss_func, targets)" if counts_evaluated else "len(targets)",
        "items": "items_in(loss_func, targets)" if counts else "len(targets)",
        "key_at_position": ", position, epoch, seed" if draws else "",
        "key_at_start": ", start, epoch, seed" if draws else "",
        "key_parameters": ", position, epoch, seed" if draws else "",
        "eval_key": ", start, 0, seed" if draws else "",
        "seed_parameter": ", seed" if draws else "",
        "max_updates": limit,
        "more_arguments": "".join(f", {name}" for name in parameters),
        "num_epochs": settings.num_epochs if limit is None else limit,
        "parameters": "".join(f", {name}" for name in parameters),
        "plateau_metric": _metric(plateau, evaluation, "The schedule") if plateau else "",
        "rows_per_update": size * steps,
        "seed": trainer.run_context.asked.given.seed,
        "title": f"A training run: batches of {size}" + (f", {steps} of them per update." if steps > 1 else "."),
    }
    of_callbacks, has, left_out = _callbacks(trainer, evaluation)
    return facts | of_callbacks, flags | has, left_out


def _refuse_trainer(trainer: Trainer) -> None:
    given, parts = trainer.run_context.asked.given, trainer.run_context.parts
    if is_users_class(type(trainer)):
        raise _refused(f"{type(trainer).__name__} may override any part of the loop", "Use `Trainer` itself.")
    if own := [name for name in vars(trainer) if callable(getattr(type(trainer), name, None))]:
        raise _refused(f"the trainer's {', '.join(own)} was replaced", "Leave the methods as they are.")
    if parts.ranks.count > 1:
        raise _refused(f"there are {parts.ranks.count} processes", "Call `eject` in a single one.")
    if trainer.run_context.asked.number:
        raise _refused("the trainer has trained before", "Call `eject` on a new trainer.")
    if trainer.loss_func is None or not isinstance(trainer.optimizer, torch.optim.Optimizer):
        raise _refused("the loss is the model's own, or there is no single optimizer", "Give a loss function and one.")
    if callable(getattr(trainer.optimizer, "train", None)) and callable(getattr(trainer.optimizer, "eval", None)):
        raise _refused("the optimizer has modes", "Give one whose weights to train and to evaluate are the same.")
    if given.lanes is not None:
        raise _refused("the trainer has `lanes`", "Leave them out; a plain script has one process.")
    if given.compile_model is not False or str(parts.accelerator.mixed_precision) != "no":
        raise _refused("the model is compiled, or in mixed precision", "Leave `compile_model` and the precision out.")


def _refuse_dataset(dataset: Any) -> None:
    if isinstance(dataset, (DataLoader, IterableDataset, Mapping)) or not hasattr(dataset, "__getitem__"):
        raise _refused(f"the data is a {type(dataset).__name__}", "Give a dataset with rows by number.")
    if _is_ours(dataset) or (hasattr(dataset, "__getitems__") and not isinstance(dataset, Subset)):
        raise _refused(f"the {type(dataset).__name__} has an order or batches of its own", "Give one of single rows.")
    with kept() as before:
        before.generators()  # a row may be augmented
        row = None if type(dataset) is tuple else dataset[0]
    if row is not None and not (isinstance(row, (tuple, list)) and len(row) >= 2):
        raise _refused(f"a row is a {type(row).__name__}", "Let rows be pairs of inputs and targets.")


def _loader_arguments(given: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    given = dict(given or {})
    if unknown := sorted(given.keys() - _OF_LOADERS):
        raise _refused(f"`{name}` has {', '.join(map(repr, unknown))}", "Leave it out.")
    if name.startswith("eval") and (given.get("shuffle") or given.get("drop_last")):
        raise _refused(f"`{name}` shuffles or drops rows", "Leave that out.")
    return given


def _counts_targets(loss_func: Any, dataset: Any) -> bool:
    """Whether the loss divides by the weights of targets, and not always by the rows."""
    if getattr(loss_func, "keywords", {}).get("reduction", getattr(loss_func, "reduction", "mean")) != "mean":
        raise _refused("the loss function has no mean", "Give one with reduction='mean'.")
    keywords = arguments_of_classes(loss_func)
    if keywords is None:
        return False
    ignored = keywords.get("ignore_index", -100)
    counts = keywords.get("weight") is not None or ignored != -100 or has_ignored(dataset)
    if counts and not isinstance(loss_func, nn.Module):
        raise _refused("the loss is a function that weighs its targets", "Give `nn.CrossEntropyLoss(...)`.")
    return counts


def _is_plateau(trainer: Trainer, schedule: Any) -> bool:
    """Whether the schedule watches a metric: it is made once, for a copy of the optimizer."""
    if not callable(schedule):
        raise _refused("there is more than one schedule", "Give one function of the optimizer.")
    partial = [schedule.func, schedule.args, schedule.keywords] if isinstance(schedule, functools.partial) else schedule
    parts = list(trees.leaves(partial))
    if not any(map(_is_ours, parts)):
        with kept() as before:
            before.generators()
            parts = [schedule(copy.deepcopy(trainer.optimizer))]
    if any(map(_is_ours, parts)):
        raise _refused(
            "the schedule needs this library", "Give a function that makes a schedule of torch, with numbers."
        )
    return isinstance(parts[0], torch.optim.lr_scheduler.ReduceLROnPlateau)


def _is_ours(part: Any) -> bool:
    module = getattr(part, "__module__", None) or type(part).__module__
    return str(module).startswith("pytorch_accelerated.")


def _metric(name: str, evaluation: Any, who: str) -> str:
    if name not in _METRICS or (name == "eval_loss_epoch" and evaluation is None):
        raise _refused(f"{who} watches {name!r}", f"Watch one of {', '.join(map(repr, _METRICS))}.")
    return _METRICS[name]


def _callbacks(trainer: Trainer, evaluation: Any) -> tuple[dict[str, Any], dict[str, bool], list[str]]:
    """The facts and flags of the trainer's callbacks, and the names of those that are left out."""
    facts = dict.fromkeys(
        ("average_decay", "average_path", "best_metric", "best_path", "best_sign"), ""
    ) | dict.fromkeys(("gain", "stop_metric", "stop_patience", "stop_threshold"), "")
    flags = ("averages", "early_stopping", "ends_on_nan", "keeps_best", "loads_best", "saves_states")
    has = dict.fromkeys(flags, False)
    onlookers = tuple(getattr(known, name) for name in _ONLOOKERS)
    left_out: list[str] = []
    for callback in trainer.callback_handler:
        kind, flag = type(callback), ""
        if kind is TerminateOnNaNCallback:
            flag = "ends_on_nan"
        elif kind in onlookers:
            left_out.append(kind.__name__)
        elif kind is SaveTrainingStateCallback:
            flag = "saves_states"
        elif kind is ModelEmaCallback and not callback.evaluate_during_training and callback.model_ema is ModelEma:
            flag = "averages"
            facts |= {"average_decay": callback.decay, "average_path": repr(str(callback.save_path))}
        elif kind is SaveBestModelCallback:
            flag = "keeps_best"
            metric = _metric(callback.watch_metric, evaluation, kind.__name__)
            facts |= {"best_metric": metric, "best_path": repr(str(callback.save_path))}
            facts["best_sign"] = ">" if callback.greater_is_better else "<"
            has["loads_best"] = callback.load_saved_checkpoint
        elif kind is EarlyStoppingCallback:
            flag = "early_stopping"
            metric = _metric(callback.watch_metric, evaluation, kind.__name__)
            difference = f"{metric} - best_to_stop" if callback.greater_is_better else f"best_to_stop - {metric}"
            facts["gain"] = f"math.inf if best_to_stop is None else {difference}"
            facts |= {"stop_metric": metric, "stop_patience": callback.early_stopping_patience}
            facts["stop_threshold"] = callback.early_stopping_threshold
        else:
            raise _refused(f"{kind.__name__} may change the run", "Leave the callback out.")
        if flag and has[flag]:
            raise _refused(f"there are two callbacks of the kind {kind.__name__}", "Leave one out.")
        has |= {flag: True} if flag else {}
    return facts, has, left_out
