"""Prepares what a call of the trainer needs before its loop begins: loaders, model, run config, scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.data.building import (
    DataLoaderSlice,
    build_loader,
    check_dataset,
    close_loader,
    default_loader_kwargs,
    distribute_loader,
    named_sets,
    refuse_empty,
    refuse_other_order,
)
from pytorch_accelerated.data.planned_loader import PlannedLoader
from pytorch_accelerated.data.resuming import data_facts, role_of_set
from pytorch_accelerated.data.run_plan import RunPlan
from pytorch_accelerated.data.updates import RunLoader
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts.accumulation import Accumulation
from pytorch_accelerated.facts.optional import require
from pytorch_accelerated.facts.run_state import RunPhase, RunState
from pytorch_accelerated.facts.seeding import mixed_seed, set_seed
from pytorch_accelerated.facts.settings import LIMITS, check_scheduler
from pytorch_accelerated.loop.callback import PassLimit, savers_among
from pytorch_accelerated.loop.context import Context, Parts
from pytorch_accelerated.loop.hooks import overrides
from pytorch_accelerated.ranks.compat.accelerate import restore_settings
from pytorch_accelerated.ranks.held import (
    held_parts,
    optimizers_of,
    refuse_outside,
    share_values,
    tensors_of,
    trained_outside,
)
from pytorch_accelerated.ranks.preparation import OptimizerMode, PreparedModel
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.ranks.sharding import has_shards
from pytorch_accelerated.record.warning import warn_user
from pytorch_accelerated.record.watching import PLATEAU, WatchedMetric
from pytorch_accelerated.run_config import TrainerRunConfig
from pytorch_accelerated.states.optimizers import optimizer_settings, replaced_settings, schedule_settings


def prepare_training(
    context: Context,
    train_dl_kwargs: Mapping[str, Any] | None,
    eval_dl_kwargs: Mapping[str, Any] | None,
    state: Path | None,
    *,
    resets_history: bool,
) -> None:
    """Create the loaders, the prepared model, the run config, the scheduler and the step of a training run.

    Args:
        context: of the new run.
        train_dl_kwargs, eval_dl_kwargs: the user's arguments.
        state: the training state that the run is resumed from, if any.
        resets_history: whether the run history starts over.
    """
    asked, parts, control = context.asked, context.parts, context.control
    trainer, settings, loaders = context.trainer, asked.settings, parts.loaders
    if resets_history:
        parts.history.reset()
        asked.epochs_before = 0
    else:
        asked.epochs_before += parts.state.epochs
    control.states.resume_from(state)
    asked.number += 1
    if asked.given.lanes is not None:  # alike on all ranks, and whatever their number
        set_seed(mixed_seed("run", asked.seed, asked.number))
    elif asked.given.seed is not None:
        set_seed(mixed_seed("run", int(asked.given.seed), parts.ranks.index, asked.number))
    parts.state = RunState()
    if isinstance(parts.model, nn.Module):
        parts.model.zero_grad()  # an interrupted run may have left half of an update
    if settings.overfit_batches is not None:
        train_dl_kwargs = {**(train_dl_kwargs or {}), "shuffle": False}
    loaders.train_kwargs, loaders.eval_kwargs = dict(train_dl_kwargs or {}), dict(eval_dl_kwargs or {})
    loaders.train = trainer.create_train_dataloader(settings.per_device_batch_size, train_dl_kwargs)
    if settings.overfit_batches is None:
        eval_batch_size = settings.eval_per_device_batch_size or settings.per_device_batch_size
        _make_eval_loaders(context, eval_batch_size, eval_dl_kwargs)
    else:
        _overfit(context, settings.overfit_batches, train_dl_kwargs)
    prepared = _prepare(context)
    settings = asked.settings  # the Hugging Face engine has set the number of updates there
    if savers_among(parts.callbacks):
        # It fetches rows: now, not when a signal urgently asks for a state.
        data_facts(train=loaders.train, eval=loaders.eval)
        data_facts(**loaders.eval_by_name)
    plan, length_is_given = asked.plan, settings.limit in (None, "max_num_train_steps")
    parts.config = trainer._create_run_config(
        settings.per_device_batch_size,
        settings.num_epochs if length_is_given or plan is None else None,
        settings.gradient_accumulation_steps,
        settings.max_num_train_steps if length_is_given or plan is None else plan.num_updates,
        settings.gradient_clip_value,
    )
    control.training.make_step(prepared, steps_scheduler=_make_scheduler(context, prepared))
    if state is not None:
        settings_asked = _settings_of(parts)
        control.states.resume(state)
        _continue_plan(context)
        _warn_of_replaced_settings(parts.ranks, settings_asked, _settings_of(parts))
    if asked.left_out:
        context.print(f"Leaving out of the training data: {'; '.join(map(str, asked.left_out))}")


def prepare_evaluation(context: Context, batch_size: int, dl_kwargs: Mapping[str, Any] | None) -> None:
    """Create the loader, the prepared model and the run config of `evaluate`; see `prepare_training`."""
    parts = context.parts
    context.control.states.choose_seed()
    parts.state.evaluated_sets = 0  # an evaluation that failed may have left it
    parts.loaders.train = None
    parts.loaders.eval_kwargs = dict(dl_kwargs or {})
    _make_eval_loaders(context, batch_size, dl_kwargs)
    _prepare(context)
    parts.config = context.trainer._create_run_config(batch_size, None, 1, None, None)


def _prepare(context: Context) -> PreparedModel:
    """Call the trainer's `_prepare_model_optimizer_and_dataloaders`, which a subclass may override."""
    context.trainer._prepare_model_optimizer_and_dataloaders()
    if context.parts.prepared is None:
        raise ConfigurationError(
            f"`{type(context.trainer).__name__}._prepare_model_optimizer_and_dataloaders` has prepared nothing: the "
            "loop needs the model, the optimizer and the loaders that `super()` prepares. Call it there."
        )
    return context.parts.prepared


