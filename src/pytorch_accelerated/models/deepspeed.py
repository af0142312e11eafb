"""A model and its optimizer in the hands of DeepSpeed, with the loop at the wheel.

The engine that DeepSpeed makes can count batches, divide losses and step by itself. None of this is used: the loop says
which batch is the last of an update, weights losses and calls `step`, so updates are what they are elsewhere.
`docs/design/deepspeed.md` has the reasons.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from pytorch_accelerated.compat.torch import forward_hook_stores, mark_stepped
from pytorch_accelerated.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from typing import TypeGuard

    from accelerate import Accelerator

Parameters = Sequence[torch.Tensor]


def is_engine(model: Any) -> TypeGuard[nn.Module]:
    """Whether `model` is what DeepSpeed puts around a model."""
    deepspeed = sys.modules.get("deepspeed")  # who has such a model has imported it
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


def hand_over(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> tuple[Any, EngineOptimizer]:
    """`model` in the hands of DeepSpeed, and what takes the place of its optimizer. Must be called by all ranks.

    Raises:
        ConfigurationError: if some weights are not float32, or DeepSpeed cannot work with them or the optimizer.
    """
    scalars = [name for name, weights in model.named_parameters() if not weights.ndim]
    if scalars:
        raise ConfigurationError(
            f"The model's parameters {', '.join(scalars)} have no dimension, and DeepSpeed cannot send these from rank "
            "to rank. Give them one, of size 1."
        )
    others = {str(weights.dtype) for weights in model.parameters()} - {"torch.float32"}
    if others:
        raise ConfigurationError(
            f"The model has weights in {', '.join(sorted(others))}, of which DeepSpeed would train copies in float32, "
            "unknown to checkpoints. Convert it with `model.float()`, and set `bf16` for mixed precision."
        )
    is_zero = bool(accelerator.state.deepspeed_plugin.zero_stage)
    traces, twin = _Traces(model), _twin(optimizer, shares_state=not is_zero)
    engine, _ = accelerator.prepare(model, twin)
    driver = EngineOptimizer(engine, optimizer, twin, traces)
    if is_zero:
        if engine.optimizer.optimizer is not twin:
            driver.release()
            raise ConfigurationError(
                f"ZeRO has put another optimizer in the place of this {type(optimizer).__name__}, with groups of "
                "parameters of its own. Use AdamW or SGD, or zero stage 0."
            )
        driver = ZeroOptimizer(engine, optimizer, twin, traces)
        if optimizer.state:
            driver.load_state_dict(optimizer.state_dict())
    accelerator.deepspeed_engine_wrapped = driver  # whose `backward` accelerate's calls
    return engine, driver


class EngineOptimizer:
    """What steps a model that DeepSpeed has; in all else the optimizer that it was made with, which is `optimizer`.

    DeepSpeed takes groups without parameters away from an optimizer, and ZeRO puts flat parts in the place of the
    others' parameters. So it has a twin; the optimizer itself stays what schedulers and states are about, and hands its
    settings on at each step.
    """

    def __init__(self, engine: Any, optimizer: Any, twin: Any, traces: _Traces) -> None:
        self.optimizer = optimizer
        self._engine = engine
        self._twin = twin
        self._traces = traces

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True) -> None:
        """Add the gradients of `loss` as it is. What accelerate would say of the batch, the loop has said."""
        self._engine.backward(loss, scale_wrt_gas=False)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """What stands inside is about a batch that is not the last of its update."""
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def step(self) -> None:
        """Change the parameters. Gradients are gone afterwards."""
        for own, shared in zip(_used_groups(self.optimizer), self._twin.param_groups, strict=True):
            shared.update({name: value for name, value in own.items() if name != "params"})
        self._engine.step()
        mark_stepped(self.optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, on any number of ranks."""
        self.optimizer.load_state_dict(state)
        self._twin.state = self.optimizer.state

    def release(self) -> None:
        """Leave the model as it was made."""
        self._engine.destroy()
        self._traces.remove()


