"""The summary of a model as it trains: modules, shapes, parameters, and what one update costs."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import tqdm
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.data import PlannedLoader
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.looking.preflight import BatchFacts, facts_of, first_shape, shape_in_words
from pytorch_accelerated.extras.looking.rehearsal import preparing, refuse, rehearsal
from pytorch_accelerated.extras.optimizers import Optimizers
from pytorch_accelerated.record.text import aligned, format_bytes

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

_NAME_WIDTH, _SHAPE_WIDTH = 41, 19  # with the numbers at their right, a table of 80 columns
_LIMITS = ("num_epochs", "max_num_train_steps", "max_samples", "max_tokens")
_NOT_TAKEN = (*_LIMITS, "eval_dataset", "overfit_batches", "resume_from")


class ModuleFacts(NamedTuple):
    """One module of the model.

    Attributes:
        name: its name in its parent; the class for the model itself.
        kind: its class.
        depth: 0 for the model, 1 for its children.
        output_shape: the shape of the first tensor that it returned for the first batch; None if it was not called.
        parameters: the number of its parameters, including its children's.
        trainable: how many of them are trained.
    """

    name: str
    kind: str
    depth: int
    output_shape: tuple[int, ...] | None
    parameters: int
    trainable: int


@dataclasses.dataclass(frozen=True)
class ScaleFacts:
    """The same run on `processes` processes, as the process that computes it would be: each with the same batch size.

    Attributes:
        processes: how many.
        rows: of one epoch, by rank; None if the data has no known order.
        updates_per_epoch: None likewise.
        sent_bytes: what DDP gives the group on each rank in one update: all gradients, and the buffers of the model
            once. A ring of ranks sends up to twice as much.
        memory_bytes: of a rank that has the whole model: parameters, gradients, optimizer state, activations.
        sharded_memory_bytes: of the first rank if torch's `fully_shard` divides parameters, gradients and optimizer
            state; while a layer computes, its whole parameters come on top.
    """

    processes: int
    rows: tuple[int, ...] | None
    updates_per_epoch: int | None
    sent_bytes: int
    memory_bytes: int
    sharded_memory_bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class TrainingSummary:
    """The result of `Trainer.summary`, of this rank; ``print(summary)`` shows it.

    Sizes are in bytes. Those of parameters, gradients and optimizer state are counted after one update. Those of
    activations are what autograd keeps for the backward pass of one batch, without parameters; the true peak is
    higher by what operations need while they compute, and by the allocator's reserve.

    Attributes:
        modules: the model and its modules, in order.
        batch: the first batch.
        parameters: the number of parameters of the model, shared ones once.
        trainable: how many of them are trained.
        parameter_bytes: parameters and buffers.
        gradient_bytes: gradients.
        optimizer_bytes: the optimizer's state.
        activation_bytes: activations of one batch.
        operations: floating-point operations of one update, forward and backward over all of its batches, as torch's
            `FlopCounterMode` counts them: matrix products, convolutions and attention; a multiplication and an addition
            are two.
        batches: batches of this rank in an update.
        scale: the same run on more processes, if `processes` asked for it.
    """

    modules: tuple[ModuleFacts, ...]
    batch: BatchFacts
    parameters: int
    trainable: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    operations: int
    batches: int
    scale: ScaleFacts | None = None

    @property
    def memory_bytes(self) -> int:
        """The estimate of what one update needs, from parameters, gradients, optimizer state and activations."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes

    def __repr__(self) -> str:
        head, *rows = aligned([("module", "output", "parameters"), *map(_cells, self.modules)], [2])
        rule = "-" * len(head)
        if any(one.trainable < one.parameters for one in self.modules):
            rows.append("(in brackets: not trained)")
        batch = textwrap.indent(str(self.batch), "  ")
        share = self.trainable / self.parameters if self.parameters else 0.0
        sizes = {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
        }
        of_batches = "" if self.batches == 1 else f" of {self.batches} batches"
        operations = tqdm.tqdm.format_sizeof(self.operations, "FLOP")
        facts = {
            "parameters": f"{self.parameters:,}, of which {self.trainable:,} are trained ({share:.1%})",
            "memory": f"at least {format_bytes(self.memory_bytes)} for an update",
            "  made of": ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items()),
            "operations": f"{operations} for an update{of_batches}, forward and backward",
        }
        if self.scale is not None:
            facts |= _facts_of_scale(self.scale)
        lines = aligned([(f"{name}:", value) for name, value in facts.items()])
        return "\n".join([head, rule, *rows, rule, "first batch:", batch, *lines])


