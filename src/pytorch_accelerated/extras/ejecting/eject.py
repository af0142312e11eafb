"""Writes a run as one plain PyTorch script, which doesn't need this library and ends with the same bits."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import re
import string
import sys
import textwrap
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import pytorch_accelerated
from pytorch_accelerated import callbacks as known
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TerminateOnNaNCallback,
)
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.ejecting.batches import Batches
from pytorch_accelerated.extras.ejecting.own_code import OwnCode, is_literal, is_ours, refused
from pytorch_accelerated.facts import TrainSettings, trees
from pytorch_accelerated.ranks import Optimizers, kept
from pytorch_accelerated.run_config import TrainerRunConfig
from pytorch_accelerated.states import write_whole
from pytorch_accelerated.trainer import replace_trainer_placeholder_values
from pytorch_accelerated.utils import ModelEma

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

_TEMPLATE = Path(__file__).with_name("plain.txt")
_CONDITION = re.compile(r"# (if|else|end)\b ?(.*)")
_PARTS = {
    TerminateOnNaNCallback: "ends_on_nan",
    SaveTrainingStateCallback: "saves_states",
    ModelEmaCallback: "average",
    SaveBestModelCallback: "best",
    EarlyStoppingCallback: "stop",
}
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
    *("train_dataset", "eval_dataset", "create_scheduler_fn", "collate_fn", "reset_run_history"),
    *("train_dataloader_kwargs", "eval_dataloader_kwargs"),
}
# What a script may import, where its text has the name.
_IMPORTS = {name: f"import {name}" for name in ("copy", "hashlib", "random", "torch")} | {"np": "import numpy as np"}
_IMPORTS |= {"SimpleNamespace": "from types import SimpleNamespace"}
_OF_DATA = ("StackDataset", "TensorDataset", "default_collate")


def eject(trainer: Trainer, path: str | Path, arguments: Mapping[str, Any]) -> Path:
    """The file that `Trainer.eject` has written."""
    path = Path(path)
    if path.exists():
        raise ConfigurationError(f"{path} exists. Give another name, or delete it first.")
    facts = _Facts(_facts_of(trainer, arguments), module=path.stem, version=pytorch_accelerated.__version__)
    head, _, body = "\n".join(facts.kept(_TEMPLATE.read_text(encoding="utf-8").splitlines())).partition("$imports")
    body = _used(_Text(body).safe_substitute(facts).split("\n\n\n"))
    words, used = set(re.findall(r"\w+", body)), set(re.findall(r"(?<!\.)\b\w+(?=[.()])", body))
    facts["parameters"] = ", ".join(name for name in facts["may_be_given"] if name in words)
    lines = {line for name, line in _IMPORTS.items() if name in used} | facts["imports"]
    if of_data := [name for name in _OF_DATA if name in used]:
        lines.add(f"from torch.utils.data import {', '.join(of_data)}")
    text = f"{_Text(head).substitute(facts)}{_sorted(lines)}{body.replace('$parameters', facts['parameters'])}\n"
    write_whole(path, [text.encode()])
    return path


def _used(blocks: list[str]) -> str:
    """The functions that the ones after them use, and everything that isn't a function."""
    used: list[str] = []
    names: set[str] = set()
    for block in reversed(blocks):
        found = re.match(r"(?:@.*\n)?def (\w+)", block)
        if found is None or found[1] == "train" or any(re.search(rf"\b{found[1]}\(", each) for each in used):
            used.insert(0, block)
            if found is not None and (len(names) == len(names | {found[1]})):
                raise refused(f"the hooks use a function `{found[1]}`, as the script does", "Give it another name.")
            names |= {found[1]} if found is not None else set()
    return "\n\n\n".join(used)


def _sorted(lines: Iterable[str]) -> str:
    """The imports of the standard library, and those of others."""
    blocks: dict[bool, list[str]] = {True: [], False: []}
    for line in sorted(lines, key=lambda line: (line.startswith("from"), line)):
        blocks[line.split()[1].partition(".")[0] in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(block) for block in blocks.values() if block)


class _Text(string.Template):
    """The text of the template, where `${train.batch}` is an attribute of a fact."""

    braceidpattern = r"[a-z_.]+"


