"""Writes a run as one plain PyTorch script, which doesn't need this library and ends with the same bits."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import operator
import re
import string
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

import pytorch_accelerated
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
from pytorch_accelerated.ranks import Optimizers, has_shards, kept
from pytorch_accelerated.run_config import TrainerRunConfig
from pytorch_accelerated.states.publish import write_whole
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
# What a script imports if it has the name.
_IMPORTS = (
    *("import copy", "import hashlib", "import random", "import torch", "import numpy as np"),
    *("import torch.distributed as dist", "from torch.nn.parallel import DistributedDataParallel"),
    *("import math", "from torch.optim.lr_scheduler import LambdaLR", "from types import SimpleNamespace"),
    *(f"from torch.utils.data import {name}" for name in ("StackDataset", "TensorDataset", "default_collate")),
)


def eject(trainer: Trainer, path: str | Path, arguments: Mapping[str, Any], face: Mapping[str, Any]) -> Path:
    """The file that `Trainer.eject` has written; `face` has the facts that a Hugging Face trainer adds."""
    path, ranks = Path(path), trainer.run_context.parts.ranks
    if ranks.do_on_first(path.exists):
        raise ConfigurationError(f"{path} exists. Give another name, or delete it first.")
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigurationError(f"Nothing can import {path.name!r}. Give a name such as 'plain_run.py'.")
    facts = _Facts(_facts_of(trainer, arguments, face), module=path.stem, version=pytorch_accelerated.__version__)
    head, _, body = "\n".join(facts.kept(_TEMPLATE.read_text(encoding="utf-8").splitlines())).partition("$imports")
    body = _used(_Text(body).safe_substitute(facts).split("\n\n\n"))
    words = set(re.findall(r"(?<!\.)\b\w+", body))
    facts["parameters"] = ", ".join(name for name in dict.fromkeys(facts["may_be_given"]) if name in words)
    lines = {line for line in _IMPORTS if line.split()[-1] in words} | facts["imports"]
    text = f"{_Text(head).substitute(facts)}{_sorted(lines)}{body.replace('$parameters', facts['parameters'])}\n"
    ranks.do_on_first(lambda: write_whole(path, [text.encode()]))
    return path


def _used(blocks: list[str]) -> str:
    """The functions that the ones after them use, and everything that isn't a function."""
    used, names = list[str](), list[str]()
    for block in reversed(blocks):
        found = re.match(r"(?:@.*\n)*def (\w+)", block)
        if found is None or found[1] == "train" or any(re.search(rf"\b{found[1]}\b", each) for each in used):
            used.insert(0, block)
            names += [found[1]] if found else []
    if len({*names}) < len(names):
        taken = next(name for name in names if names.count(name) > 1)
        raise refused(f"the hooks use a function `{taken}`, and so does the script", "Give yours another name.")
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
    """What the template says about a run, by name, and attributes of a fact as ``fact.attribute``; None for others."""

    def __missing__(self, name: str) -> Any:
        fact, dot, attributes = name.partition(".")
        return operator.attrgetter(attributes)(self[fact]) if dot and self[fact] is not None else None

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


