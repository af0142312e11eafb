"""`DataParallel` on the CPU: it cuts batches, copies the model, runs the copies in threads and joins their outputs."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel


class CpuParallel(DataParallel[Any]):
    """As torch's own on several GPUs, with so many replicas.

    Each replica is a module with tensors in place of parameters, as torch makes it: those of the first share memory
    with the model, so that it alone changes buffers, and gradients of all are added up. Threads begin with an autocast
    to float16, as they do on a GPU.

    Args:
        module: to replicate.
        count: of the replicas; default: 3.
    """

    def __init__(self, module: nn.Module, count: int = 3) -> None:
        nn.Module.__init__(self)
        self.module, self.dim, self.output_device = module, 0, 0
        self.device_ids = [0] * count
        self.src_device_obj = torch.device("cpu")
        self.sizes: list[int] = []  # of the replicas in each forward pass

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        pieces = [_cut(each, len(device_ids)) for each in (inputs, kwargs)]
        count = max(len(each) for each, given in zip(pieces, (inputs, kwargs), strict=True) if given)
        return tuple(
            tuple(each[:count]) if given else (type(given)(),) * count
            for each, given in zip(pieces, (inputs, kwargs), strict=True)
        )

    def replicate(self, module: nn.Module, device_ids: Any) -> list[nn.Module]:
        self.sizes.append(len(device_ids))
        return [_replica(module, {}, is_first=not index) for index in range(len(device_ids))]

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Any, kwargs: Any) -> list[Any]:
        results: dict[int, Any] = {}
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

        def run(index: int) -> None:
            torch.set_autocast_dtype("cpu", torch.float16)
            try:
                with torch.set_grad_enabled(modes[0]), torch.autocast("cpu", enabled=modes[1]):
                    results[index] = replicas[index](*inputs[index], **kwargs[index])
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(replicas))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(len(replicas)):
            if isinstance(results[index], Exception):
                raise results[index]
        return [results[index] for index in range(len(replicas))]

    def gather(self, outputs: Any, output_device: Any) -> Any:
        first = outputs[0]
        if isinstance(first, torch.Tensor):
            return torch.cat([each if each.ndim else each.unsqueeze(0) for each in outputs])
        if first is None:
            return None
        if isinstance(first, dict):
            return type(first)((key, self.gather([each[key] for each in outputs], 0)) for key in first)  # type: ignore[call-arg]
        return type(first)([self.gather(list(each), 0) for each in zip(*outputs, strict=True)])


def _cut(data: Any, count: int) -> list[Any]:
    if isinstance(data, torch.Tensor):
        return list(data.chunk(count))  # raises for a single number, as on a GPU
    if isinstance(data, (tuple, list)) and data:
        return [type(data)(each) for each in zip(*(_cut(part, count) for part in data), strict=False)]
    if isinstance(data, dict) and data:
        pieces = [_cut(part, count) for part in data.values()]
        return [dict(zip(data, each, strict=True)) for each in zip(*pieces, strict=False)]
    return [data] * count


def _replica(module: nn.Module, copies: dict[int, Any], *, is_first: bool) -> Any:
    """A copy of `module`; `copies` has what was copied already, which may have several places."""
    replica: Any = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    copies[id(module)] = replica
    for name, child in module._modules.items():
        known = copies.get(id(child))
        replica._modules[name] = child and (known or _replica(child, copies, is_first=is_first))
    replica._former_parameters = {}
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        is_parameter = name in module._parameters
        if tensor is None:
            (replica._parameters if is_parameter else replica._buffers)[name] = None
            continue
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.view_as(tensor) if is_first else tensor.clone()
        if is_parameter:
            replica._former_parameters[name] = copies[id(tensor)]
        setattr(replica, name, copies[id(tensor)])
    return replica


def replicated(model: nn.Module, device: str, count: int = 3) -> Any:
    """A model in `DataParallel`: on the CPU, or with replicas that share one GPU."""
    return CpuParallel(model, count) if device == "cpu" else DataParallel(model.cuda(), [0] * count)
