"""A training step that is captured once and then replayed, without Python in between.

`CapturedStep` stands in the loop's place at two points of an update: for the forward and backward pass of a batch, and
for clipping and the optimizer step. It decides what is replayed and what runs as always, and holds each graph against
one ordinary run before it is trusted. `docs/design/captured-step.md` says why it is built like this.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.warning import warn_user
from pytorch_accelerated.errors import ConfigurationError, HookOutputError
from pytorch_accelerated.models.preparation import is_replicated
from pytorch_accelerated.models.sharding import has_shards
from pytorch_accelerated.steps.cuda_graphs import Capturer
from pytorch_accelerated.steps.step_facts import (
    BatchLayout,
    Gradients,
    Snapshot,
    StepParts,
    Stillness,
    as_fact,
    copies_of,
    detached,
    difference,
    with_tensors,
)
from pytorch_accelerated.training.hook_output import loss_and_size
from pytorch_accelerated.training.loop import TrainingLoop, clip_gradients

if TYPE_CHECKING:
    from pytorch_accelerated.trainer import Trainer

# In the first updates kernels are chosen and optimizer states made.
UPDATES_BEFORE_CAPTURE = 3
# DDP arranges and times its buckets in its first 11.
UPDATES_BEFORE_CAPTURE_ON_RANKS = 12
# A capture costs several steps, so another layout, such as an epoch's short last batch, must come back often.
BATCHES_BEFORE_ANOTHER_LAYOUT = 16
MAX_GRAPHS = 8
MAX_LAYOUTS = 256

_COUNTED_LATE = "the items of an update are counted only while it runs; override `count_batch_items`"

Results = dict[str, torch.Tensor]
# What a stage returns, and what else it computed; both again in tensors that stay, and its replay.
Stage = Callable[[], tuple[Any, Results]]
Captured = tuple[Any, Results, Callable[[], None]]


@dataclasses.dataclass
class CapturedStepReport:
    """What became of a run with ``compile_step``; ``print(report)`` says it in a line.

    Attributes:
        captured_steps: batches whose forward and backward pass was replayed.
        shadow_steps: batches that ran both ways, to compare.
        eager_steps: batches that ran as always.
        captured_updates: updates whose clipping and optimizer step was replayed.
        shadow_updates: updates in which they ran both ways, to compare.
        eager_updates: updates in which they ran as always.
        graphs: captured and proved, those that were dropped later included.
        layouts: of batches (structure, shapes, dtypes) that were met without a graph, up to 256.
        recaptures: what changed so that graphs were dropped or had to wait, and how often.
        eager_optimizer: why clipping and the optimizer step are not replayed, if so.
        fallback: why nothing is replayed any more, if so.
    """

    captured_steps: int = 0
    shadow_steps: int = 0
    eager_steps: int = 0
    captured_updates: int = 0
    shadow_updates: int = 0
    eager_updates: int = 0
    graphs: int = 0
    layouts: int = 0
    recaptures: dict[str, int] = dataclasses.field(default_factory=dict)
    eager_optimizer: str | None = None
    fallback: str | None = None

    def __str__(self) -> str:
        steps = self.captured_steps + self.shadow_steps + self.eager_steps
        updates = self.captured_updates + self.shadow_updates + self.eager_updates
        optimizer_steps = f"{self.captured_updates} of {updates} optimizer steps"
        parts = [f"Replayed {self.captured_steps} of {steps} batches and {optimizer_steps}"]
        if self.captured_steps == 0 and self.layouts > 1:
            parts.append(f"batches of {self.layouts} layouts")
        if self.recaptures:
            changes = ", ".join(f"{reason} ({times}x)" for reason, times in self.recaptures.items())
            parts.append(f"changed meanwhile: {changes}")
        if self.fallback is not None:
            parts.append(f"the rest is not captured, because {self.fallback}")
        elif self.eager_optimizer is not None:
            parts.append(f"the optimizer is not captured, because {self.eager_optimizer}")
        return "; ".join(parts)


def refuse_what_cannot_be_captured(trainer: Trainer) -> None:
    """Refuse a run with ``compile_step`` that could never replay anything. All complaints come in one error.

    Raises:
        ConfigurationError: names what is in the way.
    """
    complaints: list[str] = []
    if isinstance(trainer.optimizer, torch.optim.LBFGS):
        complaints.append("LBFGS decides as it goes how often it evaluates its closure: use another optimizer")
    if trainer._accelerator.scaler is not None:
        complaints.append("with fp16 the host decides whether to skip an update: use mixed_precision='bf16'")
    if not is_replicated(trainer._accelerator) or has_shards(trainer.model):
        kind = "FSDP" if has_shards(trainer.model) else trainer._accelerator.distributed_type.value
        complaints.append(f"{kind} cuts the model into pieces that come and go: use one process or DDP")
    if complaints:
        raise ConfigurationError(
            f"`compile_step` is {trainer.compile_step!r}, but a step can only be captured if it is the same each time: "
            f"{'; '.join(complaints)}; or leave `compile_step` out."
        )


@dataclasses.dataclass(frozen=True)
class _Graph:
    """A stage of the step as it was captured.

    Attributes:
        output: what it returned, in tensors that every replay overwrites.
        replay: computes it again.
        gradients: of each parameter when it is over.
        flags: of DDP when it is over.
        inputs: the tensors of the batch that it was captured with.
    """

    output: Any
    replay: Callable[[], None]
    gradients: Gradients
    flags: tuple[bool, ...]
    inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def leaves(self, gradients: Gradients) -> bool:
        """Whether `gradients` are those that it leaves behind."""
        return all(mine is given for mine, given in zip(self.gradients, gradients, strict=True))


class CapturedStep:
    """Runs the stages of an update in the loop's place, captured where that is possible.

    Args:
        trainer: whose step it is.
        capturer: None if this device has none; everything then runs as always.

    Attributes:
        report: what happened so far.
    """

    def __init__(self, trainer: Trainer, capturer: Capturer | None) -> None:
        self.report = CapturedStepReport()
        self._trainer = trainer
        self._capturer = capturer
        self._weight = torch.ones((), dtype=torch.float64, device=trainer.device if capturer is not None else None)
        self._updates = 0
        self._looked_at: int | None = None  # the update at whose beginning facts were compared
        self._obstacle: str | None = None
        self._stillness = Stillness(UPDATES_BEFORE_CAPTURE)
        self._stillness_of_optimizer = Stillness(UPDATES_BEFORE_CAPTURE)
        # On several ranks: in which update they capture, and what they have tried to.
        self._update_of_capture: int | None = None
        self._tried: set[Hashable] = set()
        # What `_forget` forgets. All graphs leave gradients in the same tensors, so that they fit each other.
        self._parts: StepParts | None = None
        self._graphs: dict[tuple[Hashable, Hashable], _Graph] = {}
        self._graph_of_optimizer: _Graph | None = None
        self._gradients: Gradients | None = None
        self._meetings: collections.Counter[Hashable] = collections.Counter()
        self._load_hook: Any = None
        passes = "_perform_forward_and_backward_passes"
        if capturer is None:
            self._fall_back(f"there is no CUDA device, only {trainer.device.type}")
        elif getattr(type(trainer), passes) is not getattr(TrainingLoop, passes):
            self._fall_back(f"`{passes}` is overridden")
        elif not isinstance(trainer.optimizer, torch.optim.Optimizer):
            self._fall_back(f"{type(trainer.optimizer).__name__} is no optimizer of torch")
        else:
            self._load_hook = trainer.optimizer.register_load_state_dict_post_hook(self._after_loading)

    # ------------------------------------------------------------------------------------------- what the loop calls

    def compute(self, batch: Any, step: int) -> None:
        """Add the gradients of one batch; see `TrainingLoop._perform_forward_and_backward_passes`."""
        graph = self._computed(batch) if self.report.fallback is None else None
        if graph is not None:
            self._deliver(graph, batch, step)
            return
        self.report.eager_steps += 1
        if self.report.fallback is None:
            self._compute_eagerly(batch, step)
        else:
            self._trainer._perform_forward_and_backward_passes(batch, step)

    def apply_gradients(self) -> None:
        """Clip the complete gradients, and change the parameters."""
        graph = self._applied() if self.report.fallback is None else None
        self._updates += 1
        if graph is None:
            self.report.eager_updates += 1
            with self.aside():
                self._trainer._apply_gradients()
        elif graph.output is not None:
            self._trainer._gradient_norms.update(graph.output.clone())

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Where the model must be wrapped, and everything that will be captured must run before."""
        if self._capturer is None or self.report.fallback is not None:
            return contextlib.nullcontext()
        return self._capturer.aside()

    def invalidate(self, reason: str) -> None:
        """Drop all graphs, because of something that cannot be seen here. They are captured anew some updates later."""
        self._count_change(reason, self._stillness)
        self._forget()

    def close(self) -> None:
        """Let go of all graphs and their memory."""
        self._forget()
        if self._load_hook is not None:
            self._load_hook.remove()

    # ------------------------------------------------------------------------------------- forward and backward pass

    def _computed(self, batch: Any) -> _Graph | None:
        """The graph of a batch, when it has computed it; None if the batch must run as always."""
        trainer, parts = self._trainer, self._look_at_parts()
        layout, gradients = BatchLayout(batch), parts.gradients()
        weight = trainer._micro_batch.weight
        kind = (
            # The first batch of an update writes gradients, the others add to what is there.
            tuple(gradient is None for gradient in gradients),
            weight if weight is None else weight == 1,
            # Ranks exchange gradients in the last batch of an update only, and buffers in the one after it.
            trainer._ranks.count > 1 and trainer._micro_batch.is_last,
            parts.flags(),
            _autocast_on(trainer.device),
        )
        if not self._has_room_for(gradients):
            return None
        graph = self._graphs.get((layout.key, kind))
        if graph is None:
            is_due = self._is_due(layout.key) if trainer._ranks.count == 1 else self._is_due_on_ranks(kind)
            return self._capture_computation(parts, batch, layout, kind) if is_due else None
        if graph.inputs:
            torch._foreach_copy_(graph.inputs, layout.tensors)
        self._fill_weight()
        graph.replay()
        parts.set_gradients(graph.gradients)
        parts.set_flags(graph.flags)
        self.report.captured_steps += 1
        return graph

    def _deliver(self, graph: _Graph, batch: Any, step: int) -> None:
        """Tell the loss tracker and the callbacks of a batch that a graph has computed."""
        output = dict(graph.output)
        for name in ("loss", "batch_size", "num_items_in_batch"):
            if isinstance(output.get(name), torch.Tensor):
                output[name] = output[name].clone()  # the loss tracker keeps these for many updates
        if not self._trainer._report_leaves_loss(output, batch, step):
            raise HookOutputError(
                "A callback changed batch_output['loss'] in `on_train_step_end`, but in a captured step the gradients "
                "of the original loss have been computed by then. Change the loss in `calculate_train_batch_loss`, or "
                "leave `compile_step` out."
            )

    def _compute_eagerly(self, batch: Any, step: int) -> None:
        """As the loop does it, noting what would make a replay wrong."""
        trainer, parts = self._trainer, self._look_at_parts()
        versions = [parameter._version for parameter in parts.parameters]
        with self.aside():
            output = trainer._output_of(trainer.calculate_train_batch_loss, batch)
            if not trainer._report_leaves_loss(output, batch, step):
                self._obstacle = "a callback changes batch_output['loss'] in `on_train_step_end`"
            weighted = trainer._weighted(output)
            if trainer._late_counts.counts:
                self._obstacle = _COUNTED_LATE
            trainer._guarded(trainer.backward_step, weighted)
        if versions != [parameter._version for parameter in parts.parameters]:
            self._obstacle = "parameters are changed in `calculate_train_batch_loss` or `backward_step`"

    def _is_due(self, layout: Hashable) -> bool:
        """Whether a batch of this layout is to be captured."""
        met = self._meetings[layout]
        if layout in self._meetings or len(self._meetings) < MAX_LAYOUTS:
            self._meetings[layout] += 1
            self.report.layouts = max(self.report.layouts, len(self._meetings))
        if not self._stillness.is_enough or len(self._graphs) == MAX_GRAPHS:
            return False
        if any(layout == captured for captured, _ in self._graphs):
            return True
        return met >= (BATCHES_BEFORE_ANOTHER_LAYOUT if self._graphs else UPDATES_BEFORE_CAPTURE)

    def _is_due_on_ranks(self, kind: Hashable) -> bool:
        """Whether all ranks capture a batch of this kind now: they must do it together, since gradients are exchanged.

        They do it in one update of the run, each with the layout that it has there. What does not fit that, or comes
        after a change, runs as always.
        """
        trainer = self._trainer
        if trainer._micro_batch.has_empty_rank or self._updates < UPDATES_BEFORE_CAPTURE_ON_RANKS:
            return False
        if self._update_of_capture is None:
            is_ready = not trainer._ranks.any(not self._stillness.is_enough)
            self._update_of_capture = self._updates if is_ready else -1
        if self._updates != self._update_of_capture or kind in self._tried:
            return False
        self._tried.add(kind)
        return True

    def _capture_computation(self, parts: StepParts, batch: Any, layout: BatchLayout, kind: Hashable) -> _Graph | None:
        trainer = self._trainer
        found = parts.gradients()
        targets = _first_of_each(self._gradients or found, found)
        obstacle = self._obstacle or layout.obstacle(trainer.device)
        if trainer._micro_batch.weight is None:
            obstacle = _COUNTED_LATE
        inputs = [tensor.detach().clone() for tensor in layout.tensors]
        own_batch = None if obstacle else with_tensors(batch, iter(inputs))
        self._fill_weight()

        def computation() -> tuple[Any, Results]:
            output = trainer.calculate_train_batch_loss(own_batch)
            loss, _ = loss_and_size(output, hook="calculate_train_batch_loss")
            trainer.backward_step(self._weighted(loss))
            parts.move_gradients(targets)
            # An output that autograd knows of would keep its nodes alive, and with them the stream that they ran on.
            return (detached(output), parts.flags()), {"the loss": loss.detach(), **parts.named_gradients()}

        captured = self._capture(computation, parts, {**parts.buffers(), **parts.named_gradients()}, obstacle)
        if captured is None:
            return None
        (output, flags), results, replay = captured
        parts.set_flags(flags)
        gradients = [results.get(name) for name in parts.gradient_names]
        parts.set_gradients(gradients)
        self._gradients = _first_of_each(targets, gradients)
        self._graphs[layout.key, kind] = graph = _Graph(output, replay, gradients, flags, inputs)
        self.report.shadow_steps += 1
        return graph

    def _weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """As `TrainingLoop._weighted`, with a weight that may be another one in each replay."""
        return loss if self._trainer._micro_batch.weight == 1 else (loss * self._weight).to(loss.dtype)

    def _fill_weight(self) -> None:
        weight = self._trainer._micro_batch.weight
        if weight is not None and weight != 1:
            self._weight.fill_(weight)

    def _has_room_for(self, gradients: Gradients) -> bool:
        """Whether these gradients are in the tensors that graphs add to, or are yet to come."""
        return self._gradients is None or all(
            theirs is None or ours is None or theirs is ours
            for ours, theirs in zip(self._gradients, gradients, strict=True)
        )

    # -------------------------------------------------------------------------------------------- the optimizer step

    def _applied(self) -> _Graph | None:
        """The graph of clipping and the optimizer step, when it has done them; None if they must run as always."""
        self._look_at_hyperparameters()
        self.report.eager_optimizer = self._why_optimizer_is_eager()
        parts, graph = self._look_at_parts(), self._graph_of_optimizer
        gradients = parts.gradients()
        if graph is None:
            return self._capture_optimizer(parts) if self._is_optimizer_due(gradients) else None
        if self.report.eager_optimizer is not None or not graph.leaves(gradients):
            return None
        graph.replay()
        self.report.captured_updates += 1
        return graph

    def _is_optimizer_due(self, gradients: Gradients) -> bool:
        """Whether clipping and the optimizer step are to be captured; on several ranks, by all of them."""
        is_due = (
            self.report.eager_optimizer is None
            and self._stillness_of_optimizer.is_enough
            and any(graph.leaves(gradients) for graph in self._graphs.values())
        )
        ranks = self._trainer._ranks
        return is_due if ranks.count == 1 else self._updates == self._update_of_capture and not ranks.any(not is_due)

    def _capture_optimizer(self, parts: StepParts) -> _Graph | None:
        trainer = self._trainer

        def clipping_and_step() -> tuple[Any, Results]:
            norm = clip_gradients(trainer._parameters(), trainer._settings)
            trainer.optimizer_step()
            return norm, {} if norm is None else {"the gradient norm": norm}

        captured = self._capture(clipping_and_step, parts, parts.tensors_of_optimizer())
        if captured is None:
            return None
        output, _, replay = captured
        self._graph_of_optimizer = graph = _Graph(output, replay, parts.gradients(), parts.flags())
        self.report.shadow_updates += 1
        return graph

    def _why_optimizer_is_eager(self) -> str | None:
        trainer, optimizer = self._trainer, self._trainer.optimizer
        if trainer._overrides("optimizer_step"):
            return "`optimizer_step` is overridden"
        if type(trainer)._clip_gradients is not TrainingLoop._clip_gradients:
            return "`_clip_gradients` is overridden"
        if trainer.callback_handler.acts_at["on_optimizer_step_start"]:
            return "a callback acts at `on_optimizer_step_start`"
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return f"{type(optimizer).__name__} has step hooks"
        for index, group in enumerate(optimizer.param_groups):
            if not group.get("capturable"):
                return f"parameter group {index} of {type(optimizer).__name__} was not made with capturable=True"
            if not isinstance(group.get("lr"), torch.Tensor):
                return f"the learning rate of parameter group {index} is a number, not a tensor"
        return None

    def _look_at_hyperparameters(self) -> None:
        """Drop the optimizer's graph if values that it was captured with have changed."""
        facts = {
            f"{name!r} of parameter group {index}": as_fact(value)
            for index, group in enumerate(self._trainer.optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }
        changes = self._stillness_of_optimizer.look(facts)
        if changes:
            self._drop_graph_of_optimizer(changes[0])

    def _after_loading(self, optimizer: torch.optim.Optimizer) -> None:
        """A loaded state is in new tensors."""
        self._put_hyperparameters_on_device()
        self._drop_graph_of_optimizer("the optimizer's state")

    def _drop_graph_of_optimizer(self, reason: str) -> None:
        if self._graph_of_optimizer is not None:
            self._graph_of_optimizer = None
            self._count_change(reason, self._stillness_of_optimizer)

    def _put_hyperparameters_on_device(self) -> None:
        """A learning rate on the CPU, where loading leaves it, would be a constant of the graph."""
        for group in self._trainer.optimizer.param_groups:
            if group.get("capturable"):
                group.update(
                    {
                        name: value.to(self._trainer.device)
                        for name, value in group.items()
                        if isinstance(value, torch.Tensor)
                    }
                )

    # ------------------------------------------------------------------------------------------- capture and compare

    def _capture(
        self, stage: Stage, parts: StepParts, changed: Results, obstacle: str | None = None
    ) -> Captured | None:
        """Run a stage as always, capture it, and replay it from the same state: the shadow step.

        Args:
            stage: computes something, and returns it with results to compare, by name.
            parts: of the step.
            changed: what the stage changes in place, by name.
            obstacle: why it need not be tried, if that is known.

        Returns:
            What the stage returns, in tensors that stay, and its replay, which has been done once; None if everything
            is as before and nothing will be captured any more.
        """
        if self._is_hindered(obstacle):
            return None
        before: Snapshot | None = None
        try:
            before = Snapshot(parts, changed.values())
            return self._capture_and_compare(stage, parts, changed, before)
        except torch.OutOfMemoryError:
            if self._trainer._ranks.count > 1:
                raise  # the other ranks are waiting by now
            if before is not None:
                before.restore()
            self._fall_back("memory does not suffice to run a step twice and compare")
            return None

    def _capture_and_compare(
        self, stage: Stage, parts: StepParts, changed: Results, before: Snapshot
    ) -> Captured | None:
        assert self._capturer is not None
        facts, attributes = parts.facts(), parts.attributes()
        with self._capturer.aside(), self._capturer.noting_waits() as waits:
            _, results = stage()
        expected = copies_of({**changed, **results})
        obstacle: str | None
        if waits:
            obstacle = f"the host waits for the device in {waits[0]}"
        elif before.host_has_drawn():
            obstacle = "random numbers are drawn on the host, which a replay would leave out; draw them on the device"
        else:
            obstacle = parts.replaced_since(facts, attributes)
        before.restore()
        if obstacle is None:
            try:
                (output, results), replay = self._capturer.capture(stage, parts.generators)
            except Exception as error:
                obstacle = _described(error)
            before.restore()  # a capturer may run what it captures
        if self._is_hindered(obstacle):
            return None
        replay()
        if self._is_hindered(difference({**changed, **results}, expected)):
            before.restore()
            return None
        self.report.graphs += 1
        return output, results, replay

    def _is_hindered(self, obstacle: str | None) -> bool:
        """Whether there is an obstacle on any rank, which ends all capturing. Must be called by all ranks."""
        if not self._trainer._ranks.any(obstacle is not None):
            return False
        self._fall_back(obstacle or "something was in the way on another rank")
        return True

    def _fall_back(self, reason: str) -> None:
        self.report.fallback = reason
        self._forget()
        warn_user(
            self._trainer,
            f"`compile_step` is {self._trainer.compile_step!r}, but from now on nothing is captured, because {reason}. "
            "What is computed is the same; it only takes its usual time.",
        )

    def _look_at_parts(self) -> StepParts:
        """What the step is made of. Once per update: if that has changed, all graphs are dropped."""
        if self._parts is not None and self._looked_at != self._updates:
            changes = self._stillness.look(self._parts.facts())
            if changes:
                self.invalidate(changes[0])
        if self._parts is None:
            self._parts = StepParts(self._trainer)
            self._put_hyperparameters_on_device()
        self._looked_at = self._updates
        return self._parts

    def _count_change(self, reason: str, stillness: Stillness) -> None:
        self.report.recaptures[reason] = self.report.recaptures.get(reason, 0) + 1
        if self._graphs:
            stillness.needed *= 2  # whatever changes again and again is not worth capturing again and again
        stillness.restart()

    def _forget(self) -> None:
        self._parts = self._graph_of_optimizer = self._gradients = None
        self._graphs.clear()
        self._meetings.clear()


def _first_of_each(ours: Gradients, theirs: Gradients) -> Gradients:
    """Ours, and where we have none, theirs."""
    return [one if one is not None else other for one, other in zip(ours, theirs, strict=True)]


def _autocast_on(device: torch.device) -> torch.dtype | None:
    """The dtype of an autocast context around the run."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _described(error: BaseException) -> str:
    """The first cause of an error, and where it was, as a sentence."""
    while error.__context__ is not None:
        error = error.__context__
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error).strip().partition("\n")[0]
    return f"capturing failed ({type(error).__name__}: {message}; in {place.filename}, line {place.lineno})"
