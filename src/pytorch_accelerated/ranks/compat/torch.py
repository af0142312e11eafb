"""Private members of torch: modules, optimizers, tensors and loaders."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader
from torch.utils.data._utils import pin_memory as pinning

Tensors = list[Tensor] | tuple[Tensor, ...]

WRAPPED_NAMES = {
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""Torch's wrappers by class name, which needs no import of them, and the name under which each keeps the module that it
wraps. The names are part of every key of a wrapper's state dict; torch removes them for FSDP only."""

LOADING_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
"""The methods that a module may override to load a state in its own way. Torch's documentation names the second one,
but modules have no public method of that use."""


# ------------------------------------------------------------------------------------------------------ many tensors


def copy_all(targets: Tensors, sources: Tensors) -> None:
    """Copy each source into its target with a few kernels in all. The public way is one kernel for each tensor."""
    if targets:  # torch refuses empty lists
        torch._foreach_copy_(targets, sources)


def add_all(targets: Tensors, sources: Tensors) -> None:
    """Add each source to its target with a few kernels in all; see `copy_all`."""
    torch._foreach_add_(targets, sources)


def move_towards(tensors: Tensors, targets: Tensors, weight: float) -> None:
    """Move each tensor by the share `weight` towards its target, with a few kernels in all; see `copy_all`."""
    if tensors:
        torch._foreach_lerp_(tensors, targets, weight)


def scale_all(tensors: Tensors, factor: float | Tensor) -> None:
    """Multiply all tensors in place with a few kernels in all; see `copy_all`."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def norms_of(tensors: Tensors) -> Tensors:
    """The norm of each tensor, with a few kernels in all. Torch's public function returns one norm of all of them."""
    return torch._foreach_norm(tensors) if tensors else ()


def version_of(tensor: Any) -> int | None:
    """The number of times that a tensor was changed in place, which nothing public tells. None if it does not count."""
    if not isinstance(tensor, Tensor) or tensor.is_inference():
        return None
    return tensor._version


def acts_in_backward(parameter: Tensor) -> bool:
    """Whether a hook acts as soon as the gradient of a parameter is there. Publicly it can only be registered."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def stored_values(tensor: Tensor) -> Tensor:
    """The values that a tensor stores, in memory shared with it. A sparse tensor's public ``values`` refuses those that
    are not coalesced, as gradients are."""
    return tensor._values() if tensor.is_sparse else tensor


# ----------------------------------------------------------------------------------------------------------- modules


def is_batch_norm(module: nn.Module) -> bool:
    """Whether `module` is a batch norm layer of any number of dimensions. Their common class has no public name."""
    return isinstance(module, _BatchNorm)


def tensor_stores(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The live dicts of the parameters and the buffers of `module` itself.

    The public iterators make new pairs on each call, which takes far longer than looking a tensor up, and they cannot
    tell that a tensor was replaced by another one.
    """
    return module._parameters, module._buffers  # type: ignore[return-value]


def forward_hook_stores(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The live dicts of the hooks around the forward pass. Publicly a hook can be removed by its own handle only."""
    return module._forward_hooks, module._forward_pre_hooks


def child_store(module: nn.Module) -> dict[str, nn.Module | None]:
    """The live dict of the direct submodules of `module`; see `tensor_stores`."""
    return module._modules


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether the state dict of `module` has its own parameter or buffer `name`. The public way is to make one."""
    return name not in module._non_persistent_buffers_set


def uncompiled(model: Any) -> Any:
    """What ``torch.compile(module)`` was given, where `model` is its result; else `model`."""
    return getattr(model, "_orig_mod", model)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, which nothing public tells."""
    return module._compiled_call_impl is not None


def compile_call(module: nn.Module, **options: Any) -> None:
    """Do what ``module.compile(**options)`` does, also for a class of torch such as `nn.Sequential`.

    The compiler skips code of torch, unless code of somebody else calls it.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(call, **options)


def module_versions(state: Mapping[str, Any]) -> Any:
    """The format versions of the modules whose state dict `state` is, by path; None without. They have no public name,
    but a module that has changed its format converts a state without them as if it were an old one."""
    return getattr(state, "_metadata", None)


def set_module_versions(state: Any, versions: Any) -> None:
    """Give the state dict `state` format versions; see `module_versions`."""
    state._metadata = versions


# -------------------------------------------------------------------------------------------------------- optimizers


def found_infinite(scaler: Any, optimizer: Any) -> bool:
    """Whether a gradient scaler found infinite gradients when it unscaled the gradients of `optimizer`.

    Publicly this shows only in a lower scale after the update, which a scaler of constant scale never shows.
    """
    return any(flag.item() for flag in scaler._found_inf_per_device(optimizer).values())


# ----------------------------------------------------------------------------------------------------------- loaders


def parts_of_schedule(scheduler: Any) -> Any:
    """The schedulers that a scheduler runs at once or one after the other; none if it is a single one."""
    return getattr(scheduler, "schedulers", None) or getattr(scheduler, "_schedulers", ())


def pinned(batch: Any) -> Any:
    """A batch in pinned memory, as a loader puts it there in this process; publicly only a loader does it."""
    return pinning.pin_memory(batch)  # type: ignore[no-untyped-call]


def kept_pass(loader: DataLoader[Any]) -> Iterator[Any] | None:
    """The iterator whose workers `loader` keeps for its next pass. A loader has no public name for it."""
    return loader._iterator


def end_workers(loader: DataLoader[Any], batches: Any) -> None:
    """Let `loader` start new workers for its next pass, and `batches` end its own, for which torch has no public call.

    If `batches` is not an iterator with workers, nothing is done.
    """
    if hasattr(batches, "_shutdown_workers"):
        loader._iterator = None
        stop_workers(batches)


def stop_workers(batches: Any) -> None:
    """Ask the workers of the iterator `batches` to end, then kill those that have not."""
    try:
        batches._shutdown_workers()
    finally:  # torch's error about the death of another worker may come in the middle of it
        for worker in workers_of(batches):
            if worker.is_alive():
                worker.kill()  # it hangs, and has ignored torch's polite SIGTERM
                worker.join()


def workers_of(batches: Any) -> list[Any]:
    """The worker processes of a loader's iterator, which have no public name."""
    return list(getattr(batches, "_workers", ()))


def import_what_exit_imports() -> None:
    """Import what torch's compiler would import when the process ends.

    It has a report of compile times written then, by tabulate, which evaluates code as it is imported. Code that is
    evaluated this late makes Python forget that the process ends by KeyboardInterrupt: a shell would see status 1
    instead of 130, and a loop of runs would continue.
    """
    if "torch._dynamo.utils" in sys.modules:
        with contextlib.suppress(ImportError):
            import tabulate  # noqa: F401


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell the schedules of `optimizer` that it was stepped, which another one has done in its place."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