def summarise(
    trainer: Trainer, train_dataset: Any, batch: Any, *, depth: Any, processes: int | None, arguments: Mapping[str, Any]
) -> TrainingSummary:
    """The summary of `Trainer.summary`. Must be called by all ranks."""
    refuse(arguments, _NOT_TAKEN, by="summary")
    if (train_dataset is None) == (batch is None):
        given = "neither" if batch is None else "both"
        raise ConfigurationError(f"`summary` needs either a `train_dataset` or a `batch`, but got {given}: pass one.")
    arguments = {**arguments, "max_num_train_steps": 1, "create_scheduler_fn": None}
    if batch is not None:
        batches: Any = [batch] * arguments.get("gradient_accumulation_steps", 1)
        train_dataset = DataLoader(batches, batch_size=None)
        arguments["train_dataloader_kwargs"] = {"is_sharded": True}  # each rank has its own
    watching = _WatchesOneUpdate(processes or 1)
    with rehearsal(trainer, [*preparing(trainer.callback_handler), watching]):
        counter = FlopCounterMode(display=False)
        model = trainer.model = trainer.get_model()  # replicas in a wrapper would be other modules
        with watching.noting(model), counter:
            trainer.train(train_dataset, None, **arguments)
        parameters = list(model.parameters())
        stepped = watching.stepped or set(map(id, parameters))
        trained = {id(each) for each in parameters if each.requires_grad and id(each) in stepped}
        summary = TrainingSummary(
            modules=tuple(_modules(model, watching.shapes, depth, trained)),
            batch=watching.batch,
            parameters=sum(each.numel() for each in parameters),
            trainable=sum(each.numel() for each in parameters if id(each) in trained),
            parameter_bytes=size_of_parts([*parameters, *model.buffers()], 1),
            gradient_bytes=watching.gradient_bytes,
            optimizer_bytes=watching.optimizer_bytes,
            activation_bytes=watching.activation_bytes,
            operations=counter.get_total_flops(),
            batches=watching.batches,
        )
        if processes is None:
            return summary
        rows, updates = rows_and_updates(
            None if batch is not None else trainer.run_context.parts.loaders.train, processes
        )
        buffers = list(model.buffers())
        sent = [*(each for each in parameters if each.requires_grad), *buffers]
        own = size_of_parts(parameters, processes) + size_of_parts(buffers, 1)
        scale = ScaleFacts(
            processes=processes,
            rows=rows,
            updates_per_epoch=updates,
            sent_bytes=size_of_parts(sent, 1) if processes > 1 else 0,
            memory_bytes=summary.memory_bytes,
            sharded_memory_bytes=own + watching.bytes_of_parts + summary.activation_bytes,
        )
        return dataclasses.replace(summary, scale=scale)


