"""What a captured step depends on, what it changes, and whether two runs of it came to the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accelerated.models.compiling import is_of_torch
from pytorch_accelerated.seeding import generator_states, restore_generator_states

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer

# Unless algorithms are deterministic, two runs may differ by this share of a tensor's largest entry.
TOLERANCE = 1e-5

Gradients = list["torch.Tensor | None"]


class BatchLayout:
    """What a graph depends on of a batch: everything but the values of its tensors.

    Attributes:
        key: compares equal for batches of one layout.
        tensors: of the batch, in order.
    """

    def __init__(self, batch: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self._strange: list[str] = []
        self.key = self._key_of(batch)

    def _key_of(self, data: Any) -> Hashable:
        if isinstance(data, torch.Tensor):
            self.tensors.append(data)
            return (data.shape, data.dtype, data.device)
        if isinstance(data, Mapping):
            return (type(data), *((name, self._key_of(value)) for name, value in data.items()))
        if isinstance(data, (tuple, list)):
            return (type(data), *map(self._key_of, data))
        if data is not None and not isinstance(data, (bool, int, float, str)):
            self._strange.append(type(data).__name__)
            data = None
        return (type(data), data)

    def obstacle(self, device: torch.device) -> str | None:
        """Why such a batch cannot be captured on `device`, as a sentence."""
        if self._strange:
            return f"the batch has a {self._strange[0]} in it, in which tensors cannot be seen"
        elsewhere = [str(tensor.device) for tensor in self.tensors if tensor.device.type != device.type]
        return f"the batch has a tensor on {elsewhere[0]}, not on {device}" if elsewhere else None


class StepParts:
    """The modules, parameters and generators of a trainer, as they were when this was made.

    Attributes:
        device: of the trainer.
        parameters: of all its modules and of its optimizer.
        names: what they are called in messages, by their identity.
        gradient_names: what their gradients are called, in order.
        generators: those of the device that modules or the trainer have as attributes.
        host_generators: the others.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.device = trainer.device
        self._trainer = trainer
        self._modules = {
            f"{name}.{path}" if path else name: module
            for name, root in self._roots().items()
            for path, module in root.named_modules()
        }
        self._tensor_stores = [store for each in self._modules.values() for store in (each._parameters, each._buffers)]
        self._wrappers = [each for each in self._modules.values() if isinstance(each, DistributedDataParallel)]
        self._child_stores = [module._modules for module in self._modules.values()]
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for path, module in self._modules.items():
            for name, parameter in module.named_parameters(recurse=False):
                named.setdefault(id(parameter), (f"{path}.{name}", parameter))
        for index, parameter in enumerate(trainer._parameters()):
            named.setdefault(id(parameter), (f"parameter {index} of the optimizer", parameter))
        self.parameters = [parameter for _, parameter in named.values()]
        self.names = {identity: name for identity, (name, _) in named.items()}
        self.gradient_names = [f"the gradient of {name}" for name in self.names.values()]
        holders = (trainer, *self._modules.values())
        found = [value for holder in holders for value in vars(holder).values() if isinstance(value, torch.Generator)]
        self.generators = [generator for generator in found if generator.device.type == self.device.type]
        self.host_generators = [generator for generator in found if generator.device.type != self.device.type]

    def facts(self) -> dict[str, Any]:
        """What graphs depend on, by the name that a change of it has in the report."""
        tensors = [tensor for store in self._tensor_stores for tensor in store.values() if tensor is not None]
        modules = [*self._roots().values(), *(child for store in self._child_stores for child in store.values())]
        # All of this is kept alive here, so no identity can come back with another meaning.
        return {
            "the modules": list(map(id, modules)),
            "the parameters or buffers": list(map(id, tensors)),
            "the addresses of parameters or buffers": [tensor.data_ptr() for tensor in tensors],
            "`requires_grad`": [tensor.requires_grad for tensor in tensors],
            "training and evaluation mode": [module.training for module in self._modules.values()],
            "the optimizer's parameters": list(map(id, self._trainer._parameters())),
        }

    def attributes(self) -> dict[str, Any]:
        """What the trainer and the user's modules have besides parameters, buffers and modules, by name."""
        holders: dict[str, Any] = {type(self._trainer).__name__: self._trainer}
        for path, module in self._modules.items():
            if not is_of_torch(module):
                holders[path] = module
        return {f"{path}.{name}": value for path, holder in holders.items() for name, value in vars(holder).items()}

    def replaced_since(self, facts: dict[str, Any], attributes: dict[str, Any]) -> str | None:
        """What is not the same any more, which a replay would leave undone, as a sentence."""
        for name, value in self.facts().items():
            if value != facts[name]:
                return f"{name} change within each step"
        now = self.attributes()
        for name in {**attributes, **now}:
            if not _is_same(attributes.get(name), now.get(name)):
                return f"`{name}` is assigned anew in each step, which a replay would leave out; change it in place"
        return None

    def gradients(self) -> Gradients:
        """The gradient of each parameter, as it is now."""
        return [parameter.grad for parameter in self.parameters]

    def named_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by name, without those that are None."""
        pairs = zip(self.gradient_names, self.gradients(), strict=True)
        return {name: gradient for name, gradient in pairs if gradient is not None}

    def set_gradients(self, gradients: Gradients) -> None:
        """Let each parameter have this gradient."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def move_gradients(self, targets: Gradients) -> None:
        """Bring the gradients into these tensors; where there is none, a gradient stays in its own."""
        moves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter, target in zip(self.parameters, targets, strict=True):
            if target is not None and parameter.grad is not None and parameter.grad is not target:
                moves.append((target, parameter.grad))
                parameter.grad = target
        if moves:
            torch._foreach_copy_([target for target, _ in moves], [gradient for _, gradient in moves])

    def flags(self) -> tuple[bool, ...]:
        """Whether DDP copies rank 0's buffers in its next forward pass, which depends on the one before."""
        return tuple(wrapper.require_forward_param_sync for wrapper in self._wrappers)

    def set_flags(self, flags: Iterable[bool]) -> None:
        """Bring DDP to where it would be after a forward pass."""
        for wrapper, flag in zip(self._wrappers, flags, strict=True):
            wrapper.require_forward_param_sync = flag

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers by name, without those that cannot be written to because they repeat themselves in memory."""
        return {
            f"{path}.{name}": buffer
            for path, module in self._modules.items()
            for name, buffer in module.named_buffers(recurse=False)
            if all(stride or size < 2 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
        }

    def tensors_of_optimizer(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters, their gradients and what it keeps of each, by name."""
        tensors: dict[str, torch.Tensor] = {}
        for parameter in self._trainer._parameters():
            name = self.names[id(parameter)]
            tensors[name] = parameter
            if parameter.grad is not None:
                tensors[f"the gradient of {name}"] = parameter.grad
            for key, value in self._trainer.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key!r} of {name}"] = value
        return tensors

    def _roots(self) -> dict[str, nn.Module]:
        return {name: value for name, value in vars(self._trainer).items() if isinstance(value, nn.Module)}


