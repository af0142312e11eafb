"""What is in a model: its names without the marks of wrappers, loading all or nothing, and whether it is finite."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.errors import InvalidCheckpointError, NonFiniteLossError

_INNER_NAMES = {
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""Torch's wrappers by class name, which needs no import of them, and what each calls the module that it wraps."""


def canonical_state_dict(module: nn.Module) -> OrderedDict[str, Any]:
    """The state dict of `module` with the names that the bare module has, however it and its parts are wrapped.

    Only what torch's own wrappers (such as DDP, FSDP and compiled modules) add is removed: a submodule of yours that
    is really called ``module`` keeps its name. The tensors are the live ones, not copies.
    """
    inner = _wrapped_paths(module)
    return _renamed(module.state_dict(), lambda name: _canonical(name, inner))


def load_canonical(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `canonical_state_dict` returned into `module`, wrapped or not. All of it or nothing.

    Raises:
        InvalidCheckpointError: names every key that is missing or unexpected, and every tensor of another shape.
    """
    inner = _wrapped_paths(module)
    live = {_canonical(name, inner): (name, value) for name, value in module.state_dict().items()}
    complaints = [f"missing: {name}" for name in live if name not in state]
    complaints += [f"unexpected: {name}" for name in state if name not in live]
    for name, (_, value) in live.items():
        if name in state and not _fits(value, state[name]):
            complaints.append(f"{name}: saved as {_kind(state[name])}, the model has {_kind(value)}")
    if complaints:
        raise InvalidCheckpointError(
            f"The saved state does not belong to this {type(module).__name__}; nothing was loaded:\n  "
            + "\n  ".join(complaints)
            + "\nBuild the model with the same arguments as when it was saved."
        )
    live_paths = {_canonical(path, inner): path for path, _ in module.named_modules(remove_duplicate=False)}
    live_names = {name: live_name for name, (live_name, _) in live.items()}
    module.load_state_dict(_renamed(state, lambda name: live_names.get(name) or live_paths.get(name, name)))


def check_finite(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises if a parameter is NaN or infinite. One reduction over all of them and one read by the host.

    Args:
        named_parameters: names and tensors of any dtype and device; of a sharded model the local shards.

    Raises:
        NonFiniteLossError: names the parameters, which are searched one by one only then.
    """
    parameters = {
        name: parameter.detach().float() if parameter.element_size() == 1 else parameter.detach()
        for name, parameter in named_parameters
        if parameter.numel() and (parameter.is_floating_point() or parameter.is_complex())
    }
    # The largest absolute value: unlike a sum it cannot overflow, and a NaN comes through.
    largest = nn.utils.get_total_norm(parameters.values(), norm_type=float("inf"))
    if torch.isfinite(largest).item():
        return
    bad = [name for name, parameter in parameters.items() if not torch.isfinite(parameter).all()]
    shown = ", ".join(repr(name) for name in bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    raise NonFiniteLossError(
        f"NaN or infinite values in {len(bad)} of {len(parameters)} parameters: {shown}. Nothing is saved from such a "
        "model; what was saved before is still there. Lower the learning rate or clip the gradients."
    )


def _wrapped_paths(module: nn.Module) -> set[str]:
    """The paths, from `module` on, of modules that a wrapper wraps."""
    paths = set()
    for path, wrapper in module.named_modules(remove_duplicate=False):
        for kind in type(wrapper).__mro__:
            if kind.__module__.startswith("torch.") and kind.__name__ in _INNER_NAMES:
                inner_name = _INNER_NAMES[kind.__name__]
                paths.add(f"{path}.{inner_name}" if path else inner_name)
    return paths


def _canonical(name: str, wrapped_paths: set[str]) -> str:
    """`name` without each step that leads from a wrapper to what it wraps."""
    steps = name.split(".")
    kept = [step for index, step in enumerate(steps) if ".".join(steps[: index + 1]) not in wrapped_paths]
    return ".".join(kept)


def _renamed(state: Mapping[str, Any], rename: Callable[[str], str]) -> OrderedDict[str, Any]:
    renamed = OrderedDict((rename(name), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)  # by module path; a wrapper comes before, and gives way to, its inner
    if versions is not None:
        renamed._metadata = OrderedDict(  # type: ignore[attr-defined]
            (rename(path), version) for path, version in versions.items()
        )
    return renamed


def _fits(live: Any, saved: Any) -> bool:
    if not isinstance(live, torch.Tensor) or nn.parameter.is_lazy(live):
        return True  # extra state of a module, which checks it itself, or a parameter that takes any shape
    return isinstance(saved, torch.Tensor) and saved.shape == live.shape


def _kind(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
