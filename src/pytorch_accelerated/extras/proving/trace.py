"""What each update of a run consisted of, as digests: two runs are compared update by update."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import random
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.facts import generator_states
from pytorch_accelerated.facts.trees import leaves_by_path
from pytorch_accelerated.ranks import held_parts, own_part
from pytorch_accelerated.states import canonical_state_dict

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer

PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic, enum.Enum)
_SHOWN = (*PLAIN, torch.dtype, torch.device)
ROW_CHARACTERS = 16  # of a digest in the contents of a batch
TIMES = re.compile(r"_(runtime|seconds|(samples|steps|tokens)_per_second)$")
SCHEDULED = {"initial_lr", "base_lrs", "base_values"}  # what counts is what a schedule makes of them
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@dataclasses.dataclass
class FirstUpdate:
    """The first update of a run, as far as it is compared to rounding.

    Attributes:
        ranks: the number of processes.
        gradients: complete, before clipping, by name; None if they were not seen.
        draws: whether a forward pass drew random numbers.
        moved: what has changed since the epoch began: buffers, and what the user's objects keep.
    """

    ranks: int
    gradients: dict[str, torch.Tensor] | None = None
    draws: bool = False
    moved: list[str] = dataclasses.field(default_factory=list)


class UpdateTrace(NamedTuple):
    """One update on this rank: digests, in the order in which things follow from one another.

    Attributes:
        update: counted from 1.
        epoch: counted from 1.
        evaluation: what has been evaluated since the update before, and what came out.
        metrics: what was recorded since then, by name; empty if nobody asks for it.
        weights: parameters and buffers before the update.
        rows: the rows of the training set, over all ranks; None if they are unknown.
        batch: the contents of this rank's batches, however the rows are divided among them.
        contents: of each row in them, 16 characters a row, by the place of what has the row.
        generators: the states of torch's, numpy's and Python's generators before each forward pass.
        losses: of this rank's batches, exactly.
        gradients: complete, before they are clipped.
        settings: the optimizer's settings, such as rates, when it steps.
        weights_after: parameters and buffers after the update.
        optimizer: the optimizer's state after the update.
        outside: what else may matter, by the name of its place; see `Trace`.
        first: more about the first update of a run; None for others.
    """

    update: int
    epoch: int
    evaluation: str
    metrics: dict[str, str]
    weights: str
    rows: tuple[int, ...] | None
    batch: str
    contents: dict[str, str]
    generators: str
    losses: tuple[str, ...]
    gradients: str
    settings: str
    weights_after: str
    optimizer: str
    outside: dict[str, str]
    first: FirstUpdate | None = None


#: What two updates may differ in, in the order in which one thing follows from another.
PARTS = {
    "evaluation": "the evaluation before the update",
    "metrics": "the metrics before the update",
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


_OF_SINGLE_BATCHES = ("generators", "losses")


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
        outside: gives further things to record before each update, as texts by name.
    """

    def __init__(self, outside: Callable[[Trainer], dict[str, str]] = lambda trainer: {}) -> None:
        self.updates: list[UpdateTrace] = []
        self._outside, self._num_recorded = outside, 0
        self._begun: dict[str, Any] = {}
        self._evaluated: list[str] = []
        self._at_start: dict[str, str] = {}

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Leave out what was recorded before."""
        self._num_recorded = len(trainer.run_history.records)

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Note what there is before the first batch."""
        self._at_start = self._outside(trainer)

    def on_eval_step_end(self, trainer: Trainer, *, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        """Record what was evaluated, and the result."""
        self._evaluated.append(digest([batch, batch_output]))

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the weights before the update, and what each of its batches begins with."""
        run = trainer.run_context
        if not self._begun:
            indices = getattr(run.parts.loaders.train, "indices", lambda start, stop: None)
            start = run.parts.state.samples_in_epoch
            rows = indices(start, start + run.control.training.step.micro_batch.update.samples)
            new = trainer.run_history.records[self._num_recorded :]
            metrics = {each.name: repr(each.value) for each in new if not TIMES.search(each.name)}
            self._begun = {"evaluation": digest(self._evaluated), "metrics": metrics}
            self._begun |= {"outside": self._outside(trainer), "weights": digest(weights_of(trainer))}
            self._begun |= {"rows": rows and tuple(rows)}
            self._begun |= {"contents": {}, "generators": [], "losses": []}
            self._begun["first"] = FirstUpdate(run.parts.ranks.count) if run.parts.state.updates == 0 else None
        _add_rows(self._begun["contents"], run.control.training.step.micro_batch.batch)
        self._begun["generators"].append(digest(generator_states()))

    def on_train_step_end(self, trainer: Trainer, *, batch: Any, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """Record the loss of a batch, and what the forward pass did besides computing."""
        self._begun["losses"].append(repr(float(torch.as_tensor(batch_output["loss"]).detach())))
        if first := self._begun["first"]:
            first.draws |= self._begun["generators"][-1] != digest(generator_states())

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the gradients, and the settings with which the optimizer steps."""
        groups = trainer.run_context.parts.parameter_groups
        without = {"params", *SCHEDULED}
        settings = [{name: value for name, value in group.items() if name not in without} for group in groups]
        gradients = gradients_of(trainer)
        self._begun |= {"gradients": digest(gradients), "settings": digest(settings)}
        if first := self._begun["first"]:
            before = self._at_start  # callbacks may act before this one
            first.gradients = {
                name: each.detach().to("cpu", torch.float64, copy=True) for name, each in gradients.items()
            }
            first.moved = [text for text, each in self._outside(trainer).items() if before.get(text) != each]

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Complete the record."""
        begun, self._begun = self._begun, {}
        self._evaluated, self._num_recorded = [], len(trainer.run_history.records)
        done, optimizer = trainer.run_state.updates, trainer.optimizer
        begun |= {
            "batch": digest(begun["contents"]),
            "generators": digest(begun["generators"]),
            "losses": tuple(begun["losses"] or [repr(trainer.run_context.parts.reports.losses.copy().loss_value)]),
            "weights_after": digest(weights_of(trainer)),
            "optimizer": digest(optimizer and optimizer.state_dict()),
        }
        self.updates.append(UpdateTrace(update=done, epoch=trainer.run_history.current_epoch, **begun))


def first_parting(
    one: Iterable[UpdateTrace], other: Iterable[UpdateTrace], parts: Iterable[str] = tuple(PARTS)
) -> Parting | None:
    """The first difference between two runs in the updates that both have; None if there is none.

    Where the same rows are divided into another number of batches, nothing of single batches is compared.
    """
    others = {each.update: each for each in other}
    for each in one:
        twin = others.get(each.update, each)
        is_divided_alike = len(each.losses) == len(twin.losses)
        for part in parts:
            if getattr(each, part) != getattr(twin, part) and (is_divided_alike or part not in _OF_SINGLE_BATCHES):
                return Parting(each.update, part)
    return None


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The live parameters and buffers of the model, and of what else the trainer holds and trains, by name."""
    holder = trainer.run_context.holder
    held = {
        path: part.state_dict() if isinstance(part, nn.Module) else part for path, part in held_parts(holder).items()
    }
    return named_weights(canonical_state_dict(trainer.get_model()), held)


def named_weights(model: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors in the states of a model and of held parts, by name.

    Args:
        model: its state.
        held: states of modules, or parameters, by path; others are left out.
    """
    named = dict(model)
    for path, state in held.items():
        named |= (
            {f"{path}.{name}": each for name, each in state.items()} if isinstance(state, Mapping) else {path: state}
        )
    return {name: each for name, each in named.items() if isinstance(each, torch.Tensor)}


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


def digest(value: Any) -> str:
    """A digest of nested containers, tensors, arrays, generators and plain values; of other objects only the class."""
    hasher = hashlib.blake2b(digest_size=16)
    _feed(hasher.update, value)
    return hasher.hexdigest()


def _feed(take: Callable[[Any], None], value: Any) -> None:
    if isinstance(value, torch.Tensor):
        take(f"{value.dtype} {tuple(value.shape)}".encode())
        take(_bytes_of(value))
    elif isinstance(value, np.ndarray):
        take(f"{value.dtype} {value.shape}".encode())
        take(repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes())
    elif isinstance(value, GENERATORS):
        _feed(take, state_of_generator(value))
    elif isinstance(value, Mapping):
        _feed(take, [each for pair in value.items() for each in pair])
    elif isinstance(value, (set, frozenset)):
        _feed(take, sorted(map(repr, value)))
    elif isinstance(value, (list, tuple, deque)):
        take(f"{len(value)} items".encode())
        for each in value:
            _feed(take, each)
    else:
        take((repr(value) if isinstance(value, _SHOWN) else type(value).__qualname__).encode())


def _add_rows(found: dict[str, str], batch: Any) -> None:
    """Add the rows of a batch to those before it, by their place in a batch: the texts of a list have one place."""
    for path, leaf in leaves_by_path(batch).items():
        has_rows = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        place = f"{path} {leaf.dtype} {tuple(leaf.shape[1:])}" if has_rows else path.rpartition("[")[0]
        rows = (leaf.to_dense() if leaf.layout is not torch.strided else leaf).cpu() if has_rows else [leaf]
        found[place] = found.get(place, "") + "".join(digest(row)[:ROW_CHARACTERS] for row in rows)


def _bytes_of(tensor: torch.Tensor) -> Any:
    tensor = own_part(tensor).detach()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def state_of_generator(generator: Any) -> Any:
    """The state of one of `GENERATORS`."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()
