"""Prepares the model and the optimizer for a run, restores them afterwards, and switches optimizers with modes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.ranks.accelerators import refuse_idle_fp8
from pytorch_accelerated.ranks.compat.accelerate import forget_prepared
from pytorch_accelerated.ranks.keeping import kept
from pytorch_accelerated.ranks.optimizers import Optimizers
from pytorch_accelerated.ranks.sharding import has_shards
from pytorch_accelerated.ranks.wrappers import PARALLEL, compile_in_place

if TYPE_CHECKING:
    from accelerate import Accelerator

_MISSING = object()


class PreparedModel:
    """A model on its device with the wrappers that accelerate needs; `release` removes them.

    Where accelerate's wrapper would do nothing, the user's optimizer is not wrapped: the wrapper costs many times more
    than a small optimizer step.

    Args:
        accelerator: the accelerator of this process.
        model: the bare module.
        optimizer: its optimizer, or None.
        for_training: False omits what only training needs.
        compile_arguments: passed to `compile_in_place`; False: don't compile.
        is_wrapped: whether a wrapper exchanges the gradients of multiple ranks.

    Attributes:
        model: the model to call.
        optimizer: the optimizer to step.
        has_plain_backward: whether ``loss.backward()`` is enough.
        gradient_order: of DDP with three and more ranks, where it shows in the bits; else None.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        optimizer: Any,
        *,
        for_training: bool,
        compile_arguments: Mapping[str, Any] | bool = False,
        is_wrapped: bool = True,
    ) -> None:
        self._accelerator = accelerator
        self._bare_model = model
        self._bare_optimizer = optimizer
        self._forward = getattr(model, "__dict__", {}).get("forward", _MISSING)
        self.model = model
        self.optimizer = optimizer
        is_sharded = has_shards(model)
        self._hook: RemovableHandle | None = None  # until the model is called
        self._autocast_hook: RemovableHandle | None = None
        self.gradient_order: GradientOrder | None = None
        self.has_plain_backward = accelerator.scaler is None and (is_replicated(accelerator) or is_sharded)
        if not isinstance(model, nn.Module):
            return
        if isinstance(model, DataParallel):
            _refuse_replicas(model, accelerator, compiles=compile_arguments is not False)
        if compile_arguments is not False:
            compile_in_place(model, compile_arguments)
        if not for_training:
            self.model = accelerator.prepare_model(model, evaluation_mode=True)
        elif is_replicated(accelerator) or is_sharded:
            refuse_idle_fp8(accelerator, model)
            # A model sharded by the user exchanges its gradients itself.
            self.model = accelerator.prepare_model(model, evaluation_mode=is_sharded or not is_wrapped)
            if accelerator.scaler is not None:
                self.optimizer = accelerator.prepare_optimizer(optimizer)
            else:
                move_state(optimizer)
        else:
            self.model, self.optimizer = accelerator.prepare(model, optimizer)
        if isinstance(model, DataParallel) and accelerator.mixed_precision == "bf16":
            self._autocast_hook = model.module.register_forward_pre_hook(lambda *_: _autocast_to_bf16(accelerator))
        if for_training and isinstance(self.model, PARALLEL):
            self._hook = self.model.register_forward_pre_hook(lambda *_: self._forget_calls())
        rebuilds_buckets = isinstance(self.model, DistributedDataParallel) and not (
            self.model.find_unused_parameters or self.model.static_graph
        )
        if self._hook is not None and accelerator.num_processes > 2 and rebuilds_buckets:
            self.gradient_order = GradientOrder(self.model)

    def complaint(self) -> str:
        """What to warn about after a training epoch: once, if only parts of the model were called in it; else ""."""
        if self._hook is None:
            return ""
        self._forget_calls()
        return (
            "In this epoch `self.model` was never called, only the model inside it, or its parts: gradients are "
            "exchanged between processes by `self.model(...)` alone, so each process trains a model of its own. Call "
            "it in `calculate_train_batch_loss`, and let the model's `forward` do what needs a part of it."
        )

    def _forget_calls(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def make_schedule(self) -> Any:
        """The schedule of what the model is prepared with, if that brings one."""

    def take_over(self, step: Any) -> None:
        """Change what the run's step calls, once: here nothing. An engine clips by itself and knows what it skipped."""

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager for a batch after which the ranks need not exchange gradients yet."""
        return self._accelerator.no_sync(self.model)  # type: ignore[no-any-return]

    def release(self, model: Any) -> tuple[Any, Any]:
        """Return the bare model and optimizer.

        Args:
            model: the trainer's current model. If a callback has replaced it for good, the replacement is kept.
        """
        self._forget_calls()
        if self._autocast_hook is not None:
            self._autocast_hook.remove()
        if self.gradient_order is not None:
            self.gradient_order.release()
        bare = getattr(self._bare_model, "__dict__", {})
        if forget_prepared(self._accelerator, self._bare_model):  # autocast is around the model's forward
            if self._forward is _MISSING:
                bare.pop("forward", None)
            else:
                bare["forward"] = self._forward
        was_replaced = model is not self.model and model is not self._bare_model
        return (model if was_replaced else self._bare_model), self._bare_optimizer


def _refuse_replicas(model: DataParallel[Any], accelerator: Accelerator, *, compiles: bool) -> None:
    if compiles:
        reason = "its replicas would all call the one that is compiled (`compile_model`, `torch_compile`)"
    elif accelerator.num_processes > 1 and len(model.device_ids) > 1:
        reason = f"each of the {accelerator.num_processes} processes would use all of its devices"
    else:
        return
    raise ConfigurationError(
        f"The model is in DataParallel, but {reason}. Don't wrap it: start one process for each device with torchrun."
    )


def _autocast_to_bf16(accelerator: Accelerator) -> None:
    """Set the type of autocast, if it is on: the thread of a replica begins with the device's, float16."""
    if torch.is_autocast_enabled(accelerator.device.type):
        torch.set_autocast_dtype(accelerator.device.type, torch.bfloat16)


class GradientOrder:
    """Notes the order in which the first gradients of a DDP model come, or repeats a given order.

    DDP averages gradients by the bucket, and the ranks of a part of a bucket are added up in an order that depends on
    where the part is. Sums of three or more numbers differ in the last bits in another order. DDP fills its buckets in
    the order of the parameters at first, and from its second forward pass on in the order in which the first gradients
    came, so a run in a new process would begin with buckets different from those that it was stopped with.

    Where DDP keeps its first buckets, or has a static graph to watch, there is nothing to do.

    Args:
        model: the wrapped model, not called yet.

    Attributes:
        names: of the parameters in that order; empty before the first gradients that are exchanged.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._parameters = {name: each for name, each in model.module.named_parameters() if each.requires_grad}
        self.names: dict[str, None] = {}
        self._hooks = [model.register_forward_pre_hook(lambda *_: self._end())]
        for name, parameter in self._parameters.items():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(self._note, name)))

    def repeat(self, names: Iterable[str]) -> None:
        """Make the buckets of a run whose first gradients came in this order. Must be called by all ranks.

        Gradients of zero pass through the model in this order once. Not for a model that has had gradients already, or
        that trains other parameters now.
        """
        order = list(names)
        if self.names or set(order) != set(self._parameters):
            return
        parameters = [self._parameters[name] for name in order]
        model = self._model
        before = model.module, model.broadcast_buffers
        model.module, model.broadcast_buffers = _Chain(parameters), False  # it has no buffers to broadcast
        try:
            model(torch.zeros(())).backward()
        finally:
            model.module, model.broadcast_buffers = before
        for parameter in parameters:
            parameter.grad = None

    def release(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note(self, name: str, _: torch.Tensor) -> None:
        if self._model.require_backward_grad_sync:
            self.names.setdefault(name)  # one that is used in two backward passes counts once

    def _end(self) -> None:
        if self.names:
            self.release()


class _Chain(nn.Module):
    """A model that uses parameters in the reverse of an order, so that their gradients come in this order."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__()
        self._used = parameters  # a list, whose parameters are not the module's own

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        for parameter in reversed(self._used):
            total = total.to(parameter.device) + (parameter * 0).sum()
        return total


def is_replicated(accelerator: Accelerator) -> bool:
    """Whether each process has the whole model and optimizer."""
    kind: str = accelerator.distributed_type.value
    return kind == "NO" or kind.startswith("MULTI_")  # MULTI_GPU, MULTI_CPU and so on


def move_state(optimizer: Any) -> None:
    """Move the optimizer's state to where its parameters are now."""
    for parameter, state in getattr(optimizer, "state", {}).items():
        for name, value in state.items() if isinstance(parameter, torch.Tensor) else ():
            # Scalar counters stay on the CPU, where torch's own optimizers keep them.
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                state[name] = value.to(parameter.device)


class OptimizerMode:
    """The mode of optimizers such as schedulefree's, with methods `train` and `eval` that change the weights.

    While such an optimizer trains, the model has other weights than those that it is evaluated and saved with.

    Args:
        optimizers: all that train something.

    Attributes:
        has_modes: whether any of them has modes.
        is_training: whether the weights are the ones to train.
    """

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        alone: list[Any] = [one for each in inner for one in (each if isinstance(each, Optimizers) else [each])]
        self._optimizers = [one for one in alone if callable(getattr(one, "train", None)) and hasattr(one, "eval")]
        self.has_modes = bool(self._optimizers)
        self.is_training = False

    @property
    def changes_weights(self) -> bool:
        """Whether the weights to evaluate and save differ from those that the model has now."""
        return self.is_training and self.has_modes

    def train(self) -> None:
        """Give the model the weights of training."""
        for optimizer in self._optimizers:
            optimizer.train()
        self.is_training = True

    def eval(self) -> None:
        """Give the model the weights to evaluate and save."""
        for optimizer in self._optimizers:
            optimizer.eval()
        self.is_training = False

    def take_over(self, *, is_training: bool) -> None:
        """Note that the weights, which were loaded, are the ones to train, or the ones to evaluate and save.

        An optimizer may not keep its mode in its state, such as schedulefree's wrapper of another one.
        """
        with kept() as before:
            before.tensors(self._parameters())
            self.train() if is_training else self.eval()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """In the block, the model has the weights to evaluate and save; afterwards, those to train, to the bit."""
        with kept() as before:
            if self.changes_weights:
                before.tensors(self._parameters())  # the methods round, there and back again
                before.call(self.train)
            self.eval()
            yield

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (each for one in self._optimizers for group in one.param_groups for each in group["params"])
