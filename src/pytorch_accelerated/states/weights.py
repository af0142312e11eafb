"""The weights of a model: names without the prefixes of wrappers, loading all or nothing, finding non-finite values."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.errors import InvalidCheckpointError, NonFiniteLossError, explained_loading
from pytorch_accelerated.ranks.compat.torch import LOADING_METHODS, WRAPPED_NAMES, module_versions, set_module_versions
from pytorch_accelerated.ranks.numerics import listed
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.ranks.sharding import Shard, has_shards, is_sharded, own_part, pieces_of, sharded_like
from pytorch_accelerated.ranks.wrappers import bare_model

_MOST_COMPLAINTS = 20  # in one error


def canonical_state_dict(module: nn.Module) -> OrderedDict[str, Any]:
    """The state dict of `module` with the names of the bare module, however it and its parts are wrapped.

    Only the prefixes of torch's own wrappers (such as DDP, FSDP and compiled modules) are removed: a user's submodule
    called ``module`` keeps its name. The tensors are the live ones, not copies.
    """
    state, canonical = type(module).state_dict(module), _canonical_names(module)
    state.update(pieces_of(module))
    return state if canonical is str and type(state) is OrderedDict else _renamed(state, canonical)


def check_canonical(module: nn.Module, state: Any, *, may_lack: Collection[str] = ()) -> None:
    """Refuse a state that `load_canonical` could not load into `module`. Changes nothing.

    A module that overrides `load_state_dict` may accept other names, so it has to check them itself. `state` need not
    have the names in `may_lack`, whose live values stay.

    Raises:
        InvalidCheckpointError: names the keys that are missing or unexpected, and the tensors whose shape or kind of
            number differs.
    """
    if not isinstance(state, Mapping):
        raise InvalidCheckpointError(
            f"The saved state of this {type(module).__name__} is a {type(state).__name__}, not a dict of tensors."
        )
    if _canonical_names(module) is str and _overrides(module, "load_state_dict"):
        return
    live = canonical_state_dict(module)
    complaints = [f"missing: {name}" for name in live if name not in state and name not in may_lack]
    complaints += [f"unexpected: {name}" for name in state if name not in live]
    mismatches = {name: _mismatch(value, state[name]) for name, value in live.items() if name in state}
    complaints += [f"{name}: {mismatch}" for name, mismatch in mismatches.items() if mismatch]
    if complaints:
        further = [f"and {len(complaints) - _MOST_COMPLAINTS} more"] * (len(complaints) > _MOST_COMPLAINTS)
        raise InvalidCheckpointError(
            f"The saved state does not belong to this {type(module).__name__}; nothing was loaded:\n  "
            + "\n  ".join([*complaints[:_MOST_COMPLAINTS], *further])
            + "\nBuild the model with the same arguments as when it was saved."
        )


def load_canonical(module: nn.Module, state: Mapping[str, Any], *, may_lack: Collection[str] = ()) -> None:
    """Load the result of `canonical_state_dict` into `module`, wrapped or not: all of it or nothing.

    The state is checked first. If a module overrides how it loads, which may fail at any point, the current weights are
    copied and restored on failure. If only `state_dict` is overridden, values that it leaves out stay as they are.

    Arguments as for `check_canonical`.

    Raises:
        InvalidCheckpointError: says what does not fit.
    """
    check_canonical(module, state, may_lack=may_lack)
    copies = None
    if loads_its_own_way(module):
        live = module.state_dict().items()
        copies = copy.deepcopy({name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in live})
    with explained_loading(f"This {type(module).__name__}", "the checkpoint"):
        try:
            _load_checked(module, state, may_lack)
        except Exception:
            if copies is not None:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    module.load_state_dict(copies)
            raise


def loads_its_own_way(module: nn.Module) -> bool:
    """Whether `module`, or one inside it, overrides how it loads, so that it may refuse a state that was checked."""
    return any(_overrides(part, name) for part in module.modules() for name in LOADING_METHODS)


def _load_checked(module: nn.Module, state: Mapping[str, Any], may_lack: Collection[str]) -> None:
    canonical = _canonical_names(module)
    if canonical is str and _overrides(module, "load_state_dict"):
        module.load_state_dict(_renamed(state, canonical))
        return
    paths = {canonical(path): path for path, _ in module.named_modules(remove_duplicate=False)}
    live = {**type(module).state_dict(module), **pieces_of(module)}
    names = {canonical(name): name for name in live}
    state = _renamed(state, lambda name: names.get(name) or paths.get(name, name))
    state.update({name: sharded_like(live[name], value) for name, value in state.items() if is_sharded(live.get(name))})
    for name, piece in pieces_of(module).items():
        if name in state:
            piece.take(state.pop(name))
            may_lack = {*may_lack, name}
    if not may_lack and not _overrides(module, "state_dict"):
        module.load_state_dict(state)
        return
    unknown = module.load_state_dict(state, strict=False).unexpected_keys
    if unknown:
        raise InvalidCheckpointError(
            f"The `state_dict` of this {type(module).__name__} is overridden and returns the names "
            f"{', '.join(unknown)}, which no parameter or buffer has. Override `load_state_dict` as well."
        )


def check_finite(named_parameters: Iterable[tuple[str, Any]]) -> None:
    """Raise if a parameter is NaN or infinite. Costs a reduction per parameter and one read by the host.

    Args:
        named_parameters: names and tensors of any dtype and device; of sharded ones, this rank's parts are checked.

    Raises:
        NonFiniteLossError: names the parameters, which are searched one by one only in this case.
    """
    parameters = {
        name: parameter.detach().float() if parameter.element_size() == 1 else parameter.detach()
        for name, parameter in ((name, own_part(parameter)) for name, parameter in named_parameters)
        if parameter.numel() and (parameter.is_floating_point() or parameter.is_complex())
    }
    if are_finite(parameters.values()).item():
        return
    bad = [name for name, parameter in parameters.items() if not torch.isfinite(parameter).all()]
    raise NonFiniteLossError(
        f"NaN or infinite values in {len(bad)} of {len(parameters)} parameters: {listed(bad)}. Such a model is not "
        "saved; earlier saves are unchanged. Lower the learning rate or clip the gradients."
    )


def are_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Whether no value is NaN or infinite: a 0-dim bool tensor. Does not wait for the device.

    Args:
        tensors: dense and not empty, of any floating or complex dtype of two bytes or more, on any devices.
    """
    # Unlike a sum, extremes cannot overflow, and they propagate NaN; a norm would take ten times as long. They are
    # tested all at once, because for many small tensors the number of calls counts.
    extremes: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        extremes.setdefault((real.device, real.dtype), []).extend(torch.aminmax(real.detach()))
    flags = [torch.isfinite(torch.stack(each)).all() for each in extremes.values()]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).all() if flags else torch.tensor(True)


