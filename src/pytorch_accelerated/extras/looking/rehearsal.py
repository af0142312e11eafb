"""A rehearsal, a training run that leaves nothing behind; and what is known about the last run, or a described one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.callbacks import CallbackHandler, LimitBatchesCallback, TrainerCallback
from pytorch_accelerated.data import RunPlan, own_generators_kept
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, StopTrainingError
from pytorch_accelerated.loop import refuse_within_a_run
from pytorch_accelerated.ranks import Kept, Optimizers, has_shards, held_parts, is_replicated, kept
from pytorch_accelerated.states import load_run, save_run

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer
    from pytorch_accelerated.tracking import RunHistory


@contextlib.contextmanager
def rehearsal(trainer: Trainer, callbacks: Iterable[Any], *, place: Path | None = None) -> Iterator[None]:
    """In the block, the trainer may train with `callbacks`; afterwards it is as before. All ranks must enter it.

    Restored, to the bit and after any exception: the trainer's attributes, the modules, optimizers and schedulers among
    them and in their lists and dicts (with gradients, buffers and modes), the gradient scaler, the run history, the
    states of `callbacks`, and the generators of torch, numpy, random and of loaders. The copies need as much memory as
    model and optimizer; with FSDP, they are written to disk.

    Args:
        trainer: the trainer, which is not at work.
        callbacks: the callbacks that take part, instead of the trainer's.
        place: a folder for temporary files; default: the system's.
    """
    callbacks = list(callbacks)
    if trainer.device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # or its generators would not be among those that are kept
    with kept() as before:
        before.generators()  # restored last: restoring others may draw from them
        for callback in callbacks:
            if hasattr(callback, "state_dict"):
                before.call(callback.load_state_dict, copy.deepcopy(callback.state_dict()))
            before.object(callback)
        if is_replicated(trainer.run_context.parts.accelerator) and not has_shards(trainer.get_model()):
            _keep_in_memory(before, trainer)
        else:
            _keep_on_disk(before, trainer, place)
        before.object(trainer)
        history, handler = _copied(trainer.run_history), CallbackHandler(callbacks, custom_events=trainer.custom_events)
        # Calls of the rehearsal continue this context, and the trainer's is as before in the end.
        trainer.run_context = trainer.run_context.copied(history=history, callbacks=handler)
        with own_generators_kept():
            yield


def refuse(arguments: Mapping[str, Any], names: Iterable[str], *, by: str) -> None:
    """Refuse arguments of `train` that a look decides about.

    Raises:
        ArgumentTypeError: if one of them is given.
    """
    given = [f"`{name}`" for name in names if name in arguments]
    if given:
        raise ArgumentTypeError(f"`{by}` got {', '.join(given)}, which it determines itself. Leave it out.")


def arguments_of_last_run(trainer: Trainer) -> dict[str, Any]:
    """The arguments of the trainer's last `train`, except for those that say where it begins.

    Raises:
        ConfigurationError: if it has not trained in this process.
    """
    if trainer.run_context.asked.last_training is None:
        raise ConfigurationError(
            "This trainer has not trained, so it does not know the run. Pass the arguments of `train`, too."
        )
    settings, arguments = trainer.run_context.asked.last_training
    return {**arguments, **{field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}}


def preparing(callbacks: Iterable[Any]) -> list[Any]:
    """Those of `callbacks` without which the trainer cannot train: they declare `prepares_run`."""
    return [callback for callback in callbacks if getattr(callback, "prepares_run", False)]


def find_plan(
    trainer: Trainer, method: str, train_dataset: Any, num_epochs: int | None, train_arguments: Mapping[str, Any]
) -> RunPlan:
    """What determines the rows of the updates of a run, for the trainer's `method`; see `Trainer.rows_of`.

    Raises:
        ConfigurationError: if there was no run, or if the seed of the one that is described is not known.
    """
    last: RunPlan | None = trainer.run_context.asked.plan
    if train_dataset is None:
        if last is None or train_arguments or num_epochs is not None:
            raise ConfigurationError(
                f"`{method}` got no `train_dataset`: without any arguments, it is about the last run; there "
                f"{'is none' if last is None else 'is one'}. Pass all arguments that `train` gets."
            )
        return last
    refuse_within_a_run(trainer.run_context.control, method, "Leave the arguments of `train` out, for the current run.")
    given = trainer.run_context.asked.given
    if given.seed is None and last is not None:
        given = dataclasses.replace(given, seed=last.seed)
    if given.seed is None and train_arguments.get("resume_from") is None:
        raise ConfigurationError(
            "The trainer has no seed, so the order of the samples is decided when a run starts. Make it with one, "
            "`Trainer(..., seed=0)`, or pass `resume_from`: a training state has the seed of its run."
        )
    limits = [callback for callback in trainer.callback_handler if isinstance(callback, LimitBatchesCallback)]
    with rehearsal(trainer, [*preparing(trainer.callback_handler), *limits, _StopsAtOnce()]):
        trainer.run_context.asked.given = given
        trainer.train(train_dataset, num_epochs, **train_arguments)
        plan = trainer.run_context.asked.plan
    assert plan is not None
    return plan


class QuietLimit(LimitBatchesCallback):
    """A limit that says nothing, in addition to any of the user's own."""

    _source = None


class _StopsAtOnce(TrainerCallback):
    """Ends a run before its first update."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        raise StopTrainingError("The rows of its updates are known.")


def taking_part(callbacks: Iterable[Any]) -> list[Any]:
    """Those of `callbacks` that neither print nor write files: `takes_part_in_preflight` says so."""
    return [callback for callback in callbacks if getattr(callback, "takes_part_in_preflight", True)]


def _keep_in_memory(before: Kept, trainer: Trainer) -> None:
    for part in (trainer.get_model(), trainer.optimizer, trainer.scheduler, *held_parts(trainer).values()):
        if isinstance(part, (nn.Module, torch.Tensor)):
            before.module(part if isinstance(part, nn.Module) else nn.ParameterList([part]))
        elif isinstance(part, torch.optim.Optimizer):
            before.optimizer(part)
            for one in part if isinstance(part, Optimizers) else [part]:
                before.object(one)  # schedulers replace its method `step`; groups may have been added
        elif part is not None:
            before.object(part)
    scaler = trainer.run_context.parts.accelerator.scaler
    if scaler is not None:
        before.call(scaler.load_state_dict, copy.deepcopy(scaler.state_dict()))


def _keep_on_disk(before: Kept, trainer: Trainer, place: Path | None) -> None:
    """Keep the parts that are sharded during a run, in the form that any number of shards can load."""
    context = trainer.run_context
    ranks = context.parts.ranks
    folder = Path(ranks.do_on_first(lambda: tempfile.mkdtemp(prefix=".rehearsal-", dir=place)))
    if ranks.is_first:
        before.call(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    before.call(ranks.wait)
    before.modes(trainer.get_model())
    for group in context.parts.parameter_groups:  # loading makes new ones, and whoever holds these puts them back
        before.contents(group)
    save_run(context, folder / "before", {})
    # History and counts were not touched, and need no loading.
    copied = context.copied(history=_copied(context.parts.history))
    before.call(functools.partial(load_run, restores_position=False), copied, folder / "before")


def _copied(history: RunHistory) -> RunHistory:
    """A copy that the rehearsal may write to, of the user's class if it can be copied."""
    try:
        return copy.deepcopy(history)
    except Exception:  # it may hold anything, for example a connection
        return history.copy()
