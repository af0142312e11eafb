"""A rehearsal: a training run that leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.callbacks.handler import CallbackHandler
from pytorch_accelerated.checkpointing.loading import keep_object, keep_optimizer
from pytorch_accelerated.checkpointing.training_state import save_run
from pytorch_accelerated.data.ordering import own_generators_kept
from pytorch_accelerated.errors import ArgumentTypeError
from pytorch_accelerated.models.held import held_parts
from pytorch_accelerated.models.preparation import is_replicated
from pytorch_accelerated.seeding import generator_states, restore_generator_states
from pytorch_accelerated.training.hooks import own_events

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer
    from pytorch_accelerated.tracking.history import RunHistory


@contextlib.contextmanager
def rehearsal(trainer: Trainer, callbacks: Iterable[Any], *, place: Path | None = None) -> Iterator[None]:
    """Context in which the trainer may train with `callbacks`; afterwards it is as before. All ranks must enter it.

    Restored, to the bit and after any exception: the trainer's attributes, the modules, optimizers and schedulers among
    them and in their lists and dicts (with gradients, buffers and modes), the gradient scaler, the run history, the
    states of `callbacks`, and the generators of torch, numpy, random and of loaders. The copies need as much memory as
    model and optimizer; with FSDP or DeepSpeed, they are written to disk.

    Args:
        trainer: the trainer, which is not at work.
        callbacks: the callbacks that take part, instead of the trainer's.
        place: a folder for temporary files; default: that of the system.
    """
    callbacks, attributes = list(callbacks), dict(vars(trainer))
    if trainer.device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # or its generators would not be among those that are kept
    with contextlib.ExitStack() as undo:
        undo.callback(restore_generator_states, generator_states())  # last: restoring others may draw from them
        for callback in callbacks:
            _keep_callback(undo, callback)
        if is_replicated(trainer.run_context.accelerator):
            _keep_in_memory(undo, trainer)
        else:
            _keep_on_disk(undo, trainer, place)
        undo.callback(vars(trainer).update, attributes)
        undo.callback(vars(trainer).clear)
        undo.enter_context(own_generators_kept())
        trainer.run_history = _copied(trainer.run_history)
        trainer.callback_handler = CallbackHandler(callbacks, custom_events=own_events(trainer))
        yield


def refuse(arguments: Mapping[str, Any], names: Iterable[str], *, by: str) -> None:
    """Refuse arguments of `train` that a look decides about.

    Raises:
        ArgumentTypeError: if one of them is given.
    """
    given = [f"`{name}`" for name in names if name in arguments]
    if given:
        raise ArgumentTypeError(f"`{by}` got {', '.join(given)}, which it determines itself. Leave it out.")


def preparing(callbacks: Iterable[Any]) -> list[Any]:
    """Those of `callbacks` without which the trainer cannot train: they declare `prepares_run`."""
    return [callback for callback in callbacks if getattr(callback, "prepares_run", False)]


def _keep_in_memory(undo: contextlib.ExitStack, trainer: Trainer) -> None:
    for part in (trainer.get_model(), trainer.optimizer, trainer.scheduler, *held_parts(trainer).values()):
        if isinstance(part, (nn.Module, torch.Tensor)):
            _keep_module(undo, part if isinstance(part, nn.Module) else nn.ParameterList([part]))
        elif isinstance(part, torch.optim.Optimizer):
            keep_optimizer(undo, part, keep=copy.deepcopy)
            keep_object(undo, part)  # schedulers replace its method `step`; groups may have been added
        elif part is not None:
            keep_object(undo, part)
    scaler = trainer.run_context.accelerator.scaler
    if scaler is not None:
        undo.callback(scaler.load_state_dict, copy.deepcopy(scaler.state_dict()))


def _keep_module(undo: contextlib.ExitStack, module: nn.Module) -> None:
    modes = [(part, part.training) for part in module.modules()]
    parameters = [(each, _copy(each.data), each.grad, _copy(each.grad)) for each in module.parameters()]
    buffers = [
        (part, name, buffer, _copy(buffer))
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]

    @torch.no_grad()
    def restore() -> None:
        for part, is_training in modes:
            part.training = is_training
        for parameter, before, gradient, gradient_before in parameters:
            if parameter.device == before.device:
                parameter.data.copy_(before)
            else:
                parameter.data = before
            if gradient is not None:
                gradient.copy_(gradient_before)
            parameter.grad = gradient
        for part, name, buffer, before in buffers:
            buffer.copy_(before)
            setattr(part, name, buffer)  # moving a module to another device replaces its buffers

    undo.callback(restore)


def _keep_on_disk(undo: contextlib.ExitStack, trainer: Trainer, place: Path | None) -> None:
    """Keep the parts that are sharded during a run, in the form that any number of shards can load."""
    ranks = trainer.run_context.ranks
    folder = Path(ranks.do_on_first(lambda: tempfile.mkdtemp(prefix=".rehearsal-", dir=place)))
    if ranks.is_first:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
    undo.callback(ranks.wait)
    modes = [(module, module.training) for module in trainer.get_model().modules()]
    save_run(trainer.run_context.contents(), folder / "before", {})

    def restore() -> None:
        history, run_state = trainer.run_history, trainer.run_state  # they were not touched, and need no loading
        trainer.run_history = _copied(history)
        trainer.run_context.load_state(folder / "before", is_at_work=False)
        trainer.run_history, trainer.run_state = history, run_state
        for module, is_training in modes:
            module.training = is_training

    undo.callback(restore)


def _keep_callback(undo: contextlib.ExitStack, callback: Any) -> None:
    if hasattr(callback, "state_dict"):
        undo.callback(callback.load_state_dict, copy.deepcopy(callback.state_dict()))
    keep_object(undo, callback)


def _copied(history: RunHistory) -> RunHistory:
    """A copy that the rehearsal may write to, of the user's class if it can be copied."""
    try:
        return copy.deepcopy(history)
    except Exception:  # it may hold anything, for example a connection
        return history.copy()


def _copy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().clone()