def _canonical_names(module: nn.Module) -> Callable[[str], str]:
    """A function that removes the steps from wrappers to wrapped modules from names in `module`; `str` without any."""
    wrapped = set()
    for path, wrapper in module.named_modules(remove_duplicate=False):
        for kind in type(wrapper).__mro__:
            if kind.__module__.startswith("torch.") and kind.__name__ in WRAPPED_NAMES:
                inner_name = WRAPPED_NAMES[kind.__name__]
                wrapped.add(f"{path}.{inner_name}" if path else inner_name)

    def canonical(name: str) -> str:
        steps = name.split(".")
        return ".".join(step for end, step in enumerate(steps, 1) if ".".join(steps[:end]) not in wrapped)

    return canonical if wrapped else str


def _overrides(module: nn.Module, name: str) -> bool:
    """Whether a method of a class is the user's, not torch's."""
    method = getattr(type(module), name)
    return not str(getattr(method, "__module__", "")).startswith("torch.")


def _renamed(state: Mapping[str, Any], rename: Callable[[str], str]) -> OrderedDict[str, Any]:
    renamed = OrderedDict((rename(name), value) for name, value in state.items())
    versions = module_versions(state)  # by module path; a wrapped module's entry replaces that of its wrapper
    if versions is not None:
        set_module_versions(renamed, OrderedDict((rename(path), version) for path, version in versions.items()))
    return renamed


def _mismatch(live: Any, saved: Any) -> str | None:
    """Why `saved` cannot be copied into `live`, if it cannot."""
    if isinstance(live, Shard):
        shapes = tuple(live.shape), tuple(getattr(saved, "shape", ()))
        return None if shapes[0] == shapes[1] else f"saved with {shapes[1]}, the model has {shapes[0]}"
    if not isinstance(live, torch.Tensor) or nn.parameter.is_lazy(live):
        return None  # extra state of a module, which checks it itself, or a parameter that takes any shape
    if not isinstance(saved, torch.Tensor) or saved.shape != live.shape:
        return f"saved as {_kind(saved)}, the model has {_kind(live)}"
    if saved.is_floating_point() != live.is_floating_point() or saved.is_complex() != live.is_complex():
        return f"saved with {saved.dtype}, the model has {live.dtype}"
    return None


def _kind(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def check_model_finite(model: nn.Module, ranks: Ranks) -> None:
    """`check_finite` for a model, wrapped or not. All ranks must call it: each sees only its shard of a sharded one."""
    bare = bare_model(model)
    if has_shards(bare):
        ranks.do_on_all(lambda: check_finite({**dict(bare.named_parameters()), **pieces_of(bare)}.items()))
    else:
        check_finite(bare.named_parameters())