def prepare_model(context: Context, *, for_training: bool) -> None:
    """Move the model to its device, and wrap what must be wrapped."""
    parts = context.parts
    restore_settings(parts.accelerator)
    held = held_parts(context.holder)
    parts.mode = OptimizerMode(optimizers_of(context.holder, held).values())
    if for_training and (parts.ranks.count > 1 or any(map(tensors_of, held.values()))):
        outside = trained_outside(context.holder, held)
        refuse_outside(outside, parts.accelerator, parts.model, parts.ranks)
        share_values(held, parts.ranks)
    has_lanes = context.asked.given.lanes is not None
    prepared = _kind_of_prepared(context)(
        parts.accelerator,
        parts.model,
        parts.optimizer,
        for_training=for_training,
        compile_arguments=context.asked.given.compile_model,
    )
    if parts.ranks.count > 1 and (not for_training or has_lanes) and not has_shards(prepared.model):
        # Nothing else ensures that all ranks have the same model.
        parts.ranks.copy_from_first([each.data for each in tensors_of(parts.model)])
    parts.prepared, parts.model, parts.optimizer = prepared, prepared.model, prepared.optimizer


def _kind_of_prepared(context: Context) -> Callable[..., PreparedModel]:
    if context.parts.accelerator.distributed_type.value != "DEEPSPEED":
        return functools.partial(PreparedModel, is_wrapped=context.asked.given.lanes is None)
    module = require("pytorch_accelerated.extras.deepspeed.engine", needed_by="DeepSpeed")
    return functools.partial(module.DeepSpeedModel, context=context)


def prepare_loaders(context: Context) -> None:
    """Distribute the loaders over the ranks.

    Raises:
        DataError: if one of them has no batch.
    """
    loaders, sets = context.parts.loaders, context.control.evaluation_sets
    if loaders.train is not None:
        loaders.train = distributed(context, loaders.train, loaders.train_kwargs, role="train")
        _make_plan(context)
        refuse_empty(loaders.train, "train on")
    for name in sets.names if loaders.eval is not None else ():
        with sets.current(name):
            role = role_of_set(name) if name in loaders.further_eval else "eval"
            loaders.eval = distributed(context, loaders.eval, loaders.eval_kwargs, role=role)
            context.trainer._check_eval_batch_size()


def distributed(
    context: Context, loader: Any, dl_kwargs: Mapping[str, Any] | None, role: str | None = None
) -> RunLoader:
    """This rank's part of the user's `loader`.

    Args:
        context: of the call.
        loader: any iterable of batches.
        dl_kwargs: the user's arguments for it.
        role: of the loader in a run that may be resumed.
    """
    asked = context.asked
    if isinstance(loader, RunLoader):
        return loader
    if isinstance(loader, DataLoaderSlice):
        return distributed(context, loader.dl, dl_kwargs, role).limited(loader.slice_size)
    return distribute_loader(
        loader,
        context.parts.ranks,
        seed=asked.seed,
        saved_seed=context.control.states.saved_seed(role),
        accumulation=Accumulation.of(asked.settings),
        is_sharded=bool((dl_kwargs or {}).get("is_sharded", False)),
        lanes=asked.given.lanes,
    )


