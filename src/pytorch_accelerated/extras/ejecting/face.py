"""Writes a run of the Hugging Face `Trainer` as a plain script: as a native run, and what its face has in addition."""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pytorch_accelerated import Trainer
from pytorch_accelerated.extras.ejecting.eject import eject
from pytorch_accelerated.extras.ejecting.own_code import is_literal, is_ours, refuse_replaced, refused
from pytorch_accelerated.huggingface import (
    EarlyStoppingCallback,
    SchedulerType,
    TrainingArguments,
    default_data_collator,
)

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface import Trainer as Face

# Arguments that a script has, or that change no bit; the others must have their usual values.
_TAKEN = re.compile(
    "_.*|output_dir|do_.*|per_device_.*|gradient_accumulation_steps|num_train_epochs|max_steps|seed|data_seed|optim|"
    "optim_args|learning_rate|weight_decay|adam_.*|max_grad_norm|lr_scheduler_type|warmup_steps|bf16|use_cpu|"
    "remove_unused_columns|train_sampling_strategy|dataloader_.*|log(?!ging_nan).*|report_to|run_name|project|disable_tqdm|"
    "skip_memory_metrics|eval_strategy|eval_steps|save_.*|include_.*|ignore_data_skip|ddp_.*"
)
# How the rate falls after the warmup, with the share of the run that is done.
_HEIGHTS = {"linear": "1.0 - done", "cosine": "0.5 * (1.0 + math.cos(math.pi * done))", "constant_with_warmup": "1.0"}


def eject_face(face: Face, path: str | Path) -> Path:
    """The file that the Hugging Face `Trainer.eject` has written."""
    _refuse(face)
    args, loader = face.args, face.get_train_dataloader()
    evaluates = face.eval_dataset is not None and args.eval_strategy == "epoch"
    if evaluates and isinstance(face.eval_dataset, Mapping):
        raise refused("there are several evaluation sets", "Give one.")
    updates = face.set_initial_training_values(args, loader)[-1]
    if not updates:
        raise refused("it has no updates", "Give rows for a batch.")
    arguments = {
        "train_dataset": loader.dataset,
        "eval_dataset": face.get_eval_dataloader().dataset if evaluates else None,
        "collate_fn": loader.collate_fn,
        "num_epochs": None,
        "max_num_train_steps": updates,
        "per_device_batch_size": args.train_batch_size,
        "eval_per_device_batch_size": args.eval_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clip_norm": args.max_grad_norm or None,
        "train_dataloader_kwargs": {
            "shuffle": args.train_sampling_strategy == "random",
            "drop_last": args.dataloader_drop_last,
            "num_workers": args.dataloader_num_workers,
        },
        "eval_dataloader_kwargs": {"num_workers": args.dataloader_num_workers},
    }
    optimizer, given = (_optimizer(face), []) if face.optimizer is None else (None, ["optimizer"])
    left_out = [type(each).__name__ for each in face.callback_handler.callbacks]
    left_out += ["`compute_metrics`"] * (face.compute_metrics is not None) + ["checkpoints"]
    # Of language models, the first label does not count, because nothing predicts it.
    probe = face.count_items({"labels": torch.zeros(1, 2)}) if face.counts_items else None
    facts = {
        **_schedule(face, updates),
        "collator": "default_data_collator" if face.data_collator is default_data_collator else "data_collator",
        "columns": _columns(loader) if args.remove_unused_columns else None,
        "has_cache": hasattr(getattr(face.model, "config", None), "use_cache"),
        "counts_labels": probe is not None,
        "first_seed": args.seed,
        "is_face": True,
        "left_out": left_out,
        "may_be_given": ["model", *given, "lr_scheduler", "train_dataset", "eval_dataset", "data_collator"],
        "optimizer_made": optimizer,
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "skips_first": probe == 1,
    }
    # The optimizer is a copy's: this trainer makes its own when it trains.
    trainer = Trainer(face.model, None, copy.copy(face).create_optimizer(), callbacks=(), accelerator=face.accelerator)
    return eject(trainer, path, arguments, facts)


