"""Base classes of schedulers, which set one field of an optimizer's parameter groups from the number of updates."""

from __future__ import annotations

import abc
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pytorch_accelerated.errors import ConfigurationError, HookOutputError, InvalidCheckpointError

# The names in states of pytorch-accelerated 0.1, which hold the attributes of the scheduler.
_NAMES_OF_0_1 = {"num_updates", "_num_updates", "base_lr_values"}


class SchedulerBase(abc.ABC):
    """Sets a field of each parameter group, for example the learning rate, before each optimizer update.

    Updates are numbered from 0. Subclasses define `get_updated_values`, the values for a given update. The values of
    update 0 are set at the end of the constructor, the others by `step_update`. Ranks do not communicate: each steps
    its own scheduler after each applied update.

    The base value of a group is the value that it has when the scheduler first sees it. It is kept in the group as
    ``initial_<field>``, which is saved and loaded with the optimizer. A group that is added later keeps its value until
    the next step. Tensors, as in capturable optimizers, are filled in place.

    Args:
        optimizer: the optimizer.
        param_group_field: the field to set, which has one number per group, such as "lr", "weight_decay" or "momentum".

    Raises:
        ConfigurationError: if a group has no such field.
    """

    def __init__(self, optimizer: Optimizer, param_group_field: str = "lr") -> None:
        self.optimizer = optimizer
        self.param_group_field = param_group_field
        self._adopt_new_groups()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the constructor set the values of update 0 at its end, when a subclass has set all its attributes."""
        super().__init_subclass__(**kwargs)
        construct = cls.__init__

        @functools.wraps(construct)
        def construct_and_set_first_values(self: SchedulerBase, *args: Any, **kwargs: Any) -> None:
            construct(self, *args, **kwargs)
            if type(self) is cls:  # not in the constructor of a parent class
                self.step_update(0)

        cls.__init__ = construct_and_set_first_values  # type: ignore[method-assign]

    @property
    def _initial_field(self) -> str:
        return f"initial_{self.param_group_field}"

    @abc.abstractmethod
    def get_updated_values(self, num_updates: int) -> None | float | Sequence[float]:
        """The values for the update that follows `num_updates` finished ones.

        Returns:
            One number for all groups, one number per group, or None to leave the values unchanged.
        """

    @property
    def base_lr_values(self) -> list[float]:
        """The base values of the scheduled field, one per group."""
        return [
            float(group.get(self._initial_field, group[self.param_group_field]))
            for group in self.optimizer.param_groups
        ]

    def step_update(self, num_updates: int) -> None:
        """Set the values for the update that follows `num_updates` finished ones.

        Raises:
            HookOutputError: if the number of values that `get_updated_values` returned is not the number of groups.
        """
        self._adopt_new_groups()
        values = self.get_updated_values(num_updates)
        if values is None:
            return
        num_groups = len(self.optimizer.param_groups)
        per_group = list(values) if isinstance(values, Iterable) else [values] * num_groups
        if len(per_group) != num_groups:
            raise HookOutputError(
                f"{type(self).__name__}.get_updated_values returned {len(per_group)} values, but the optimizer has "
                f"{num_groups} parameter groups. Return one value per group, one number for all, or None."
            )
        self._set_values(per_group)

    def state_dict(self) -> dict[str, Any]:
        """The current values and the base values, as plain values, ready for JSON.

        The arguments of the constructor are not included: a resumed run makes its scheduler first. A subclass with
        state of its own adds it here and in `load_state_dict`.
        """
        field = self.param_group_field
        return {
            "values": [float(group[field]) for group in self.optimizer.param_groups],
            "base_values": self.base_lr_values,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values of a saved state in the optimizer.

        A state of pytorch-accelerated 0.1 sets the scheduler to the update in the state, with the settings that it was
        made with here. A warning says so if it has no update.

        Raises:
            InvalidCheckpointError: if the state belongs to another kind of scheduler, or has another number of groups.
        """
        is_of_0_1 = "values" not in state_dict and not _NAMES_OF_0_1.isdisjoint(state_dict)
        own = dict(self.state_dict() if is_of_0_1 else state_dict)
        if is_of_0_1 and "base_lr_values" in state_dict:
            own["base_values"] = [float(value) for value in state_dict["base_lr_values"]]
        self._check_state(own)
        self._restore(own)
        last_update = state_dict.get("_num_updates", state_dict.get("num_updates"))
        if is_of_0_1 and last_update is not None:
            self.step_update(int(last_update) + 1)
        elif is_of_0_1:
            warnings.warn(
                f"{type(self).__name__}: The state does not include the number of finished updates, so the schedule "
                "stays where it is. Call `scheduler.step_update(number_of_finished_updates)` to set it.",
                stacklevel=2,
            )

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        missing = self.state_dict().keys() - state_dict.keys()
        if missing:
            raise InvalidCheckpointError(
                f"{type(self).__name__} cannot use this state, which has {sorted(state_dict)} but not "
                f"{sorted(missing)}: another kind of scheduler wrote it. Use that one, or do not load its state."
            )
        num_groups = len(self.optimizer.param_groups)
        saved_groups = len(state_dict["base_values"])
        if len(state_dict["values"]) != num_groups or saved_groups != num_groups:
            raise InvalidCheckpointError(
                f"{type(self).__name__} cannot use this state of {saved_groups} parameter groups: the "
                f"optimizer has {num_groups}. Give it the groups it had when the state was saved, then load."
            )

    def _restore(self, state_dict: dict[str, Any]) -> None:
        for group, base_value in zip(self.optimizer.param_groups, state_dict["base_values"], strict=True):
            group[self._initial_field] = base_value
        self._set_values(state_dict["values"])

    def _adopt_new_groups(self) -> None:
        field = self.param_group_field
        groups = self.optimizer.param_groups
        for index, group in enumerate(groups):
            if isinstance(group.get(self._initial_field), float):
                continue
            if field not in group:
                raise ConfigurationError(
                    f"{type(self).__name__} got param_group_field={field!r}, which parameter group {index} of the "
                    f"optimizer does not have. Name one of its fields: {', '.join(sorted(group.keys() - {'params'}))}."
                )
            value = group[field]
            sharing = next((other for other in groups[:index] if other[field] is value), None)
            if isinstance(value, torch.Tensor) and sharing is not None:
                # This tensor is the optimizer's default, and was filled in place for an earlier group.
                group[field] = value.clone()
                value = sharing[self._initial_field]
            group[self._initial_field] = float(group.get(self._initial_field, value))

    def _set_values(self, values: Sequence[float]) -> None:
        field = self.param_group_field
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            if isinstance(group[field], torch.Tensor):
                group[field].fill_(value)
            else:
                group[field] = float(value)


class StatefulSchedulerBase(SchedulerBase):
    """A scheduler that counts the updates itself: call `step` after each applied update, not after skipped ones.

    The constructor sets the values of update 0, and `step` after update u sets the values of update u + 1, so each
    value is used exactly once.
    """

    def __init__(self, optimizer: Optimizer, param_group_field: str = "lr") -> None:
        super().__init__(optimizer, param_group_field)
        self._num_updates = -1

    @property
    def last_update(self) -> int:
        """The number of the last finished update, counted from 0; -1 before the first."""
        return self._num_updates

    def step(self) -> None:
        """Count an update and set the values of the next one."""
        self.step_update(self._num_updates + 2)

    def step_update(self, num_updates: int) -> None:
        """Set the values for the update that follows `num_updates` finished ones, and continue counting from there."""
        super().step_update(num_updates)
        self._num_updates = num_updates - 1

    def state_dict(self) -> dict[str, Any]:
        """The counter and the values, as plain values, ready for JSON."""
        return {**super().state_dict(), "last_update": self.last_update}

    def _restore(self, state_dict: dict[str, Any]) -> None:
        super()._restore(state_dict)
        self._num_updates = state_dict["last_update"]
