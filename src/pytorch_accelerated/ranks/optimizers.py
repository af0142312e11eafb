"""Multiple optimizers as one, and their schedules."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, InvalidCheckpointError
from pytorch_accelerated.facts.placeholders import replace_trainer_placeholder_values


class Optimizers(torch.optim.Optimizer):
    """Multiple optimizers that make one update together, each of its own parameters.

    A `Trainer` makes it from a list, a tuple or a dict of optimizers. Its groups of parameters and its state are those
    of all of them, in order, and its state dict has the form of a single one.

    Args:
        optimizers: by name, or in order.

    Attributes:
        by_name: the optimizers by name; those without one have their numbers, from "0".

    Raises:
        ArgumentTypeError: if one of them isn't an optimizer of torch.
        ConfigurationError: if the collection is empty.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer] | Iterable[torch.optim.Optimizer]) -> None:
        self.by_name: dict[str, torch.optim.Optimizer] = _named(optimizers)
        for name, optimizer in self.by_name.items():
            if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
                raise ArgumentTypeError(f"The optimizer {name!r} is {optimizer!r}: pass instances of torch's.")
        if not self.by_name:
            raise ConfigurationError("`optimizer` has no optimizer in it. Give at least one.")
        super().__init__([{"params": []}], {})  # which prepares the hooks of `step`

    def __getitem__(self, name: str | int) -> torch.optim.Optimizer:
        """The optimizer of a name or a number."""
        return self.by_name[name] if isinstance(name, str) else list(self.by_name.values())[name]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        """The optimizers, in order."""
        return iter(self.by_name.values())

    def __len__(self) -> int:
        """The number of optimizers."""
        return len(self.by_name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for optimizer in self for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, _: Any) -> None:
        """Nothing: torch's constructor sets an empty list."""

    @property
    def state(self) -> collections.defaultdict[torch.Tensor, Any]:
        """The entries of all optimizers, by parameter."""
        entries = (entry for optimizer in self for entry in optimizer.state.items())
        return collections.defaultdict(dict, entries)

    @state.setter
    def state(self, _: Any) -> None:
        """Nothing: torch's constructor sets an empty dict."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group: it has to belong to one of the optimizers."""
        if param_group["params"]:  # torch's constructor adds an empty group
            raise ConfigurationError(
                "There are multiple optimizers. Add the group to one of them, such as "
                f"`optimizer[{next(iter(self.by_name))!r}].add_param_group(...)`."
            )

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make one step of each optimizer.

        Raises:
            ConfigurationError: for a `closure`, which each of them would call.
        """
        if closure is not None:
            raise ConfigurationError("Multiple optimizers cannot share a closure. Step the one that needs it yourself.")
        for optimizer in self:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters to None."""
        for optimizer in self:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of all optimizers in the form of a single one, whose parameters are numbered in order.

        A further entry, ``optimizers``, has the name of the optimizer of each group.
        """
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for optimizer in self:
            own = optimizer.state_dict()
            state |= {first + number: entry for number, entry in own["state"].items()}
            groups += _shifted(own["param_groups"], first)
            first += _size(own["param_groups"])
        names = [name for name, optimizer in self.by_name.items() for _ in optimizer.param_groups]
        return {"state": state, "param_groups": groups, "optimizers": names}

    def in_order(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state dict with the parts of the optimizers in the order of these, by name.

        Where the state has no names, as in earlier versions, or there are only numbers, it is in order already.

        Raises:
            InvalidCheckpointError: for other names.
        """
        names, groups = state_dict.get("optimizers", []), state_dict["param_groups"]
        if set(names) != self.by_name.keys():
            if any(all(map(str.isdigit, each)) for each in (names, self.by_name)):
                return state_dict
            raise InvalidCheckpointError(
                f"The state has the optimizers {', '.join(dict.fromkeys(names))}, but here are "
                f"{', '.join(self.by_name)}: states are loaded by name. Use the names with which it was saved."
            )
        ordered = [group for here in self.by_name for name, group in zip(names, groups, strict=True) if name == here]
        numbers = {old: new for new, old in enumerate(each for group in ordered for each in group["params"])}
        return {
            "state": {numbers[old]: entry for old, entry in state_dict["state"].items() if old in numbers},
            "param_groups": [{**group, "params": [numbers[old] for old in group["params"]]} for group in ordered],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each optimizer its part of a state dict, by name; see `in_order`."""
        state_dict = self.in_order(state_dict)
        groups, state = iter(state_dict["param_groups"]), state_dict["state"]
        first = 0
        for optimizer in self:
            own = [next(groups) for _ in optimizer.param_groups]
            numbers = range(first, first + _size(own))
            entries = {number - first: state[number] for number in numbers if number in state}
            optimizer.load_state_dict({"state": entries, "param_groups": _shifted(own, -first)})
            first = numbers.stop


def as_one(optimizer: Any) -> Any:
    """One object for optimizers in a list, a tuple or a dict; anything else as it is."""
    return Optimizers(optimizer) if isinstance(optimizer, (list, tuple, Mapping)) else optimizer


def values_by_optimizer(values: Any, optimizer: Any, *, argument: str) -> dict[str, Any]:
    """Values for multiple optimizers, by their names: a dict of them, or a list in their order.

    Args:
        values: for some or all of them.
        optimizer: the optimizer, or `Optimizers`.
        argument: the user's argument, for messages.

    Raises:
        ConfigurationError: for values of optimizers that do not exist.
    """
    by_name = _named(values)
    names = list(optimizer.by_name) if isinstance(optimizer, Optimizers) else []
    if not isinstance(values, Mapping) and len(by_name) != len(names):
        raise ConfigurationError(
            f"`{argument}` has {len(by_name)} values for {len(names) or 1} optimizers. Give one for each, None for one "
            "without, or a dict by their names."
        )
    if not by_name.keys() <= set(names):
        raise ConfigurationError(
            f"`{argument}` is for the optimizers {', '.join(by_name)}, but there are "
            f"{', '.join(names) or 'none with a name'}. Use the names of the optimizers."
        )
    return by_name


def _named(parts: Any) -> dict[str, Any]:
    """The items of a dict by their keys, the items of anything else by their numbers."""
    return {str(name): part for name, part in (parts.items() if isinstance(parts, Mapping) else enumerate(parts))}


def _size(groups: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)


def _shifted(groups: Iterable[Mapping[str, Any]], by: int) -> list[dict[str, Any]]:
    """Groups of a state dict with other numbers of parameters."""
    return [{**group, "params": [number + by for number in group["params"]]} for group in groups]


class Schedules:
    """The schedules of multiple optimizers, stepped together.

    Args:
        by_name: in the order of the optimizers; None for an optimizer that has none.

    Raises:
        ConfigurationError: if one of them is a `ReduceLROnPlateau`, which is stepped with a metric.
    """

    def __init__(self, by_name: Mapping[str, Any]) -> None:
        self.by_name = dict(by_name)
        self.schedulers = list(by_name.values())
        if any(isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau) for each in self.schedulers):
            raise ConfigurationError("A ReduceLROnPlateau cannot be one of several schedules: use it alone.")

    def step(self) -> None:
        """Step each of them."""
        for scheduler in filter(None, self.schedulers):
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of all, by name."""
        return {name: None if each is None else each.state_dict() for name, each in self.by_name.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each of them its state, by name; in order where the state or the optimizers have only numbers."""
        if state_dict.keys() != self.by_name.keys():
            states = state_dict.get("schedulers", list(state_dict.values()))  # a list in earlier versions
            state_dict = dict(zip(self.by_name, states, strict=True))
        for name, scheduler in self.by_name.items():
            if scheduler is not None:
                scheduler.load_state_dict(state_dict[name])


def create_schedules(trainer: Any, factories: Any, optimizer: Any) -> Any:
    """The scheduler of an optimizer, or one for each of multiple optimizers.

    Args:
        trainer: whose run replaces placeholders in the functions.
        factories: a function that makes one from an optimizer; for multiple optimizers also functions by name, or in
            order.
        optimizer: the optimizer, or `Optimizers`.

    Raises:
        ConfigurationError: for functions of optimizers that do not exist.
    """
    if callable(factories):
        return replace_trainer_placeholder_values(trainer, factories)(optimizer)
    by_name = values_by_optimizer(factories, optimizer, argument="create_scheduler_fn")
    filled = {name: replace_trainer_placeholder_values(trainer, each) for name, each in by_name.items() if each}
    return Schedules({name: filled[name](optimizer[name]) if name in filled else None for name in optimizer.by_name})