class Snapshot:
    """Tensors, gradients, generators and flags as they are now, to be put back in place.

    Args:
        parts: whose gradients, generators and flags.
        tensors: what else is to be put back.
    """

    def __init__(self, parts: StepParts, tensors: Iterable[torch.Tensor]) -> None:
        self._parts = parts
        self._copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._gradients = parts.gradients()
        self._flags = parts.flags()
        self._generators = generator_states()
        self._own = [(each, each.get_state()) for each in (*parts.generators, *parts.host_generators)]

    def host_has_drawn(self) -> bool:
        """Whether a generator of the host has been used since."""
        now = generator_states()
        names = ["numpy", "random", *(["torch"] if self._parts.device.type != "cpu" else [])]
        on_host = [(each, state) for each, state in self._own if each in self._parts.host_generators]
        return any(not _is_equal(self._generators[name], now[name]) for name in names) or any(
            not torch.equal(generator.get_state(), state) for generator, state in on_host
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Make everything as it was."""
        for tensor, copied in self._copies:
            tensor.copy_(copied)
        self._parts.set_gradients(self._gradients)
        self._parts.set_flags(self._flags)
        restore_generator_states(self._generators)
        for generator, state in self._own:
            generator.set_state(state)


class Stillness:
    """Whether facts have stayed the same for some updates.

    Args:
        needed: how many updates are enough.

    Attributes:
        needed: may be changed.
    """

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.restart()

    def restart(self) -> None:
        """Begin to count again."""
        self._updates = 0
        self._facts: dict[str, Any] | None = None

    def look(self, facts: dict[str, Any]) -> list[str]:
        """Count an update that begins with these facts. Returns the names of those that have changed."""
        known = facts if self._facts is None else self._facts
        changes = [name for name in {**known, **facts} if known.get(name) != facts.get(name)]
        self._facts = facts
        self._updates = 0 if changes else self._updates + 1
        return changes

    @property
    def is_enough(self) -> bool:
        """Whether nothing has changed for long enough."""
        return self._updates >= self.needed


def as_fact(value: Any) -> Hashable:
    """Something that compares equal as long as a graph that has used `value` may be replayed."""
    if isinstance(value, torch.Tensor):
        return ("tensor at", value.data_ptr())
    if isinstance(value, (tuple, list)):
        return tuple(map(as_fact, value))
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def copies_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values in other memory."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def difference(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str | None:
    """What is not as expected, as a sentence. Waits for the device.

    To the bit if deterministic algorithms are on, else to `TOLERANCE` or the last digit of the dtype.
    """
    if actual.keys() != expected.keys():
        return f"a replay computed other things: {', '.join(sorted(actual.keys() ^ expected.keys()))}"
    is_exact = torch.are_deterministic_algorithms_enabled()
    scales = {name: _largest_entry(tensor) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        limit = 0.0
        if not is_exact and (tensor.is_floating_point() or tensor.is_complex()):
            # What should be 0 is the rest of larger terms that cancel each other, so its error follows their size.
            rounding = torch.finfo(tensor.dtype).eps
            limit = max(max(TOLERANCE, rounding) * scales[name], rounding * max(scales.values()))
        if not torch.allclose(actual[name].detach(), tensor, rtol=0.0, atol=limit, equal_nan=True):
            return f"a replay computed {name} differently"
    return None


def with_tensors(data: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Nested containers with other tensors, in the order in which `BatchLayout` finds them."""
    return _mapped(data, lambda leaf: next(tensors) if isinstance(leaf, torch.Tensor) else leaf)


def detached(data: Any) -> Any:
    """Nested containers with their tensors, which autograd then knows nothing of."""
    return _mapped(data, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)


def _mapped(data: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(data, (tuple, list)):
        items = [_mapped(item, function) for item in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, Mapping):
        mapped: Any = copy.copy(data)
        for name, value in data.items():
            mapped[name] = _mapped(value, function)
        return mapped
    return function(data)


def _largest_entry(tensor: torch.Tensor) -> float:
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _is_same(before: Any, after: Any) -> bool:
    """Whether an attribute is the same object still, or a plain value that is equal."""
    if before is after:
        return True
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        return all(map(_is_same, before, after))
    is_plain = isinstance(before, (bool, int, float, str, torch.device))
    return is_plain and type(before) is type(after) and bool(before == after)


def _is_equal(before: Any, after: Any) -> bool:
    """Whether two states of a generator are equal, tensors in them included."""
    if isinstance(before, torch.Tensor):
        return torch.equal(before, after)
    if isinstance(before, (list, tuple)):
        return all(map(_is_equal, before, after))
    return bool(before == after)
