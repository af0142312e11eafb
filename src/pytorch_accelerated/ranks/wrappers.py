"""What stands around a user's model, and the model inside; compiling a model in place, as a whole or block by block.

A parallel wrapper has the module inside as `module`, gives it the first rank's weights when it is made, averages
gradients over the ranks in the backward pass except in its `no_sync`, and is in `PARALLEL`. `preparation.py` makes it.
"""

from __future__ import annotations

import abc
import collections
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.ranks.compat.torch import compile_call, is_compiled, uncompiled


class Parallel(abc.ABC):  # noqa: B024  # it only names classes of others
    """Wrappers whose forward and backward passes wait for the other ranks; each kind is registered."""


Parallel.register(DistributedDataParallel)
PARALLEL: Any = (Parallel,)


def innermost(model: Any) -> Any:
    """The user's own model inside of data-parallel and compilation wrappers."""
    inner = bare_model(model, keeps_compiled=False)
    return innermost(inner) if inner is not model and isinstance(inner, nn.Module) else model


def bare_model(model: Any, *, keeps_compiled: bool = True) -> Any:
    """The module inside of what training wraps around it.

    Args:
        model: a module, wrapped or not.
        keeps_compiled: False to also remove the wrapper of the user's own ``torch.compile(model)``.
    """
    while isinstance(model, PARALLEL + (DataParallel,)):
        model = model.module
    return model if keeps_compiled else uncompiled(model)


def compile_in_place(model: nn.Module, arguments: Mapping[str, Any] | bool) -> None:
    """Compile `model` or its repeated blocks at their next call. The names in the state dict stay the same.

    Modules that are already compiled are left alone.

    Args:
        model: the model to compile.
        arguments: arguments of `torch.compile`, or True for none. With ``regional=True`` only the repeated blocks are
            compiled: blocks of one class share their code, so compiling takes a fraction of the time.

    Raises:
        ConfigurationError: if there are no repeated blocks.
    """
    options = dict(arguments) if isinstance(arguments, Mapping) else {}
    modules = [model]
    if options.pop("regional", False):
        modules = list(repeated_blocks(model))
        if not modules:
            raise ConfigurationError(
                f"`compile_model` has regional=True, but {type(model).__name__} has no repeated blocks in an "
                "nn.ModuleList or nn.Sequential. Remove `regional` to compile the whole model."
            )
    for module in modules:
        if is_compiled(module):
            continue
        if is_of_torch(module):
            compile_call(module, **options)
        else:
            module.compile(**options)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that share an `nn.ModuleList` or `nn.Sequential` with another module of their class.

    Single torch layers don't count as blocks: compiling one alone gains little.
    """
    children = list(module.children())
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    times = collections.Counter(type(child) for child in children if is_list and _may_be_block(child))
    for child in children:
        if times[type(child)] > 1:
            yield child
        else:
            yield from repeated_blocks(child)


def _may_be_block(module: nn.Module) -> bool:
    is_layer = is_of_torch(module) and not list(module.children())
    # A list has no forward pass to compile.
    return not is_layer and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def is_of_torch(module: nn.Module) -> bool:
    """Whether the class of `module` is one of torch's."""
    return type(module).__module__.partition(".")[0] == "torch"