class ZeroOptimizer(EngineOptimizer):
    """The same under ZeRO: each rank has a part of the state, and a step clips by the limit in DeepSpeed's config."""

    @property
    def gradient_norm(self) -> torch.Tensor:
        """Of the last update, before it was clipped; the same on all ranks."""
        return torch.as_tensor(self._engine.get_global_grad_norm())

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the optimizer itself would have it. Must be called by all ranks.

        Raises:
            CheckpointError: if the parts do not add up to the weights of the model.
        """
        state = self.optimizer.state_dict()
        entries: dict[int, dict[str, Any]] = {}
        for numbers, parameters, flat in self._groups(state):
            weights = _cut(flat.detach(), parameters)
            if not all(map(torch.equal, weights, parameters)):
                raise CheckpointError(
                    "The weights of the model are not those that DeepSpeed has in parts: something else has changed "
                    "them since the last step, or this version cuts them in a way that is not known here. So the "
                    "optimizer's state cannot be put together. Leave the weights alone, or use zero stage 0."
                )
            for key, value in self._twin.state.get(flat, {}).items():
                is_cut = isinstance(value, torch.Tensor) and value.shape == flat.shape
                values = _cut(value, parameters) if is_cut else [copy.deepcopy(value) for _ in parameters]
                for number, each in zip(numbers, values, strict=True):
                    entries.setdefault(number, {})[key] = each
        return {**state, "state": entries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, on any number of ranks, and the weights that the model has."""
        self.take_over_weights()
        self.optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
        parts: dict[int, dict[str, Any]] = {}
        for index, (numbers, parameters, flat) in enumerate(self._groups(state)):
            entries = [state["state"].get(number, {}) for number in numbers]
            parts[index] = {}
            for key, value in next(filter(None, entries), {}).items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    # In a run without ZeRO a parameter that never had a gradient has no state.
                    values = [
                        entry.get(key, torch.zeros_like(each)) for entry, each in zip(entries, parameters, strict=True)
                    ]
                    value = _part(values, flat)
                parts[index][key] = value
        groups = [{**group, "params": [index]} for index, group in enumerate(_used_groups(state))]
        self._twin.load_state_dict({"state": parts, "param_groups": groups})

    def take_over_weights(self) -> None:
        """Go on from the weights that the model has by now, not from those that it had after the last step."""
        for own, shared in zip(_used_groups(self.optimizer), self._twin.param_groups, strict=True):
            for flat in shared["params"]:
                flat.detach().copy_(_part(own["params"], flat))

    def _groups(self, state: Mapping[str, Any]) -> Iterator[tuple[list[int], list[torch.Tensor], torch.Tensor]]:
        """Of each group the numbers of its parameters in a state, the parameters, and this rank's part of them."""
        groups = zip(_used_groups(state), _used_groups(self.optimizer), self._twin.param_groups, strict=True)
        for packed, own, shared in groups:
            (flat,) = shared["params"]
            yield packed["params"], [parameter.detach() for parameter in own["params"]], flat


class _Traces:
    """What DeepSpeed leaves on a model: hooks, attributes of parameters, memory that parameters share."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks = [(hooks, hooks.copy()) for hooks in self._live_hooks()]
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

    def _live_hooks(self) -> Iterator[dict[int, Any]]:
        for module in self._model.modules():
            yield from forward_hook_stores(module)


def _twin(optimizer: Any, *, shares_state: bool) -> Any:
    """Another optimizer of the same kind and settings, over the same parameters."""
    twin = copy.copy(optimizer)
    vars(twin).pop("step", None)  # schedulers put one there that steps the optimizer itself
    twin.param_groups = [{**group, "params": list(group["params"])} for group in _used_groups(optimizer)]
    if not shares_state:
        twin.state = defaultdict(dict)
    return twin


def _used_groups(source: Any) -> list[dict[str, Any]]:
    """The groups of an optimizer, or of its state dict, that have parameters: ZeRO knows no others."""
    groups = source["param_groups"] if isinstance(source, Mapping) else source.param_groups
    return [group for group in groups if group["params"]]


def _cut(part: torch.Tensor, parameters: Parameters) -> list[torch.Tensor]:
    """What all ranks' parts are together, cut into the shapes of `parameters`. Must be called by all ranks."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    sizes = [parameter.numel() for parameter in parameters]
    pieces = torch.split(torch.cat(parts)[: sum(sizes)], sizes)
    return [piece.view(parameter.shape).clone() for piece, parameter in zip(pieces, parameters, strict=True)]


def _part(tensors: Parameters, flat: torch.Tensor) -> torch.Tensor:
    """What this rank has of `tensors`, in the form of `flat`: an equal part, zeros behind the last tensor."""
    start, size = dist.get_rank() * flat.numel(), flat.numel()
    whole = torch.cat([tensor.detach().to(flat).flatten() for tensor in tensors])
    part = whole[start : start + size]
    return nn.functional.pad(part, (0, size - part.numel()))