def _facts_of(trainer: Trainer, arguments: Mapping[str, Any], face: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a run.

    Raises:
        ConfigurationError: for the first thing that no plain script of ours has.
    """
    own = OwnCode(trainer)
    settings = _settings_of(trainer, arguments)
    given = {**arguments, **face}
    train, evaluation = Batches(trainer, own, given, settings, "train"), None
    if arguments.get("eval_dataset") is not None:
        evaluation = Batches(trainer, own, given, settings, "eval")
    config, is_cut = _config_of(settings, train, evaluation)
    train.sum_up(settings.gradient_accumulation_steps, is_cut=is_cut)
    if evaluation is not None:
        evaluation.sum_up(1, is_cut=False)
    ranks = trainer.run_context.parts.ranks.count
    parts, left_out = _parts_of(trainer, evaluation)
    left_out += face.get("left_out", [])
    left_out += [f"{train.workers} workers"] * bool(train.workers)
    left = textwrap.fill(f"Left out, because they change no bit: {', '.join(left_out)}.", 120)
    losses = ["train_loss", *["eval_loss"] * bool(evaluation)]
    losses += ["average_loss"] * bool(parts["average"] and parts["average"].metric)
    optimizing = _optimizing(trainer, arguments, settings, config)
    if optimizing["has_modes"] and (optimizing["several"] or parts["average"] or is_cut):
        raise refused("an optimizer with modes is one of several, averaged, or cut within an epoch", "Give another.")
    if optimizing["several"] and ("optimizer" in own.values or own.has.optimizer_step):
        raise refused("a hook uses multiple optimizers", "Give one optimizer.")
    kinds = {"loss_func": trainer.loss_func, **own.values, "model": None}
    modules = [name for name, value in kinds.items() if isinstance(value, nn.Module)]
    may_be_given = ["model", "loss_func", optimizing["optimizer"], "train_dataset", "eval_dataset"]
    may_be_given += ["create_scheduler_fn", "collate_fn", *own.parameters]
    return {
        **parts,
        **optimizing,
        "autocasts": str(trainer.run_context.parts.accelerator.mixed_precision) == "bf16",
        "config": config,
        "device": None if trainer.device.type == "cpu" else trainer.device,
        "ends_within_epoch": is_cut,
        "evaluation": evaluation,
        "has_gradients": any(each.grad is not None for each in trainer.model.parameters()),
        "imports": own.imports | optimizing["imports"],
        "losses": " + ".join(losses),
        "ranks": ranks if ranks > 1 else None,
        "hooks_have_model": ranks > 1 and "model" in own.values,
        "save": "save_once" if ranks > 1 else "torch.save",
        "shares_buffers": ranks > 1 and any(True for _ in trainer.model.buffers()),
        "moved": "\n    ".join(f"{name}.to(DEVICE)" for name in modules),
        "own": own,
        "may_be_given": may_be_given,
        "printed": ", ".join(f"{name} {{{name}}}" for name in losses),
        "seed": trainer.run_context.asked.given.seed,
        "settings": settings,
        "train": train,
        "trainer": trainer,
        "parameters": "$parameters",  # they are known as soon as the rest of the script is
        **face,
        "left_out": f"\n{left}" if left_out else "",
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
        _refuse_ranks(trainer)
    if context.asked.number:
        raise refused("the trainer has trained before", "Call `eject` on a new trainer.")
    if not isinstance(trainer.model, nn.Module) or not isinstance(trainer.optimizer, torch.optim.Optimizer):
        raise refused("there is no model or optimizer of torch", "Give them.")
    if given.lanes is not None:
        raise refused("the trainer has `lanes`", "Leave them out: how they share an update takes too many lines.")
    precision = str(context.parts.accelerator.mixed_precision)
    if given.compile_model is not False or precision not in ("no", "bf16"):
        raise refused(f"the model is compiled, or in {precision}", "Leave `compile_model` out, and train in bf16.")
    return settings


def _refuse_ranks(trainer: Trainer) -> None:
    """Refuse ranks that join their gradients in another way than by torch's DDP on CPUs, without options."""
    accelerator = trainer.run_context.parts.accelerator
    kind, handler = accelerator.distributed_type.value, accelerator.ddp_handler
    options = handler.to_kwargs().keys() - {"gradient_as_bucket_view"} if handler else ()  # that one changes no bit
    if kind != "MULTI_CPU" or options or has_shards(trainer.model):
        how = "a sharded model" if has_shards(trainer.model) else f"{kind} {' '.join(options)}"
        raise refused(f"processes train by {how}", "Let them train by DDP on CPUs, as usual.")
    trained = {id(each) for group in trainer.optimizer.param_groups for each in group["params"]}
    if trained - {id(each) for each in trainer.model.parameters()}:
        raise refused("DDP doesn't join the gradients of parameters outside of the model", "Put them into it.")


def _config_of(settings: TrainSettings, train: Batches, evaluation: Batches | None) -> tuple[TrainerRunConfig, bool]:
    """The length of the run, in the numbers that placeholders stand for, and whether it ends within an epoch."""
    per_epoch = -(-train.count // settings.gradient_accumulation_steps)
    updates = settings.max_num_train_steps or per_epoch * (settings.num_epochs or 0)
    if not updates or not per_epoch:
        raise refused("it has no updates", "Give `num_epochs`, and rows for a batch.")
    config: dict[str, Any] = {field.name: None for field in dataclasses.fields(TrainerRunConfig)}
    config |= {"num_epochs": -(-updates // per_epoch), "max_num_train_steps": updates}
    config |= {"num_update_steps_per_epoch": per_epoch, "num_local_update_steps_per_epoch": per_epoch}
    config |= {"train_dataloader_len": train.count, "eval_dataloader_len": evaluation and evaluation.count}
    return TrainerRunConfig(**config), updates % per_epoch > 0


def _optimizing(trainer: Trainer, arguments: Mapping[str, Any], settings: TrainSettings, config: Any) -> dict[str, Any]:
    """The facts about optimizers and schedules."""
    one, given = trainer.optimizer, arguments.get("create_scheduler_fn")
    names: list[Any] = []
    if is_several := isinstance(one, Optimizers):
        names = [int(name) if name.isdigit() else name for name in one.by_name]
    all_of = "optimizers.values()" if any(isinstance(name, str) for name in names) else "optimizers"
    every = [each for group in one.param_groups for each in group["params"] if each.requires_grad]
    is_model = [*map(id, every)] == [id(each) for each in trainer.model.parameters() if each.requires_grad]
    if given is not None and callable(given) is is_several:
        raise refused("the schedule is not one for each optimizer", "Give one for each.")
    asked = {"": given}
    if is_several and given is not None:
        asked = {name: given[name] for name in (given if isinstance(given, Mapping) else names)}
    made: list[tuple[str, str, bool]] = []
    for name, function in asked.items():
        if function is not None:
            place, optimizer = (f"[{name!r}]", one[name]) if is_several else ("", one)
            of = f"optimizers{place}" if is_several else "optimizer"
            made.append(_schedule(optimizer, function, f"create_scheduler_fn{place}", of, config))
    is_plateau, metric = any(each for *_, each in made), ""
    if is_plateau:
        metric = _metric(settings.scheduler_metric, arguments.get("eval_dataset"), "The schedule")
    by_epoch = is_plateau or settings.step_scheduler == "epoch"
    return {
        "all_optimizers": all_of,
        "has_modes": any(callable(getattr(each, "train", None)) for each in (one if is_several else [one])),
        "imports": {line for _, line, _ in made if line},
        "optimizer": "optimizers" if is_several else "optimizer",
        "plateau_metric": metric,
        "schedules_epochs": bool(made) and by_epoch,
        "schedules_updates": bool(made) and not by_epoch,
        "scheduler": ",\n        ".join(source for source, *_ in made),
        "several": is_several,
        "trained": "model.parameters()" if is_model else f"parameters_of({all_of if is_several else '[optimizer]'})",
    }


def _schedule(optimizer: Any, given: Any, name: str, of: str, config: Any) -> tuple[str, str, bool]:
    """What makes a schedule, what that imports, and whether it watches a metric: it is made once, for a copy."""
    function = replace_trainer_placeholder_values(SimpleNamespace(run_config=config), given)
    with kept() as before:
        before.generators()
        made = function(copy.deepcopy(optimizer))
    inner = function if isinstance(function, functools.partial) else functools.partial(function)
    kind, keywords = inner.func, dict(inner.keywords)
    if is_ours(kind) and type(made) is OneCycleLR:  # of `one_cycle`
        rates = [group["lr"] for group in optimizer.param_groups]
        kind, keywords["max_lr"] = OneCycleLR, keywords["max_lr"] or (rates if len(rates) > 1 else rates[0])
    source, line = f"{name}({of})", ""
    if kind.__module__ == OneCycleLR.__module__ and is_literal([*inner.args, *keywords.values()]):
        shown = [of, *map(repr, inner.args), *(f"{key}={value!r}" for key, value in keywords.items())]
        source, line = f"{kind.__name__}({', '.join(shown)})", f"from {kind.__module__} import {kind.__name__}"
    elif any(map(is_ours, [made, *_parts_within(given)])):
        raise refused("the schedule needs this library", "Give a function that makes one of torch, with numbers.")
    return source, line, isinstance(made, ReduceLROnPlateau)


def _parts_within(function: Any) -> Iterable[Any]:
    """A function, and what a partial of one holds."""
    is_partial = isinstance(function, functools.partial)
    return trees.leaves([function.func, function.args, function.keywords] if is_partial else function)


def _metric(name: str, evaluation: Any, who: str) -> str:
    if name not in _METRICS:
        raise refused(f"{who} watches {name!r}", f"Watch one of {', '.join(map(repr, _METRICS))}.")
    if name == "eval_loss_epoch" and evaluation is None:
        raise refused(f"{who} watches {name!r}, and there is no `eval_dataset`", "Give one.")
    return _METRICS[name]


def _parts_of(trainer: Trainer, evaluation: Batches | None) -> tuple[dict[str, Any], list[str]]:
    """The facts about the trainer's callbacks, and the names of those that are left out."""
    parts: dict[str, Any] = dict.fromkeys(_PARTS.values())
    left_out: list[str] = []
    for callback in trainer.callback_handler:
        kind, metric = type(callback), None
        if is_ours(callback) and kind.__name__ in _ONLOOKERS:
            left_out.append(kind.__name__)
            continue
        if (name := _PARTS.get(kind)) is None or getattr(callback, "model_ema", ModelEma) is not ModelEma:
            raise refused(f"{kind.__name__} may change the run", "Leave the callback out.")
        if parts[name] is not None:
            raise refused(f"there are two callbacks of the kind {kind.__name__}", "Leave one out.")
        if name == "average" and callback.evaluate_during_training:
            metric = "average_loss"
            if evaluation is None:
                raise refused(f"{kind.__name__} evaluates without an `eval_dataset`", "Give one.")
            if callback.watch_metric != f"{callback.name}_eval_loss_epoch":
                raise refused(f"{kind.__name__} watches {callback.watch_metric!r}", "Let it watch its own loss.")
            if "hooks" in evaluation.call:
                raise refused("a hook evaluates an average", "Give `evaluate_during_training=False`.")
        elif name in ("best", "stop"):
            metric = _metric(callback.watch_metric, evaluation, kind.__name__)
        path, is_greater = json.dumps(str(vars(callback).get("save_path"))), vars(callback).get("greater_is_better")
        gain, sign = (f"{metric} - best_to_stop", ">") if is_greater else (f"best_to_stop - {metric}", "<")
        parts[name] = SimpleNamespace(callback=callback, gain=gain, metric=metric, path=path, sign=sign)
    return parts, left_out