def prediction_loader(
    dataset: Any, batch_size: int, dl_kwargs: Mapping[str, Any] | None, collate_fn: Callable[..., Any] | None
) -> Any:
    """The loader of a prediction; see `Trainer.predict`."""
    check_dataset(dataset)
    defaults = default_loader_kwargs(dataset, batch_size=batch_size, shuffle=False)
    return build_loader(dataset, defaults, dl_kwargs, collate_fn)


@contextlib.contextmanager
def loader_of_pass(context: Context, loader: Any, dl_kwargs: Mapping[str, Any] | None) -> Iterator[RunLoader]:
    """This rank's part of `loader`, for the model in its current form, within a run or outside of one."""
    if context.parts.prepared is None:
        context.control.states.choose_seed()
        prepare_model(context, for_training=False)
    adapted = distributed(context, loader, dl_kwargs)
    try:
        yield adapted
    finally:
        close_loader(adapted)


def _make_plan(context: Context) -> None:
    """Note what determines the rows of each update, and leave out what the run is planned without."""
    asked, parts = context.asked, context.parts
    settings, train = asked.settings, parts.loaders.train
    loader, epochs = train, settings.num_epochs if settings.limit is None else None
    for callback in parts.callbacks:
        if isinstance(callback, PassLimit):  # it will limit the loader when the run starts
            loader = loader.limited(callback.num_batches)
    asked.plan = RunPlan(loader, asked.seed, RunState(), asked.epochs_before, epochs, settings.max_num_train_steps)
    if asked.resumed_from is None and settings.leave_out is not None:
        asked.left_out = asked.plan.leaving_out(**settings.leave_out, is_planned=True)
    planned = [each for each in asked.left_out if each.planned_for is not None]
    if planned:
        train.leave_out(planned)
        train.set_epoch(planned[0].planned_for)
    asked.plan = _with_end(asked.plan, settings.max_samples)


def _with_end(plan: RunPlan, max_samples: int | None) -> RunPlan:
    """A plan with the number of updates after which `max_samples` ends the run; for a stream, it is unknown."""
    if max_samples is None or not isinstance(plan.loader, PlannedLoader):
        return plan
    updates = dataclasses.replace(plan, num_updates=None).update_of_sample(max_samples)
    return dataclasses.replace(plan, num_updates=updates)


def _continue_plan(context: Context) -> None:
    """Note where the run is resumed, and leave out what it leaves out from there on.

    What the state leaves out already is left out once: a script that is killed is started again as it stands.
    """
    asked, parts = context.asked, context.parts
    assert asked.plan is not None
    state = parts.state
    if state.updates and not state.samples and isinstance(asked.plan.loader, PlannedLoader):  # an older state
        _, windows = asked.plan.loader.detached().windows(needs_rows=False)
        state.samples = 0 if state.phase is RunPhase.EPOCH_CLOSED else state.samples_in_epoch
        state.samples += state.epochs * sum(window.size for window in windows)
    start, train, leave_out = dataclasses.replace(state), parts.loaders.train, asked.settings.leave_out
    asked.plan = dataclasses.replace(asked.plan, start=start, first_epoch=asked.epochs_before)
    if asked.left_out:
        train.leave_out(asked.left_out)
    if leave_out is not None:
        known_rows = {row for each in asked.left_out for row in each.rows or ()}
        rows = [row for row in leave_out["rows"] if row not in known_rows]
        known_updates = {each.update for each in asked.left_out if each.rows is None}
        updates = [update for update in leave_out["updates"] if update not in known_updates]
        asked.left_out += asked.plan.leaving_out(rows, updates, is_planned=False)
        train.leave_out(asked.left_out)
    limit = asked.settings.limit
    if limit is not None and start.updates and not getattr(start, LIMITS[limit]):
        raise ConfigurationError(
            f"`{limit}` counts from the beginning of the run, but {asked.resumed_from} does not say how many there "
            "were: they were not counted, or it is of an older version. Give `max_num_train_steps`."
        )
    asked.plan = _with_end(asked.plan, asked.settings.max_samples)


def _make_eval_loaders(context: Context, batch_size: int, dl_kwargs: Mapping[str, Any] | None) -> None:
    """Create the loader of the evaluation set, if there is one, or of each of several."""
    trainer, loaders, sets = context.trainer, context.parts.loaders, context.control.evaluation_sets
    loaders.eval, loaders.eval_sets, loaders.further_eval = None, {}, {}
    if trainer.eval_dataset is None:
        return
    loaders.eval_sets = named_sets(trainer.eval_dataset)
    first, *further = sets.names
    with sets.current(first):
        loaders.eval = trainer.create_eval_dataloader(batch_size, dl_kwargs)
    for name in further:
        loaders.further_eval[name] = None, loaders.eval_kwargs
        with sets.current(name):
            loaders.eval = trainer.create_eval_dataloader(batch_size, dl_kwargs)


