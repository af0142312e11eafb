"""Held parts: what a trainer and its loss function have in addition to model, optimizer and scheduler, such as a target
network, a loss with parameters or a second optimizer. A run saves and restores them, and keeps them equal on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.ranks.preparation import is_replicated
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.ranks.sharding import has_shards, is_sharded
from pytorch_accelerated.ranks.wrappers import PARALLEL

if TYPE_CHECKING:
    from accelerate import Accelerator

_NOT_HELD = ("model", "model_wrapped", "optimizer", "scheduler", "lr_scheduler")
_DATA = ("train_dataset", "eval_dataset")  # which may be long lists
_LOSSES = ("loss_func", "compute_loss_func")
_DEPTH = 2  # of lists and dicts in each other
_METHODS = ("step", "state_dict", "load_state_dict")  # of optimizers, schedulers and scalers


def held_parts(holder: Any) -> dict[str, Any]:
    """Modules, parameters, optimizers and schedulers that are attributes of a trainer or of its loss function, by path.

    Those in lists, tuples and dicts count too, and parameters that only an optimizer has, each once. The trainer's own
    model, optimizer and scheduler, and what belongs to them, are left out.
    """
    own = _own_parts(holder)
    own += [getattr(part, "optimizer", None) for part in own]  # inside of accelerate's wrapper
    seen = {id(part) for part in own} | {id(tensor) for part in own for tensor in tensors_of(part)}
    found: dict[str, Any] = {}
    attributes = {name: value for name, value in vars(holder).items() if name not in (*_NOT_HELD, *_DATA)}
    parts = (
        pair
        for name, value in attributes.items()
        for pair in (_parts_of_function(name, value) if name in _LOSSES else _parts(name, value, _DEPTH))
    )
    for path, part in parts:
        tensors = tensors_of(part)
        if id(part) not in seen and not (tensors and all(id(tensor) in seen for tensor in tensors)):
            found[path] = part
            seen |= {id(part), *map(id, tensors)}
    for path, optimizer in optimizers_of(holder, found).items():
        for index, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                # A sharded module has other parameters than its optimizer while these are gathered.
                if id(parameter) not in seen and not is_sharded(parameter):
                    found[f"{path}.param_groups[{index}]['params'][{number}]"] = parameter
                    seen.add(id(parameter))
    return found


def optimizers_of(holder: Any, held: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's optimizer, if it has one, and those among its held parts, by path."""
    parts = {"optimizer": holder.optimizer, **held}
    return {path: part for path, part in parts.items() if hasattr(part, "param_groups")}


def is_only_in_optimizer(path: str) -> bool:
    """Whether the path of a held part says that nothing but an optimizer has it."""
    return ".param_groups[" in path


def trained_outside(holder: Any, held: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What optimizers train that is not the model's, by path. Nobody else averages its gradients over the ranks."""
    paths = {
        id(tensor): f"{path}.{name}" if name else path
        for path, part in held.items()
        for name, tensor in (part.named_parameters() if isinstance(part, nn.Module) else [("", part)])
    }
    modules = [module for part in held.values() if isinstance(part, nn.Module) for module in part.modules()]
    wrapped = [module for module in modules if isinstance(module, PARALLEL)]  # the user did so
    own = _own_parts(holder)
    averaged = {id(tensor) for part in [*own, *wrapped] for tensor in tensors_of(part)}
    trained = [
        parameter
        for optimizer in optimizers_of(holder, held).values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    return {paths[id(each)]: each for each in trained if id(each) not in averaged and not is_sharded(each)}


def refuse_outside(outside: Mapping[str, torch.Tensor], accelerator: Accelerator, model: Any, ranks: Ranks) -> None:
    """Reject parameters outside of the model where another library takes the optimizer apart, or ranks have others.

    Must be called by all ranks.
    """
    per_rank = ranks.exchange([f"{path} {tuple(each.shape)}" for path, each in outside.items()])
    if any(own != per_rank[0] for own in per_rank):
        owns = "; ".join(f"rank {rank}: {', '.join(own) or 'none'}" for rank, own in enumerate(per_rank))
        raise ConfigurationError(
            f"The optimizers of the ranks have different parameters that are not the model's ({owns}), but their "
            "gradients are averaged over all ranks. Make the same ones in the same order on every rank."
        )
    if outside and not (is_replicated(accelerator) or has_shards(model)):
        raise ConfigurationError(
            f"The optimizer has parameters that are not the model's: {', '.join(outside)}. "
            f"{accelerator.distributed_type.value} trains those of one model only. Make them parameters of the model."
        )


def share_values(held: Mapping[str, Any], ranks: Ranks) -> None:
    """Give what all ranks hold the values of rank 0. Must be called by all ranks."""
    values = {path: [each for each in tensors_of(part) if _is_plain(each)] for path, part in held.items()}
    own = {path: [(tuple(each.shape), str(each.dtype)) for each in tensors] for path, tensors in values.items()}
    first, *others = ranks.exchange(own)
    for path, layout in first.items():
        if all(each.get(path) == layout for each in others):
            ranks.copy_from_first(values[path])


def tensors_of(part: Any) -> list[torch.Tensor]:
    """The parameters and buffers of a module; a parameter itself; nothing of anything else."""
    if isinstance(part, nn.Module):
        return [*part.parameters(), *part.buffers()]
    return [part] if isinstance(part, torch.Tensor) else []


def _own_parts(holder: Any) -> list[Any]:
    """The model, the optimizer and the scheduler of a trainer, in all their forms."""
    names = [name for name in _NOT_HELD if name in vars(holder) or hasattr(type(holder), name)]
    return [getattr(holder, name) for name in names]


def _parts(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if _is_part(value):
        yield path, value
    elif type(value) in (list, tuple, dict) and depth:
        items: Iterable[Any] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _parts(f"{path}[{key!r}]", item, depth - 1)


def _parts_of_function(path: str, function: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a loss function: a module, an object with attributes, a method, or a partial call of one."""
    if isinstance(function, functools.partial):
        yield from _parts_of_function(f"{path}.func", function.func)
    attributes = {name: getattr(function, name, ()) for name in ("__self__", "args", "keywords")}
    if not _is_part(function):
        attributes |= getattr(function, "__dict__", {})
    yield from _parts(path, function, _DEPTH)
    for name, value in attributes.items():
        yield from _parts(f"{path}.{name}", value, _DEPTH)


def _is_part(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(value, nn.Parameter) or (value.requires_grad and value.is_leaf)
    return isinstance(value, nn.Module) or all(callable(getattr(type(value), name, None)) for name in _METHODS)


def _is_plain(tensor: torch.Tensor) -> bool:
    return not (is_sharded(tensor) or nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.is_sparse)
