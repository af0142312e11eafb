"""Checks a call of the trainer, and prepares everything that a run needs before it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.callbacks.saving import SaveTrainingStateCallback
from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.callbacks.watching import WatchedMetric
from pytorch_accelerated.checkpointing.optimizers import optimizer_settings, replaced_settings
from pytorch_accelerated.data.adapting import refuse_other_order
from pytorch_accelerated.data.building import check_dataset, check_eval_dataset, named_sets
from pytorch_accelerated.data.resuming import data_facts
from pytorch_accelerated.data.slicing import DataLoaderSlice
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.facts.run_state import RunState
from pytorch_accelerated.facts.settings import (
    TrainSettings,
    check_optimizer,
    check_parts,
    check_reduction,
    check_scheduler,
    check_scheduler_factory,
)
from pytorch_accelerated.models.held import held_parts, is_only_in_optimizer, optimizers_of, tensors_of
from pytorch_accelerated.models.numerics import listed
from pytorch_accelerated.progress.formats import format_count
from pytorch_accelerated.run_config import TrainerRunConfig
from pytorch_accelerated.seeding import mixed_seed, set_seed
from pytorch_accelerated.steps.guarded import refuse_what_cannot_be_held_back
from pytorch_accelerated.steps.splitting import refuse_what_cannot_be_split
from pytorch_accelerated.training.hooks import TrainerHooks, overrides
from pytorch_accelerated.training.run import Run


def refuse_within_a_run(run: Run | None, method: str, remedy: str) -> None:
    """Reject a call of `method` that would reset the current `run`."""
    if run is not None:
        raise ConfigurationError(
            f"`{method}` was called while the trainer is at work: it would reset the run. {remedy}"
        )


def check_optimizer_of(trainer: TrainerHooks, holder: Any) -> None:
    """Reject an optimizer whose steps would change nothing; None is for subclasses with optimizers of their own.

    Args:
        trainer: the trainer of the loop.
        holder: the trainer that users see.
    """
    has_own_step = overrides(trainer, "optimizer_step")
    if trainer.optimizer is not None:
        held = held_parts(holder)
        strangers = {id(part) for path, part in held.items() if is_only_in_optimizer(path)}
        owned = [each for part in (trainer.model, *held.values()) for each in tensors_of(part)]
        owned = [each for each in owned if id(each) not in strangers]
        check_optimizer(trainer.optimizer, owned, has_own_step=has_own_step)
        if strangers and not has_own_step and isinstance(trainer.model, nn.Module):
            _warn_of_untrained(trainer, optimizers_of(holder, held).values(), len(strangers))
        return
    if not (has_own_step and overrides(trainer, "optimizer_zero_grad")):
        raise ArgumentTypeError(
            "`optimizer` is None, so the trainer cannot update the model. Pass an optimizer of the model's parameters, "
            "for example `torch.optim.AdamW(model.parameters())`. A subclass with optimizers of its own must override "
            "both `optimizer_step` and `optimizer_zero_grad`."
        )


def _warn_of_untrained(trainer: TrainerHooks, optimizers: Iterable[Any], strangers: int) -> None:
    """Warn about a part of the model that looks as if it had replaced another one after the optimizer was made."""
    trained = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
    parameters = trainer.model.named_parameters()
    untrained = [name for name, each in parameters if each.requires_grad and id(each) not in trained]
    if untrained:
        warn_user(
            trainer._ranks,
            f"The optimizer has {format_count(strangers, 'parameter')} that neither the model nor the trainer has, "
            f"while {listed(untrained)} of the model is in no optimizer, and stays as it is. If that layer was "
            "replaced after the optimizer was made, make the optimizer last, with `model.parameters()`; if it should "
            "stay as it is, set `requires_grad` to False.",
        )


def check_training(
    trainer: TrainerHooks,
    settings: TrainSettings,
    train_dataset: Any,
    eval_dataset: Any,
    create_scheduler_fn: Any,
    *,
    has_own_passes: bool,
) -> None:
    """Reject a training run that cannot work, before anything is started.

    Args:
        trainer: the trainer.
        settings: the arguments of `train`.
        train_dataset, eval_dataset, create_scheduler_fn: see `Trainer.train`.
        has_own_passes: whether `_perform_forward_and_backward_passes` is the user's own.
    """
    check_scheduler_factory(create_scheduler_fn)
    check_parts(trainer.model, trainer.loss_func)
    if not (has_own_passes or overrides(trainer, "calculate_train_batch_loss")):
        check_reduction(trainer.loss_func, hook="calculate_train_batch_loss")
    if eval_dataset is not None:
        _check_reduction_in_evaluation(trainer)
    if not trainer._makes_optimizer:
        check_optimizer_of(trainer, trainer)
    if settings.nonfinite_policy is not None:
        refuse_what_cannot_be_held_back(settings, trainer._accelerator, trainer.callback_handler)
    if settings.split_on_oom:
        refuse_what_cannot_be_split(trainer._accelerator, has_own_passes=has_own_passes)
    num_passes = settings.num_epochs if settings.max_num_train_steps is None else None
    if not overrides(trainer, "create_train_dataloader"):
        check_dataset(train_dataset, num_passes=num_passes)
    if eval_dataset is not None and not overrides(trainer, "create_eval_dataloader"):
        check_eval_dataset(eval_dataset, num_passes=num_passes)


def check_evaluation(trainer: TrainerHooks, dataset: Any) -> None:
    """Reject an evaluation that cannot work."""
    check_parts(trainer.model, trainer.loss_func)
    _check_reduction_in_evaluation(trainer)
    if dataset is None and trainer.eval_dataset is None:
        raise ConfigurationError(
            "`evaluate` was called without a dataset, and there was no evaluation dataset before that it could use "
            "again. Pass `dataset`."
        )
    if dataset is not None and not overrides(trainer, "create_eval_dataloader"):
        check_eval_dataset(dataset)


def _check_reduction_in_evaluation(trainer: TrainerHooks) -> None:
    if not overrides(trainer, "calculate_eval_batch_loss"):
        check_reduction(trainer.loss_func, hook="calculate_eval_batch_loss")


def start_training(
    run: Run,
    train_dl_kwargs: Mapping[str, Any] | None,
    eval_dl_kwargs: Mapping[str, Any] | None,
    state: Path | None,
    *,
    resets_history: bool,
    prepare: Callable[[], None],
    describe: Callable[..., Any],
) -> None:
    """Create the loaders, the prepared model, the run config, the scheduler and the step of a training run.

    Args:
        run: the new run.
        train_dl_kwargs, eval_dl_kwargs: the user's arguments.
        state: the training state that the run is resumed from, if any.
        resets_history: whether the run history starts over.
        prepare: the trainer's `_prepare_model_optimizer_and_dataloaders`.
        describe: the trainer's `_create_run_config`.
    """
    hooks, settings = run.hooks, run.settings
    if resets_history:
        hooks.run_history.reset()
        run.epochs_before = 0
    else:
        run.epochs_before += hooks.run_state.epochs
    run.choose_seed(state)
    run.resume_from(state)
    run.number += 1
    if run.given.seed is not None:
        set_seed(mixed_seed("run", int(run.given.seed), run.ranks.index, run.number))
    hooks.run_state = RunState()
    if isinstance(hooks.model, nn.Module):
        hooks.model.zero_grad()  # an interrupted run may have left half of an update
    eval_batch_size = settings.eval_per_device_batch_size or settings.per_device_batch_size
    if settings.overfit_batches is not None:
        train_dl_kwargs = {**(train_dl_kwargs or {}), "shuffle": False}
    run.loaders.train_kwargs, run.loaders.eval_kwargs = dict(train_dl_kwargs or {}), dict(eval_dl_kwargs or {})
    run.loaders.train = hooks.create_train_dataloader(settings.per_device_batch_size, train_dl_kwargs)
    if settings.overfit_batches is None:
        _make_eval_loaders(run, eval_batch_size, eval_dl_kwargs)
    else:
        _overfit(run, settings.overfit_batches, train_dl_kwargs)
    prepare()
    settings = run.settings  # it may have found out the number of updates
    if any(isinstance(callback, SaveTrainingStateCallback) for callback in hooks.callback_handler):
        # It fetches rows: now, not when a signal urgently asks for a state.
        data_facts(train=run.loaders.train, eval=run.loaders.eval)
        data_facts(**run.loaders.eval_by_name)
    hooks.run_config = describe(
        settings.per_device_batch_size,
        settings.num_epochs,
        settings.gradient_accumulation_steps,
        settings.max_num_train_steps,
        settings.gradient_clip_value,
    )
    run.start_steps(steps_scheduler=_make_scheduler(run))
    if state is not None:
        asked = optimizer_settings(hooks.optimizer, has_schedule=hooks.scheduler is not None)
        run.resume(state)
        _warn_of_replaced_settings(run, asked)
    run.stopping.start_clock()


def _warn_of_replaced_settings(run: Run, asked: Sequence[Mapping[str, Any]]) -> None:
    """Warn about settings of the optimizer that the state has replaced."""
    has_schedule = run.hooks.scheduler is not None
    differences = replaced_settings(asked, optimizer_settings(run.hooks.optimizer, has_schedule=has_schedule))
    if differences:
        warn_user(
            run.ranks,
            "The optimizer resumes with the settings of the checkpoint, not with the new ones:\n\t"
            + "\n\t".join(differences)
            + "\nFor the new ones change `optimizer.param_groups`, and for the learning rate also the scheduler's "
            "`base_lrs`, in a callback: in `on_training_run_start`, or `on_train_begin` of the Hugging Face trainer. "
            "Or load the weights into the model, and train without resuming.",
        )


def _overfit(run: Run, num_batches: int, train_dl_kwargs: Mapping[str, Any] | None) -> None:
    """Limit the training loader to its first batches, and evaluate on the same ones."""
    hooks, loaders = run.hooks, run.loaders
    refuse_other_order(loaders.train)
    loaders.train = DataLoaderSlice(loaders.train, num_batches)
    same = hooks.create_train_dataloader(run.settings.per_device_batch_size, train_dl_kwargs)
    loaders.eval, loaders.eval_kwargs = DataLoaderSlice(same, num_batches), loaders.train_kwargs
    loaders.eval_sets, loaders.further_eval = {}, {}
    batches = "batch" if num_batches == 1 else f"{num_batches} batches"
    run.print(f"Overfitting: every epoch trains and evaluates on the first {batches} of each rank, without shuffling")


def start_evaluation(
    run: Run,
    batch_size: int,
    dl_kwargs: Mapping[str, Any] | None,
    *,
    prepare: Callable[[], None],
    describe: Callable[..., Any],
) -> None:
    """Create the loader, the prepared model and the run config of `evaluate`; see `start_training`."""
    run.choose_seed()
    run.hooks.run_state.evaluated_sets = 0  # an evaluation that failed may have left it
    run.loaders.train = None
    run.loaders.eval_kwargs = dict(dl_kwargs or {})
    _make_eval_loaders(run, batch_size, dl_kwargs)
    prepare()
    run.hooks.run_config = describe(batch_size, None, 1, None, None)


def _make_eval_loaders(run: Run, batch_size: int, dl_kwargs: Mapping[str, Any] | None) -> None:
    """Create the loader of the evaluation set, if there is one, or of each of several."""
    hooks, loaders = run.hooks, run.loaders
    loaders.eval, loaders.eval_sets, loaders.further_eval = None, named_sets(hooks.eval_dataset), {}
    if hooks.eval_dataset is None:
        return
    first, *further = run.evaluation_sets.names
    with run.evaluation_sets.current(first):
        loaders.eval = hooks.create_eval_dataloader(batch_size, dl_kwargs)
    for name in further:
        loaders.further_eval[name] = None, loaders.eval_kwargs
        with run.evaluation_sets.current(name):
            loaders.eval = hooks.create_eval_dataloader(batch_size, dl_kwargs)


def _make_scheduler(run: Run) -> bool:
    """Create the scheduler. Returns whether it steps after each update."""
    hooks, settings = run.hooks, run.settings
    has_own_step = overrides(hooks, "scheduler_step")
    hooks.scheduler = hooks.create_scheduler()
    check_scheduler(hooks.scheduler, is_expected=hooks.create_scheduler_fn is not None, has_own_step=has_own_step)
    if isinstance(hooks.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        WatchedMetric(settings.scheduler_metric).check_has_evaluation(hooks.eval_dataset)
        return False
    return settings.step_scheduler == "update"  # without a scheduler, too: a callback may set one later


def create_run_config(
    trainer: Any,
    per_device_batch_size: int,
    num_epochs: int | None,
    gradient_accumulation_steps: int,
    max_num_train_steps: int | None,
    gradient_clip_value: float | None,
) -> TrainerRunConfig:
    """The frozen facts of the current run, from its settings and loaders.

    A loader's own batch size overrides `per_device_batch_size`. If only one of the numbers of epochs and updates is
    given, the other one is computed if the training data has a length.
    """
    run: Run = trainer.run_context
    train, evaluation, ranks = run.loaders.train, run.loaders.eval, run.ranks
    train_batch_size = eval_batch_size = updates_per_epoch = None
    if evaluation is not None:
        eval_batch_size = evaluation.batch_size or per_device_batch_size
    if train is not None:
        train_batch_size = train.batch_size or per_device_batch_size
        updates_per_epoch = train.num_updates
        if updates_per_epoch is not None and max_num_train_steps is not None:
            num_epochs = -(-max_num_train_steps // max(updates_per_epoch, 1))
        elif updates_per_epoch is not None and num_epochs is not None:
            max_num_train_steps = num_epochs * updates_per_epoch
    per_update = gradient_accumulation_steps * ranks.count
    return TrainerRunConfig(
        num_epochs=num_epochs,
        train_per_device_batch_size=train_batch_size,
        train_dl_kwargs=None if train is None else run.loaders.train_kwargs,
        eval_per_device_batch_size=eval_batch_size,
        eval_dl_kwargs=None if evaluation is None else run.loaders.eval_kwargs,
        gradient_accumulation_steps=None if train is None else gradient_accumulation_steps,
        gradient_clip_value=gradient_clip_value,
        train_total_batch_size=train_batch_size * per_update if train_batch_size else None,
        eval_total_batch_size=eval_batch_size * ranks.count if eval_batch_size else None,
        num_update_steps_per_epoch=updates_per_epoch,
        num_local_update_steps_per_epoch=updates_per_epoch,
        max_num_train_steps=max_num_train_steps,
        is_local_process_zero=ranks.is_first_of_node,
        is_world_process_zero=ranks.is_first,
        is_distributed=ranks.count > 1,
        mixed_precision=str(run.accelerator.mixed_precision),
        num_processes=ranks.count,
        seed=run.seed,
        gradient_clip_norm=None if train is None else run.settings.gradient_clip_norm,
        train_dataloader_len=None if train is None else train.num_batches,
        eval_dataloader_len=None if evaluation is None else evaluation.num_batches,
    )
