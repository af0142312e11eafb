"""A model and its optimizer under DeepSpeed, driven by the training loop.

DeepSpeed's engine could count batches, divide losses and step by itself. The loop does that instead: it tells the
engine which batch is the last of an update, weights losses and calls `step`, so updates are the same as without
DeepSpeed. `docs/design/sharded-models.md` has the reasons.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from pytorch_accelerated.compat.torch import forward_hook_stores, mark_stepped
from pytorch_accelerated.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from accelerate import Accelerator

Parameters = Sequence[torch.Tensor]


def hand_over(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> tuple[Any, EngineOptimizer]:
    """Wrap `model` and its optimizer with DeepSpeed. Must be called by all ranks.

    Returns:
        The engine, and an optimizer that replaces the original one.

    Raises:
        ConfigurationError: if some weights are not float32, or DeepSpeed does not support them or the optimizer.
    """
    scalars = [name for name, weights in model.named_parameters() if not weights.ndim]
    if scalars:
        raise ConfigurationError(
            f"DeepSpeed cannot send the 0-dimensional {', '.join(scalars)} between ranks. Give them the shape (1,)."
        )
    others = {str(weights.dtype) for weights in model.parameters()} - {"torch.float32"}
    if others:
        raise ConfigurationError(
            f"The model has weights in {', '.join(sorted(others))}, and DeepSpeed would train float32 copies of them "
            "that checkpoints do not see. Convert it with `model.float()`, and set `bf16` for mixed precision."
        )
    is_zero = bool(accelerator.state.deepspeed_plugin.zero_stage)
    traces, twin = _Traces(model), _twin(optimizer, shares_state=not is_zero)
    engine, _ = accelerator.prepare(model, twin)
    driver = EngineOptimizer(engine, optimizer, twin, traces)
    if is_zero:
        if engine.optimizer.optimizer is not twin:
            driver.release()
            raise ConfigurationError(
                f"ZeRO has replaced this {type(optimizer).__name__} with another optimizer that has its own parameter "
                "groups. Use AdamW or SGD, or zero stage 0."
            )
        driver = ZeroOptimizer(engine, optimizer, twin, traces)
        if optimizer.state:
            driver.load_state_dict(optimizer.state_dict())
    accelerator.deepspeed_engine_wrapped = driver  # accelerate's `backward` calls the one of this wrapper
    return engine, driver


class EngineOptimizer:
    """Wraps the optimizer of a DeepSpeed engine: `step` runs the engine, everything else is the wrapped optimizer's.

    DeepSpeed removes groups without parameters from an optimizer, and ZeRO replaces the parameters of the other groups
    with flat partitions. The engine therefore gets a copy of the optimizer. Schedulers and states use the original,
    which passes its settings on at each step.
    """

    def __init__(self, engine: Any, optimizer: Any, twin: Any, traces: _Traces) -> None:
        self.optimizer = optimizer
        self._engine = engine
        self._twin = twin
        self._traces = traces

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True) -> None:
        """Add the gradients of `loss` without scaling it. The loop has already told the engine what accelerate would
        tell it.
        """
        self._engine.backward(loss, scale_wrt_gas=False)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context for a batch that is not the last of its update."""
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def step(self) -> None:
        """Update the parameters. Afterwards the gradients are gone."""
        for own, shared in zip(_used_groups(self.optimizer), self._twin.param_groups, strict=True):
            shared.update({name: value for name, value in own.items() if name != "params"})
        self._engine.step()
        mark_stepped(self.optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, on any number of ranks."""
        self.optimizer.load_state_dict(state)
        self._twin.state = self.optimizer.state

    def release(self) -> None:
        """Restore the model to what it was before."""
        self._engine.destroy()
        self._traces.remove()


class ZeroOptimizer(EngineOptimizer):
    """The same under ZeRO: each rank has a shard of the state, and a step clips by the limit in DeepSpeed's config."""

    @property
    def gradient_norm(self) -> torch.Tensor:
        """The gradient norm of the last update before clipping; the same on all ranks."""
        return torch.as_tensor(self._engine.get_global_grad_norm())

    def state_dict(self) -> dict[str, Any]:
        """The whole state in the form of the original optimizer's. Must be called by all ranks.

        Raises:
            CheckpointError: if the shards do not match the weights of the model.
        """
        state = self.optimizer.state_dict()
        entries: dict[int, dict[str, Any]] = {}
        for numbers, parameters, flat in self._groups(state):
            weights = _cut(flat.detach(), parameters)
            if not all(map(torch.equal, weights, parameters)):
                raise CheckpointError(
                    "The weights of the model differ from DeepSpeed's shards, so the optimizer's state cannot be "
                    "assembled. Don't change the weights after the last step, or use zero stage 0."
                )
            for key, value in self._twin.state.get(flat, {}).items():
                is_cut = isinstance(value, torch.Tensor) and value.shape == flat.shape
                values = _cut(value, parameters) if is_cut else [copy.deepcopy(value) for _ in parameters]
                for number, each in zip(numbers, values, strict=True):
                    entries.setdefault(number, {})[key] = each
        return {**state, "state": entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, on any number of ranks, together with the current weights of the model."""
        self.take_over_weights()
        self.optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
        parts: dict[int, dict[str, Any]] = {}
        for index, (numbers, parameters, flat) in enumerate(self._groups(state)):
            entries = [state["state"].get(number, {}) for number in numbers]
            parts[index] = {}
            for key, value in next(filter(None, entries), {}).items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    # Without ZeRO, a parameter that never had a gradient has no state.
                    values = [
                        entry.get(key, torch.zeros_like(each)) for entry, each in zip(entries, parameters, strict=True)
                    ]
                    value = _part(values, flat)
                parts[index][key] = value
        groups = [{**group, "params": [index]} for index, group in enumerate(_used_groups(state))]
        self._twin.load_state_dict({"state": parts, "param_groups": groups})

    def take_over_weights(self) -> None:
        """Continue from the model's current weights, not from those after the last step."""
        for own, shared in zip(_used_groups(self.optimizer), self._twin.param_groups, strict=True):
            for flat in shared["params"]:
                flat.detach().copy_(_part(own["params"], flat))

    def _groups(self, state: Mapping[str, Any]) -> Iterator[tuple[list[int], list[torch.Tensor], torch.Tensor]]:
        """For each group, the numbers of its parameters in a state, the parameters, and this rank's shard of them."""
        groups = zip(_used_groups(state), _used_groups(self.optimizer), self._twin.param_groups, strict=True)
        for packed, own, shared in groups:
            (flat,) = shared["params"]
            yield packed["params"], [parameter.detach() for parameter in own["params"]], flat


class _Traces:
    """What DeepSpeed leaves on a model: hooks, attributes of parameters, memory shared by parameters."""

    def __init__(self, model: nn.Module) -> None:
        stores = itertools.chain.from_iterable(map(forward_hook_stores, model.modules()))
        self._hooks = [(hooks, hooks.copy()) for hooks in stores]
        self._attributes = [(parameter, set(vars(parameter))) for parameter in model.parameters()]

    def remove(self) -> None:
        for hooks, hooks_before in self._hooks:
            hooks.clear()
            hooks.update(hooks_before)
        for parameter, names_before in self._attributes:
            for name in set(vars(parameter)) - names_before:
                delattr(parameter, name)
            parameter.data = parameter.data.clone()
            parameter.grad = None


def _twin(optimizer: Any, *, shares_state: bool) -> Any:
    """A second optimizer of the same kind and settings for the same parameters."""
    twin = copy.copy(optimizer)
    vars(twin).pop("step", None)  # schedulers put one there that steps the original optimizer
    twin.param_groups = [{**group, "params": list(group["params"])} for group in _used_groups(optimizer)]
    if not shares_state:
        twin.state = defaultdict(dict)
    return twin


def _used_groups(source: Any) -> list[dict[str, Any]]:
    """The groups of an optimizer, or of its state dict, that have parameters: ZeRO knows only these."""
    groups = source["param_groups"] if isinstance(source, Mapping) else source.param_groups
    return [group for group in groups if group["params"]]


def _cut(part: torch.Tensor, parameters: Parameters) -> list[torch.Tensor]:
    """The shards of all ranks, joined and split into the shapes of `parameters`. Must be called by all ranks."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    sizes = [parameter.numel() for parameter in parameters]
    pieces = torch.split(torch.cat(parts)[: sum(sizes)], sizes)
    return [piece.view(parameter.shape).clone() for piece, parameter in zip(pieces, parameters, strict=True)]


def _part(tensors: Parameters, flat: torch.Tensor) -> torch.Tensor:
    """This rank's shard of `tensors` in the form of `flat`: an equal part, padded with zeros after the last tensor."""
    start, size = dist.get_rank() * flat.numel(), flat.numel()
    whole = torch.cat([tensor.detach().to(flat).flatten() for tensor in tensors])
    part = whole[start : start + size]
    return nn.functional.pad(part, (0, size - part.numel()))