def _columns(loader: Any) -> str:
    """The names of the columns that the model takes, as the items of a list."""
    names = loader.collate_fn.columns if hasattr(loader.collate_fn, "columns") else loader.dataset.column_names
    return textwrap.fill(", ".join(f'"{name}"' for name in names), 95).replace("\n", "\n        ")


def _schedule(face: Face, updates: int) -> dict[str, Any]:
    """The facts about the schedule of a run with so many updates."""
    kind, warmup = SchedulerType(face.args.lr_scheduler_type).value, face.args.get_warmup_steps(updates)
    if face.lr_scheduler is not None:
        return {"scheduler": "lr_scheduler", "schedules_updates": True}
    if kind == "constant":
        return {"scheduler": ""}
    if kind not in _HEIGHTS:
        raise refused(f"`lr_scheduler_type` is {kind!r}", f"Choose constant, or one of {', '.join(_HEIGHTS)}.")
    rate = {"height": _HEIGHTS[kind], "warmup": warmup or None, "decay": max(1, updates - warmup)}
    return {**rate, "scheduler": "LambdaLR(optimizer, rate)", "schedules_updates": True}


def _optimizer(face: Face) -> str:
    """What makes the optimizer that the arguments describe."""
    kind, keywords = face.optimizer_cls_and_kwargs or face.get_optimizer_cls_and_kwargs(face.args, face.model)
    if kind.__module__.partition(".")[0] != "torch" or not is_literal(list(keywords.values())):
        raise refused(f"the optimizer is a {kind.__name__}", "Choose one of torch, or pass it in `optimizers`.")
    shown = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
    return f"torch.optim.{kind.__name__}(groups_of(model, {face.args.weight_decay}), {shown})"


def _refuse(face: Face) -> None:
    """Refuse what the script of such a trainer doesn't have."""
    args, config = face.args, getattr(face.model, "config", None)
    if not is_ours(face):
        raise refused(
            f"the trainer is a {type(face).__name__}", "Use the `Trainer` of pytorch_accelerated.huggingface."
        )
    refuse_replaced(face)
    for name in ("model_init", "compute_loss_func", "loss_is_scaled_for_ga"):
        if getattr(face, name) is not None:
            raise refused(f"`{name}` is given", "Give a `model` that computes its loss.")
    if isinstance(face.lr_scheduler, ReduceLROnPlateau) or args.lr_scheduler_type == "reduce_lr_on_plateau":
        raise refused("the schedule watches a metric", "Choose one that follows from the update.")
    for name, usual in vars(TrainingArguments(args.output_dir)).items():
        if vars(args)[name] != usual and not _TAKEN.fullmatch(name):
            raise refused(f"`{name}` is {vars(args)[name]!r}", "Leave it out.")
    if args.eval_strategy == "steps":
        raise refused("it evaluates within epochs", "Give `eval_strategy='epoch'`.")
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise refused("it sorts rows by length", "Give `train_sampling_strategy='random'`.")
    if args.world_size > 1 or args.n_gpu > 1:
        raise refused("multiple devices share a training of this trainer", "Use one, or the native `Trainer`.")
    for callback in face.callback_handler.callbacks:
        if not is_ours(callback) or isinstance(callback, EarlyStoppingCallback):
            raise refused(f"{type(callback).__name__} may change the run", "Leave the callback out.")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token, known = getattr(face.processing_class, name, None), getattr(config, name, None)
        if token is not None and hasattr(config, name) and token not in (known if isinstance(known, list) else [known]):
            raise refused(f"`processing_class` sets the model's `{name}`", "Set it in `model.config` yourself.")
    if is_ours(face.data_collator) and face.data_collator is not default_data_collator:
        raise refused("the collator follows from `processing_class`", "Give a `data_collator`.")
    if face.state.global_step:
        raise refused("the trainer has trained before", "Call `eject` on a new one.")