def _overfit(context: Context, num_batches: int, train_dl_kwargs: Mapping[str, Any] | None) -> None:
    """Limit the training loader to its first batches, and evaluate on the same ones."""
    trainer, loaders = context.trainer, context.parts.loaders
    refuse_other_order(loaders.train)
    loaders.train = DataLoaderSlice(loaders.train, num_batches)
    same = trainer.create_train_dataloader(context.asked.settings.per_device_batch_size, train_dl_kwargs)
    loaders.eval, loaders.eval_kwargs = DataLoaderSlice(same, num_batches), loaders.train_kwargs
    loaders.eval_sets, loaders.further_eval = {}, {}
    batches = "batch" if num_batches == 1 else f"{num_batches} batches"
    context.print(
        f"Overfitting: every epoch trains and evaluates on the first {batches} of each rank, without shuffling"
    )


def _make_scheduler(context: Context, prepared: PreparedModel) -> bool:
    """Create the scheduler. Returns whether it steps after each update."""
    parts = context.parts
    trainer, settings = context.trainer, context.asked.settings
    has_own_step = overrides(trainer, "scheduler_step")
    if trainer.create_scheduler_fn is not None or overrides(trainer, "create_scheduler"):
        parts.begin_schedule()
    parts.scheduler = trainer.create_scheduler()
    if parts.scheduler is None:
        parts.scheduler = prepared.make_schedule()
    check_scheduler(parts.scheduler, is_expected=trainer.create_scheduler_fn is not None, has_own_step=has_own_step)
    if isinstance(parts.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        watched = WatchedMetric(settings.scheduler_metric, parts.scheduler.mode == "max")
        watched.check_has_evaluation(trainer.eval_dataset)
        watched.check_direction(parts.ranks, *PLATEAU)
        return False
    return settings.step_scheduler == "update"  # without a scheduler, too: a callback may set one later


def _settings_of(parts: Parts) -> list[dict[str, Any]]:
    """The settings of the optimizer and its schedule."""
    has_schedule = parts.scheduler is not None
    return optimizer_settings(parts.optimizer, has_schedule=has_schedule) + schedule_settings(parts.scheduler)


def _warn_of_replaced_settings(
    ranks: Ranks, asked: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]]
) -> None:
    """Warn about settings of the optimizer and its schedule that the state has replaced."""
    differences = replaced_settings(asked, loaded)
    if differences:
        warn_user(
            ranks,
            "The optimizer resumes with the settings of the checkpoint, not with the new ones:\n\t"
            + "\n\t".join(differences)
            + "\nFor the new ones change `optimizer.param_groups`, for the learning rate also the scheduler's "
            "`base_lrs`, and for its settings its attributes, in a callback: in `on_training_run_start`, or "
            "`on_train_begin` of the Hugging Face trainer. Or load the weights into the model, and train without "
            "resuming.",
        )


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
    context: Context = trainer.run_context
    asked, loaders, ranks = context.asked, context.parts.loaders, context.parts.ranks
    train, evaluation = loaders.train, loaders.eval
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
    per_round = asked.given.lanes or ranks.count
    per_update = Accumulation(gradient_accumulation_steps).batches(1) * per_round
    return TrainerRunConfig(
        num_epochs=num_epochs,
        train_per_device_batch_size=train_batch_size,
        train_dl_kwargs=None if train is None else loaders.train_kwargs,
        eval_per_device_batch_size=eval_batch_size,
        eval_dl_kwargs=None if evaluation is None else loaders.eval_kwargs,
        gradient_accumulation_steps=None if train is None else gradient_accumulation_steps,
        gradient_clip_value=gradient_clip_value,
        train_total_batch_size=train_batch_size * per_update if train_batch_size else None,
        eval_total_batch_size=eval_batch_size * per_round if eval_batch_size else None,
        num_update_steps_per_epoch=updates_per_epoch,
        num_local_update_steps_per_epoch=updates_per_epoch,
        max_num_train_steps=max_num_train_steps,
        is_local_process_zero=ranks.is_first_of_node,
        is_world_process_zero=ranks.is_first,
        is_distributed=ranks.count > 1,
        mixed_precision=str(context.parts.accelerator.mixed_precision),
        num_processes=ranks.count,
        seed=asked.seed,
        gradient_clip_norm=None if train is None else asked.settings.gradient_clip_norm,
        train_dataloader_len=None if train is None else train.num_batches,
        eval_dataloader_len=None if evaluation is None else evaluation.num_batches,
        lanes=asked.given.lanes,
    )
