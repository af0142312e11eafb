"""Checks a call of the trainer before anything is started."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from pytorch_accelerated.data.building import check_dataset, check_eval_dataset
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.settings import (
    TrainSettings,
    check_optimizer,
    check_parts,
    check_reduction,
    check_scheduler_factory,
)
from pytorch_accelerated.loop.callback import savers_among
from pytorch_accelerated.loop.context import Context, Control, Parts
from pytorch_accelerated.loop.hooks import TrainerHooks, overrides
from pytorch_accelerated.ranks.held import held_parts, is_only_in_optimizer, optimizers_of, tensors_of
from pytorch_accelerated.ranks.numerics import listed
from pytorch_accelerated.ranks.optimizers import Optimizers, values_by_optimizer
from pytorch_accelerated.ranks.preparation import is_replicated
from pytorch_accelerated.record.text import format_count
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.states.policy import SavePolicy


def refuse_within_a_run(control: Control, method: str, remedy: str) -> None:
    """Reject a call of `method` that would reset the run that is going on."""
    if control.is_at_work:
        raise ConfigurationError(
            f"`{method}` was called while the trainer is at work: it would reset the run. {remedy}"
        )


def check_optimizer_of(context: Context) -> None:
    """Reject an optimizer whose steps would change nothing; None is for subclasses with optimizers of their own."""
    trainer, parts = context.trainer, context.parts
    has_own_step = overrides(trainer, "optimizer_step")
    if parts.optimizer is not None:
        held = held_parts(context.holder)
        strangers = {id(part) for path, part in held.items() if is_only_in_optimizer(path)}
        owned = [each for part in (parts.model, *held.values()) for each in tensors_of(part)]
        owned = [each for each in owned if id(each) not in strangers]
        check_optimizer(parts.optimizer, owned, has_own_step=has_own_step)
        if isinstance(parts.optimizer, Optimizers):
            _check_claims(parts.optimizer, parts.model)
        if strangers and not has_own_step and isinstance(parts.model, nn.Module):
            _warn_of_untrained(parts, optimizers_of(context.holder, held).values(), len(strangers))
        return
    if not (has_own_step and overrides(trainer, "optimizer_zero_grad")):
        raise ArgumentTypeError(
            "`optimizer` is None, so the trainer cannot update the model. Pass an optimizer, such as "
            "`torch.optim.AdamW(model.parameters())`, or override both `optimizer_step` and `optimizer_zero_grad`."
        )


def _check_claims(optimizers: Optimizers, model: nn.Module) -> None:
    """Reject multiple optimizers that do not have each parameter of the model that needs gradients exactly once."""
    names = {id(each): name for name, each in model.named_parameters()}
    claims = collections.Counter(id(each) for group in optimizers.param_groups for each in group["params"])
    unclaimed = [name for name, each in model.named_parameters() if each.requires_grad and not claims[id(each)]]
    doubly = [names.get(parameter, "one that is not the model's") for parameter, count in claims.items() if count > 1]
    if unclaimed or doubly:
        found = [f"none of them has {listed(unclaimed)}"] * bool(unclaimed)
        found += [f"more than one has {listed(doubly)}"] * bool(doubly)
        raise ConfigurationError(
            f"Of the optimizers {', '.join(optimizers.by_name)}, {', and '.join(found)}. Give each parameter to one "
            "optimizer, or set `requires_grad` to False for what should stay."
        )


def _warn_of_untrained(parts: Parts, optimizers: Iterable[Any], strangers: int) -> None:
    """Warn about a part of the model that looks as if it had replaced another one after the optimizer was made."""
    trained = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
    parameters = parts.model.named_parameters()
    untrained = [name for name, each in parameters if each.requires_grad and id(each) not in trained]
    if untrained:
        warn_user(
            parts.ranks,
            f"The optimizer has {format_count(strangers, 'parameter')} that neither the model nor the trainer has, "
            f"while {listed(untrained)} of the model is in no optimizer, and stays as it is. Make the optimizer last, "
            "with `model.parameters()`, or set `requires_grad` to False for what should stay.",
        )


def check_training(
    context: Context,
    settings: TrainSettings,
    train_dataset: Any,
    eval_dataset: Any,
    create_scheduler_fn: Any,
    *,
    resumes: bool,
) -> None:
    """Reject a training run that cannot work. Takes the arguments of `Trainer.train`."""
    trainer, parts = context.trainer, context.parts
    has_own_passes = overrides(trainer, "_perform_forward_and_backward_passes")
    check_scheduler_factory(create_scheduler_fn)
    check_parts(parts.model, trainer.loss_func)
    if not (has_own_passes or overrides(trainer, "calculate_train_batch_loss")):
        check_reduction(trainer.loss_func, hook="calculate_train_batch_loss")
    if eval_dataset is not None:
        _check_reduction_in_evaluation(trainer)
    if not trainer._makes_optimizer:
        check_optimizer_of(context)
    if isinstance(settings.gradient_clip_norm, (Mapping, list, tuple)):
        values_by_optimizer(settings.gradient_clip_norm, parts.optimizer, argument="gradient_clip_norm")
    _refuse_what_cannot_be_undone(parts, settings, resumes)
    if context.asked.given.lanes is not None:
        require("pytorch_accelerated.loop.lanes", needed_by="`lanes`").check_lanes(context)
    num_passes = settings.num_epochs if settings.limit is None else None
    if not overrides(trainer, "create_train_dataloader"):
        check_dataset(train_dataset, num_passes=num_passes)
    if eval_dataset is not None and not overrides(trainer, "create_eval_dataloader"):
        check_eval_dataset(eval_dataset, num_passes=num_passes)


def _refuse_what_cannot_be_undone(parts: Parts, settings: TrainSettings, resumes: bool) -> None:
    """Reject a run whose `nonfinite_policy` could not be honoured."""
    policy, reason = settings.nonfinite_policy, None
    if policy is not None and not is_replicated(parts.accelerator):
        reason = f"{parts.accelerator.distributed_type.value} shards gradients: use one process or DDP"
    elif (
        policy == "rollback"
        and not resumes
        and all(saver.policy == SavePolicy() for saver in savers_among(parts.callbacks))
    ):
        reason = "there is nothing to go back to: add `SaveTrainingStateCallback(save_every_n_steps=...)`"
    if reason is not None:
        raise ConfigurationError(f"`nonfinite_policy` is {policy!r}, but {reason}, or leave `nonfinite_policy` out.")


def check_evaluation(trainer: Any, dataset: Any) -> None:
    """Reject an evaluation that cannot work."""
    check_parts(trainer.model, trainer.loss_func)
    _check_reduction_in_evaluation(trainer)
    if dataset is None and trainer.eval_dataset is None:
        raise ConfigurationError(
            "`evaluate` got no dataset, and there was none before that it could use again. Pass `dataset`."
        )
    if dataset is not None and not overrides(trainer, "create_eval_dataloader"):
        check_eval_dataset(dataset)


def _check_reduction_in_evaluation(trainer: TrainerHooks) -> None:
    if not overrides(trainer, "calculate_eval_batch_loss"):
        check_reduction(trainer.loss_func, hook="calculate_eval_batch_loss")
