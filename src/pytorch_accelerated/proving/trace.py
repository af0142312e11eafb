"""What each update of a run consisted of, as digests: two runs are compared update by update."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.checkpointing.weights import canonical_state_dict
from pytorch_accelerated.errors import StopTrainingError
from pytorch_accelerated.models.held import held_parts
from pytorch_accelerated.models.sharding import own_part
from pytorch_accelerated.seeding import generator_states

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, np.generic)


class UpdateTrace(NamedTuple):
    """One update on this rank: digests, in the order in which things follow from one another.

    Attributes:
        update: counted from 1.
        epoch: counted from 1.
        weights: parameters and buffers before the update.
        rows: the rows of the training set, over all ranks; None if they are unknown.
        batch: the contents of this rank's batches.
        generators: the states of torch's, numpy's and Python's generators before each forward pass.
        losses: of this rank's batches, exactly.
        gradients: complete, before they are clipped.
        settings: those of the optimizer, such as rates, when it steps.
        weights_after: parameters and buffers after the update.
        optimizer: the optimizer's state after the update.
        outside: what else may matter, by the name of its place; see `Trace`.
    """

    update: int
    epoch: int
    weights: str
    rows: tuple[int, ...] | None
    batch: str
    generators: str
    losses: tuple[str, ...]
    gradients: str
    settings: str
    weights_after: str
    optimizer: str
    outside: dict[str, str]


#: What two updates may differ in, in the order in which one thing follows from another.
PARTS = {
    "weights": "the weights before the update",
    "rows": "the rows",
    "batch": "the contents of the batch",
    "generators": "the random generators",
    "losses": "the loss",
    "gradients": "the gradients",
    "settings": "the settings of the optimizer",
    "weights_after": "the weights after the update",
    "optimizer": "the state of the optimizer",
}


class Parting(NamedTuple):
    """Where two runs part.

    Attributes:
        update: the first update in which they differ.
        part: the first thing that differs in it, one of `PARTS`.
    """

    update: int
    part: str

    def __str__(self) -> str:
        return f"{PARTS[self.part]}, in update {self.update}"


class Trace(TrainerCallback):
    """Records what each update consisted of. Changes nothing; put it last among the callbacks.

    Args:
        last_update: the run stops after it; None for no limit.
        outside: gives further things to record by name, before each update.
    """

    takes_part_in_preflight = False

    def __init__(
        self, last_update: int | None = None, outside: Callable[[Trainer], Mapping[str, Any]] | None = None
    ) -> None:
        self.updates: list[UpdateTrace] = []
        self._last_update = last_update
        self._outside = outside
        self._begun: dict[str, Any] = {}

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the weights before the update, and what each of its batches begins with."""
        run = trainer.run_context
        if not self._begun:
            outside = {} if self._outside is None else self._outside(trainer)
            self._begun = {"weights": digest(weights_of(trainer)), "rows": rows_of_current_update(trainer)}
            self._begun |= {"outside": {name: digest(value) for name, value in outside.items()}}
            self._begun |= {"batches": [], "generators": [], "losses": []}
        self._begun["batches"].append(digest(run.training.step.micro_batch.batch))
        self._begun["generators"].append(digest(generator_states()))

    def on_train_step_end(self, trainer: Trainer, *, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """Record the loss of a batch."""
        self._begun["losses"].append(repr(float(batch_output["loss"])))

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the gradients."""
        self._begun["gradients"] = digest(gradients_of(trainer))

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Complete the record, and stop after the last update."""
        begun, self._begun = self._begun, {}
        done, optimizer = trainer.run_state.updates, trainer.optimizer
        settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in trainer.run_context.parameter_groups
        ]
        self.updates.append(
            UpdateTrace(
                update=done,
                epoch=trainer.run_history.current_epoch,
                weights=begun["weights"],
                rows=begun["rows"],
                batch=digest(begun["batches"]),
                generators=digest(begun["generators"]),
                losses=tuple(begun["losses"] or [repr(trainer.run_context.losses.copy().loss_value)]),
                gradients=begun["gradients"],
                settings=digest(settings),
                weights_after=digest(weights_of(trainer)),
                optimizer=digest(None if optimizer is None else optimizer.state_dict()),
                outside=begun["outside"],
            )
        )
        if done == self._last_update:
            raise StopTrainingError(f"Update {done} is done.")


def first_parting(one: Sequence[UpdateTrace], other: Sequence[UpdateTrace]) -> Parting | None:
    """The first difference between two runs in the updates that both have; None if there is none."""
    others = {each.update: each for each in other}
    for each in one:
        beside = others.get(each.update, each)
        for part in PARTS:
            if getattr(each, part) != getattr(beside, part):
                return Parting(each.update, part)
    return None


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The live parameters and buffers of the model, and of what else the trainer holds and trains, by name."""
    holder = trainer.run_context.holder
    found = {name: value for name, value in canonical_state_dict(trainer.get_model()).items() if _is_tensor(value)}
    for path, part in held_parts(holder).items():
        state = part.state_dict() if isinstance(part, nn.Module) else {"": part}
        found |= {f"{path}.{name}".rstrip("."): value for name, value in state.items() if _is_tensor(value)}
    return found


def gradients_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradients of what the optimizer trains, by the names of the parameters."""
    modules = {"": trainer.get_model(), **held_parts(trainer.run_context.holder)}
    named = {
        f"{path}.{name}".strip("."): parameter
        for path, module in modules.items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
    }
    return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def rows_of_current_update(trainer: Trainer) -> tuple[int, ...] | None:
    """The rows of the training set in the update that has begun, over all ranks; None if they are unknown."""
    run = trainer.run_context
    start = run.state.samples_in_epoch
    rows = getattr(run.loaders.train, "indices", lambda start, stop: None)(
        start, start + run.training.step.current.samples
    )
    return None if rows is None else tuple(rows)


def digest(value: Any) -> str:
    """A digest of nested containers, tensors, arrays, generators and plain values; of other objects only the class."""
    hasher = hashlib.blake2b(digest_size=16)
    _feed(hasher.update, value)
    return hasher.hexdigest()


def _feed(take: Callable[[Any], None], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = own_part(value).detach()
        value = value.to_dense() if value.layout is not torch.strided else value
        take(f"{value.dtype} {tuple(value.shape)}".encode())
        take(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        take(f"{value.dtype} {value.shape}".encode())
        take(repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes())
    elif isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
        _feed(take, _state_of_generator(value))
    elif isinstance(value, Mapping):
        _feed(take, [each for pair in value.items() for each in pair])
    elif isinstance(value, (set, frozenset)):
        _feed(take, sorted(map(repr, value)))
    elif isinstance(value, (list, tuple, deque)):
        take(f"{len(value)} items".encode())
        for each in value:
            _feed(take, each)
    else:
        take((repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__).encode())


def _state_of_generator(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate()