class _WatchesOneUpdate(TrainerCallback):
    """Notes what one update keeps in memory.

    Attributes:
        batch: what its first batch looks like.
        batches: how many it has.
        stepped: the ids of the parameters of the optimizers that made a step, whoever has them.
        shapes: of the first tensor that each module has returned first.
        bytes_of_parts: gradients and optimizer state of the first rank, if ranks divide them.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self.bytes_of_parts = 0
        self.batch = BatchFacts(())
        self.batches = self.gradient_bytes = self.optimizer_bytes = self.activation_bytes = 0
        self.stepped: set[int] = set()
        self.shapes: dict[nn.Module, tuple[int, ...] | None] = {}
        # Sizes by address and size: views of the same values count once.
        self._kept: dict[tuple[int, int], int] = {}
        self._own: set[int] = set()  # addresses of parameters and buffers

    @contextlib.contextmanager
    def noting(self, model: nn.Module) -> Iterator[None]:
        """In the block, tensors that autograd keeps are counted, and outputs and optimizers are noticed."""
        with contextlib.ExitStack() as hooks:
            hooks.callback(register_optimizer_step_post_hook(self._note_optimizer).remove)
            for module in model.modules():
                hooks.callback(module.register_forward_hook(self._note_output).remove)
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor))
            yield

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        model = trainer.get_model()
        self._own = {_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._kept = {}

    def on_train_step_end(self, trainer: Trainer, *, batch: Any, **kwargs: Any) -> None:
        self.activation_bytes = max(self.activation_bytes, sum(self._kept.values()))
        self._kept = {}
        if not self.batches:
            self.batch = facts_of(batch)
        self.batches += 1

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        gradients = [each.grad for each in trainer.get_model().parameters() if each.grad is not None]
        self.gradient_bytes = size_of_parts(gradients, 1)
        self.bytes_of_parts += size_of_parts(gradients, self._processes)

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, Optimizers):
            return  # each of them is noticed by itself
        self.stepped |= {id(each) for group in optimizer.param_groups for each in group["params"]}
        values = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self.optimizer_bytes += size_of_parts(tensors, 1)
        self.bytes_of_parts += size_of_parts(tensors, self._processes)

    def _note_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.shapes.get(module) is None:
            self.shapes[module] = first_shape(output)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        if _address(tensor) not in self._own:
            size = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
            self._kept[tensor.data_ptr(), size] = size
        return tensor


def _modules(
    model: nn.Module, shapes: Mapping[nn.Module, tuple[int, ...] | None], depth: int, trained: set[int]
) -> Iterator[ModuleFacts]:
    for path, module in model.named_modules(remove_duplicate=False):
        level = len(path.split(".")) if path else 0
        if level <= depth:
            own, kind = list(module.parameters()), type(module).__name__
            sizes = [
                sum(each.numel() for each in part) for part in (own, [each for each in own if id(each) in trained])
            ]
            yield ModuleFacts(path.rpartition(".")[2] or kind, kind, level, shapes.get(module), *sizes)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _facts_of_scale(scale: ScaleFacts) -> dict[str, str]:
    facts = {f"on {scale.processes}": f"{format_bytes(scale.sent_bytes)} sent by each rank in an update"}
    if scale.rows is not None:
        fewest, most = min(scale.rows), max(scale.rows)
        rows = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
        facts["  epoch"] = f"{scale.updates_per_epoch:,} updates, {rows} rows of each rank"
    plain, sharded = format_bytes(scale.memory_bytes), format_bytes(scale.sharded_memory_bytes)
    return facts | {"  memory": f"at least {plain} of a rank, {sharded} with `fully_shard`"}


def _cells(one: ModuleFacts) -> tuple[str, str, str]:
    label = "  " * one.depth + (one.name if one.depth == 0 else f"{one.name}: {one.kind}")
    number = f"{one.parameters:,}" if one.trainable else f"({one.parameters:,})"
    shape = shape_in_words(one.output_shape)
    return _cut(label, _NAME_WIDTH), _cut(shape, _SHAPE_WIDTH), number if one.parameters else "-"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


# Order and shares are functions of numbers, so a run on more processes than there are is computed. Torch's fake group
# would count the same messages, but it has to be the group of the process, which may have one, and the model would have
# to be wrapped again for each number of processes. The tests compare with real groups.


def size_of_parts(tensors: Sequence[torch.Tensor], processes: int) -> int:
    """The bytes that the first rank has of `tensors`, each divided along its first dimension; once each."""
    sizes = {
        id(each): -(-each.shape[0] // processes) * each[:1].numel() * each.element_size()
        if each.ndim and len(each)
        else each.numel() * each.element_size()
        for each in tensors
    }
    return sum(sizes.values())


def rows_and_updates(loader: Any, processes: int) -> tuple[tuple[int, ...], int] | tuple[None, None]:
    """The rows of each rank in an epoch, and the updates of the epoch; None where only the data knows."""
    if not isinstance(loader, PlannedLoader):
        return None, None
    rows, updates = [0] * processes, 0
    for window in loader.detached(SimpleNamespace(count=processes, index=0)).windows()[1]:
        updates += 1
        for cells in window.rounds:
            for rank, cell in enumerate(cells):
                rows[rank] += cell.size
    return tuple(rows), updates