class _Facts(dict[str, Any]):
    """What the template says about a run, by name; attributes of a fact as ``fact.attribute``."""

    def __missing__(self, name: str) -> Any:
        fact, dot, attributes = name.partition(".")
        if not dot:
            raise KeyError(name)
        fact = self[fact]
        return None if fact is None else operator.attrgetter(attributes)(fact)

    def kept(self, lines: Iterable[str]) -> Iterable[str]:
        """The lines whose conditions hold: `# if FACT or FACT`, `# else` and `# end`, which may nest."""
        holds: list[bool] = []
        for line in lines:
            found = _CONDITION.fullmatch(line)
            if found is None:
                if all(holds):
                    yield line
            elif found[1] == "if":
                facts = [self[name] for name in found[2].split(" or ")] if all(holds) else []
                holds.append(any(fact or type(fact) in (int, float) for fact in facts))  # a seed may be 0
            elif found[1] == "else":
                holds[-1] = not holds[-1]
            else:
                holds.pop()


def _facts_of(trainer: Trainer, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a run.

    Raises:
        ConfigurationError: for the first thing that no plain script of ours has.
    """
    own = OwnCode(trainer)
    settings = _settings_of(trainer, arguments)
    train, evaluation = Batches(trainer, own, arguments, settings, "train"), None
    if arguments.get("eval_dataset") is not None:
        evaluation = Batches(trainer, own, arguments, settings, "eval")
    config, is_cut = _config_of(settings, train, evaluation)
    steps = settings.gradient_accumulation_steps
    train.sum_up(steps, is_cut=is_cut)
    if evaluation is not None:
        evaluation.sum_up(1, is_cut=False)
    parts, left_out = _parts_of(trainer, evaluation)
    left_out += [f"{train.workers} workers"] * bool(train.workers)
    left = textwrap.fill(f"Left out, because they change no bit: {', '.join(left_out)}.", 120)
    share = "count / sum(items)" if train.is_counted else f"len({train.each}) / len(update)"
    backward = "hooks.backward_step({})" if own.has.backward_step else "({}).backward()"
    losses = ["train_loss", *["eval_loss"] * bool(evaluation)]
    losses += ["average_loss"] * bool(parts["average"] and parts["average"].metric)
    optimizing = _optimizing(trainer, own, arguments, settings, config, is_cut=is_cut)
    evaluates = "" if evaluation is None else f"{evaluation.batch} {evaluation.call} {evaluation.items}"
    evaluating = [name for name in ("loss_func", "hooks", "collate_fn", "seed") if re.search(rf"\b{name}\b", evaluates)]
    may_be_given = ["model", "loss_func", optimizing["optimizer"], "train_dataset", "eval_dataset"]
    may_be_given += ["create_scheduler_fn", "collate_fn", *own.parameters]
    return {
        **parts,
        **optimizing,
        "autocasts": str(trainer.run_context.parts.accelerator.mixed_precision) == "bf16",
        "backward": backward.format(train.loss).replace("(loss)", "loss"),
        "config": config,
        "device": None if trainer.device.type == "cpu" else trainer.device,
        "ends_within_epoch": is_cut,
        "evaluation": evaluation,
        "evaluating": "".join(f"{name}, " for name in evaluating),
        "has_gradients": any(each.grad is not None for each in trainer.model.parameters()),
        "imports": own.imports | optimizing["imports"],
        "left_out": f"\n{left}" if left_out else "",
        "losses": " + ".join(losses),
        "moves_loss": isinstance(trainer.loss_func, nn.Module),
        "own": own,
        "may_be_given": dict.fromkeys(may_be_given),
        "per_update": f", {train.size * steps} per update" if steps > 1 else "",
        "printed": ", ".join(f"{name} {{{name}}}" for name in losses),
        "rows_per_update": train.size * steps,
        "seed": trainer.run_context.asked.given.seed,
        "settings": settings,
        "train": train,
        "trainer": trainer,
        "weighted_backward": backward.format(f"{train.loss} * ({share})"),
    }


def _settings_of(trainer: Trainer, arguments: Mapping[str, Any]) -> TrainSettings:
    names = {field.name: field.default for field in dataclasses.fields(TrainSettings)}
    settings = TrainSettings(**{name: value for name, value in arguments.items() if name in names})
    given, context = trainer.run_context.asked.given, trainer.run_context
    for name in arguments.keys() - _SETTINGS:
        if arguments[name] not in (None, names.get(name)):
            raise refused(f"`{name}` is given", "Leave it out.")
    if isinstance(settings.gradient_clip_norm, (Mapping, list, tuple)):
        raise refused("`gradient_clip_norm` has a limit for each optimizer", "Give one number.")
    if context.parts.ranks.count > 1:
        raise refused(f"there are {context.parts.ranks.count} processes", "Call `eject` in a single one.")
    if context.asked.number:
        raise refused("the trainer has trained before", "Call `eject` on a new trainer.")
    if not isinstance(trainer.model, nn.Module) or not isinstance(trainer.optimizer, torch.optim.Optimizer):
        raise refused("there is no model or optimizer of torch", "Give them.")
    if given.lanes is not None:
        raise refused("the trainer has `lanes`", "Leave them out; a plain script has one process.")
    precision = str(context.parts.accelerator.mixed_precision)
    if given.compile_model is not False or precision not in ("no", "bf16"):
        raise refused(f"the model is compiled, or in {precision}", "Leave `compile_model` out, and train in bf16.")
    return settings


def _config_of(settings: TrainSettings, train: Batches, evaluation: Batches | None) -> tuple[TrainerRunConfig, bool]:
    """The length of the run, in the numbers that placeholders stand for, and whether it ends within an epoch."""
    per_epoch = -(-train.count // settings.gradient_accumulation_steps)
    updates = settings.max_num_train_steps or per_epoch * (settings.num_epochs or 0)
    if not updates or not per_epoch:
        raise refused("it has no updates", "Give `num_epochs`, and data with rows.")
    config: dict[str, Any] = {field.name: None for field in dataclasses.fields(TrainerRunConfig)}
    config |= {"num_epochs": -(-updates // per_epoch), "max_num_train_steps": updates}
    config |= {"num_update_steps_per_epoch": per_epoch, "num_local_update_steps_per_epoch": per_epoch}
    config |= {"train_dataloader_len": train.count, "eval_dataloader_len": evaluation and evaluation.count}
    return TrainerRunConfig(**config), updates % per_epoch > 0


def _optimizing(
    trainer: Trainer,
    own: OwnCode,
    arguments: Mapping[str, Any],
    settings: TrainSettings,
    config: TrainerRunConfig,
    *,
    is_cut: bool,
) -> dict[str, Any]:
    """The facts about optimizers and schedules."""
    several = trainer.optimizer if isinstance(trainer.optimizer, Optimizers) else None
    names = [] if several is None else [int(name) if name.isdigit() else name for name in several.by_name]
    all_of = "optimizers.values()" if any(isinstance(name, str) for name in names) else "optimizers"
    every = [each for group in trainer.optimizer.param_groups for each in group["params"] if each.requires_grad]
    is_model = [*map(id, every)] == [id(each) for each in trainer.model.parameters() if each.requires_grad]
    has_modes = any(callable(getattr(each, "train", None)) for each in several or [trainer.optimizer])
    averages = any(isinstance(each, ModelEmaCallback) for each in trainer.callback_handler)
    if has_modes and (several is not None or averages or is_cut):
        raise refused("an optimizer with modes is one of several, averaged, or cut within an epoch", "Give another.")
    if several is not None and ("optimizer" in own.values or own.has.optimizer_step):
        raise refused("a hook uses multiple optimizers", "Give one optimizer.")
    given, makes, metric = arguments.get("create_scheduler_fn"), ("", ""), None
    if given is not None and (several is None) is not callable(given):
        raise refused("the schedule is not one for each optimizer", "Give one for each.")
    if several is not None and given is not None:
        by_name = {name: given[name] for name in (given if isinstance(given, Mapping) else names)}
        if any(is_ours(leaf) for each in by_name.values() if each is not None for leaf in _parts_within(each)):
            raise refused("a schedule needs this library", "Give functions that make schedules of torch.")
        chosen = [name for name, each in by_name.items() if each is not None]
        makes = f"[create_scheduler_fn[name](optimizers[name]) for name in {chosen!r}]", ""
    elif given is not None:
        makes, is_plateau = _schedule(trainer.optimizer, given, config)
        if is_plateau:
            metric = _metric(settings.scheduler_metric, arguments.get("eval_dataset"), "The schedule")
    by_epoch = metric is not None or settings.step_scheduler == "epoch"
    return {
        "all_optimizers": all_of,
        "has_modes": has_modes,
        "imports": {makes[1]} - {""},
        "optimizer": "optimizer" if several is None else "optimizers",
        "plateau_metric": metric or "",
        "schedules_epochs": bool(makes[0]) and by_epoch,
        "schedules_updates": bool(makes[0]) and not by_epoch,
        "scheduler": makes[0],
        "several": several is not None,
        "trained": "model.parameters()" if is_model else f"parameters_of({all_of if names else '[optimizer]'})",
    }


def _schedule(optimizer: Any, given: Any, config: TrainerRunConfig) -> tuple[tuple[str, str], bool]:
    """What makes the schedule, what that imports, and whether it watches a metric: it is made once, for a copy."""
    function = replace_trainer_placeholder_values(types.SimpleNamespace(run_config=config), given)
    with kept() as before:
        before.generators()
        made = function(copy.deepcopy(optimizer))
    is_plateau = isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau)
    inner = function if isinstance(function, functools.partial) else functools.partial(function)
    kind, values = inner.func, [*inner.args, *inner.keywords.values()]
    if getattr(kind, "__module__", "") == torch.optim.lr_scheduler.__name__ and all(map(is_literal, values)):
        arguments = [
            "optimizer",
            *map(repr, inner.args),
            *(f"{name}={each!r}" for name, each in inner.keywords.items()),
        ]
        call = f"{kind.__name__}({', '.join(arguments)})"
        return (call, f"from {kind.__module__} import {kind.__name__}"), is_plateau
    if any(map(is_ours, [made, *_parts_within(given)])):
        raise refused(
            "the schedule needs this library", "Give a function that makes a schedule of torch, with numbers."
        )
    return ("create_scheduler_fn(optimizer)", ""), is_plateau


def _parts_within(function: Any) -> Iterable[Any]:
    """A function, and what a partial of one holds."""
    is_partial = isinstance(function, functools.partial)
    return trees.leaves([function.func, function.args, function.keywords] if is_partial else function)


def _metric(name: str, evaluation: Any, who: str) -> str:
    if name not in _METRICS or (name == "eval_loss_epoch" and evaluation is None):
        raise refused(f"{who} watches {name!r}", f"Watch one of {', '.join(map(repr, _METRICS))}.")
    return _METRICS[name]


def _parts_of(trainer: Trainer, evaluation: Batches | None) -> tuple[dict[str, Any], list[str]]:
    """The facts about the trainer's callbacks, and the names of those that are left out."""
    parts: dict[str, Any] = dict.fromkeys(_PARTS.values())
    onlookers = tuple(getattr(known, name) for name in _ONLOOKERS)
    left_out: list[str] = []
    for callback in trainer.callback_handler:
        kind, metric = type(callback), None
        if kind in onlookers:
            left_out.append(kind.__name__)
            continue
        if (name := _PARTS.get(kind)) is None or getattr(callback, "model_ema", ModelEma) is not ModelEma:
            raise refused(f"{kind.__name__} may change the run", "Leave the callback out.")
        if parts[name] is not None:
            raise refused(f"there are two callbacks of the kind {kind.__name__}", "Leave one out.")
        if name == "average" and callback.evaluate_during_training:
            metric = "average_loss"
            if evaluation is None or callback.watch_metric != f"{callback.name}_eval_loss_epoch":
                raise refused(f"{kind.__name__} watches {callback.watch_metric!r}", "Let it watch its own loss.")
            if "hooks" in evaluation.call:
                raise refused("a hook evaluates an average", "Give `evaluate_during_training=False`.")
        elif name in ("best", "stop"):
            metric = _metric(callback.watch_metric, evaluation, kind.__name__)
        path, is_greater = repr(str(getattr(callback, "save_path", ""))), getattr(callback, "greater_is_better", False)
        gain = f"{metric} - best_to_stop" if is_greater else f"best_to_stop - {metric}"
        parts[name] = types.SimpleNamespace(
            callback=callback, gain=gain, metric=metric, path=path, sign="<>"[is_greater]
        )
    return parts, left_out
