"""A model and its optimizer in DeepSpeed's engine, led by the training loop.

The engine would count the batches of an update, divide losses by their number and step by itself. The loop does that:
it tells the engine which batch is the last of an update, weighs the losses, and steps. So updates are the same as
without DeepSpeed. `docs/design/sharded-models.md` has the reasons.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pytorch_accelerated.errors import CheckpointError, ConfigurationError
from pytorch_accelerated.extras.deepspeed.config import AUTO, found, make_schedule
from pytorch_accelerated.extras.deepspeed.pieces import Layout, Piece, layout_of, norm_of, scale_of
from pytorch_accelerated.facts import require, trees
from pytorch_accelerated.loop import Step
from pytorch_accelerated.ranks import (
    Optimizers,
    Parallel,
    PreparedModel,
    Shard,
    forward_hook_stores,
    has_shards,
    is_in_pieces,
    note_step,
)

_END = "_end_deepspeed"  # the attribute of a model that ends the engine around it
_MAIN = "main_weights"  # the entry of an optimizer's state for float32 weights, where the model's are in 16 bits
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_OFFLOADS = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")


class DeepSpeedModel(PreparedModel):
    """A model in an engine of DeepSpeed, which stays around it until the next run if the weights are cut up.

    Args:
        accelerator, model, optimizer, for_training, compile_arguments: see `PreparedModel`.
        context: of the call.
    """

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, *, context: Any, **options: Any) -> None:
        for_training = options.pop("for_training")
        super().__init__(accelerator, model, optimizer, for_training=False, **options)
        self.has_plain_backward, self._is_in_training, self._context = False, for_training, context
        if not for_training:
            if has_shards(model) and _END not in vars(model):  # made in `zero.Init`; an engine gathers its parts
                traces = _Traces(model)
                engine = _initialize(model, None, _config_of(context, model, None))
                vars(model)[_END] = _End(engine, traces)
            return
        Parallel.register(require("deepspeed", needed_by="DeepSpeed").DeepSpeedEngine)
        _refuse(model, optimizer, context)
        if end := vars(model).pop(_END, None):
            end()
        traces = _Traces(model)
        self.optimizer = EngineOptimizer(model, optimizer, _config_of(context, model, optimizer))
        self.model = self.optimizer.engine
        accelerator.deepspeed_engine_wrapped = self.optimizer
        model.register_forward_pre_hook(_share_buffers)
        model.register_forward_pre_hook(_in_dtype_of_weights, with_kwargs=True)
        vars(model)[_END] = _End(self.model, traces)

    def make_schedule(self) -> Any:
        """The schedule of the config, if it has one."""
        config = copy.deepcopy(self._accelerator.state.deepspeed_plugin.deepspeed_config)
        run, given = self._context.parts.config, (config.get("scheduler") or {}).get("params", {})
        known = {"total_num_steps": run.max_num_train_steps, "warmup_max_lr": self.optimizer.param_groups[0]["lr"]}
        given.update({name: value for name, value in known.items() if given.get(name) == AUTO})
        return make_schedule(_without_auto(config), self.optimizer)

    def take_over(self, step: Step) -> None:
        """Leave to the engine what only that can do. Whether fp16 skips an update shows only after it."""
        self._step, schedule = step, (self._context.trainer, "scheduler_step")
        if self.optimizer.is_cut:
            step.limit = None
        calls = [(self, "step_schedule") if each == schedule else each for each in step.calls[False]]
        step.calls[False] = [(self, "before_update"), *calls, (self, "after_update")]

    def before_update(self) -> None:
        """Refuse what only the whole gradients could be scaled by."""
        batch, counts = self._step.micro_batch, self._step.late_counts.hook_counts
        is_late = counts is not None and (batch.weight is None or (counts and batch.items is None))
        if is_late and self.optimizer.is_cut:
            raise ConfigurationError(
                "`calculate_train_batch_loss` returns 'num_items_in_batch', which is too late for DeepSpeed: it has "
                "cut up the gradients of earlier batches by then. Override `count_batch_items`, or use stage 0."
            )

    def step_schedule(self) -> None:
        """Step the schedule, unless the update was skipped."""
        if self.model.was_step_applied():
            self._context.trainer.scheduler_step()

    def after_update(self) -> None:
        """Count a skipped update, and note the norm of the gradient."""
        is_skipped = not self.model.was_step_applied()
        self._context.parts.state.skipped_updates += is_skipped
        if self.optimizer.is_cut and self.optimizer.norm is not None:
            self._step.note_norm(self.optimizer.norm, is_skipped=is_skipped)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context for a batch that is not the last of its update."""
        self.model.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.model.set_gradient_accumulation_boundary(True)

    def release(self, model: Any) -> tuple[Any, Any]:
        """Return the bare model and the optimizer, which keeps its state for the next run."""
        bare, _ = super().release(model)
        if self._is_in_training:
            self._accelerator.deepspeed_engine_wrapped = None
            if not has_shards(self._bare_model):  # else it stays, and lets the parts of the weights be gathered
                vars(self._bare_model).pop(_END)()
        return bare, self.optimizer


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer of an engine, with the groups and settings of the one that it was made from.

    DeepSpeed replaces the parameters in an optimizer by rows of their numbers. It gets a copy, and the settings here,
    which schedules change, are passed on at each step.

    Args:
        model: the bare module.
        given: the user's optimizer, or accelerate's `DummyOptim` for that of the config; or the one of the last run.
        config: for the engine.

    Attributes:
        engine: of DeepSpeed.
        given: as passed; of the optimizer of the last run, what that was made from.
        inner: the optimizer in the engine.
        is_cut: whether the engine cuts up gradients, or converts them, so that only its step can clip them.
        norm: of the gradient of the last update, the same on all ranks; None if the engine has none.
    """

    def __init__(self, model: nn.Module, given: Any, config: dict[str, Any]) -> None:
        state = None
        if isinstance(given, EngineOptimizer):
            given, state = given.given, given.state_dict()
        self.given: Any = given
        is_own = hasattr(given, "param_groups")
        groups = given.param_groups if is_own else _groups_of(given.params)
        # DeepSpeed puts its own tensors into the groups that it gets.
        self.engine = _initialize(model, _twin(given) if is_own else [dict(group) for group in groups], config)
        self.inner = self.engine.basic_optimizer
        if getattr(self.engine.optimizer, "optimizer", self.inner) is not self.inner:
            raise ConfigurationError(
                f"DeepSpeed has replaced this {type(given).__name__} by another optimizer, which has other groups. Use "
                "AdamW or SGD, or stage 0."
            )
        if not is_own:
            for group, made in zip(groups, self.inner.param_groups, strict=True):
                group.update({name: value for name, value in made.items() if name not in ("params", "step")})
        super().__init__([{"params": []}], dict(self.inner.defaults))
        self.param_groups = groups
        outer = self.engine.optimizer
        self.is_cut = outer is not self.inner
        self._layout: Layout = layout_of(self.engine, [group["params"] for group in self._used()])
        self._rows = {id(row.parameter): row for _, rows in self._layout for row in rows}
        self._is_replica = torch.distributed.get_rank() > 0 and all(row.is_whole for row in self._rows.values())
        self._must_take_weights = False
        self.norm: torch.Tensor | None = None
        if state is not None:
            for entry in state["state"].values():
                entry.pop(_MAIN, None)  # the model's may have been changed meanwhile
            self.load_state_dict(state)

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True) -> None:
        """Add the gradients of a loss that is weighed already; `Accelerator.backward` calls this."""
        self.engine.backward(loss, scale_wrt_gas=False)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters, and discard the gradients."""
        if self._must_take_weights:
            self._take_weights()
        for own, inner in zip(self._used(), self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in own.items() if name not in ("params", "step")})
        scale = getattr(self.engine.optimizer, "loss_scale", 1.0)
        if isinstance(self.given, torch.optim.Optimizer):
            note_step(self.given)  # whose groups a schedule may change
        self.engine.step()
        # The engine leaves the norm of an earlier update there if it skips one.
        self.norm = norm_of(self.engine, scale) if self.engine.was_step_applied() else torch.tensor(torch.inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the step of the engine does it."""

    def piece_of(self, parameter: Any) -> Piece | None:
        """The row of a parameter that this rank updates, as a target to load its state into."""
        row = self._rows.get(id(parameter))
        return None if row is None else row.piece(torch.empty(row.offset + row.count))

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of any optimizer's, with this rank's pieces of its tensors.

        Raises:
            CheckpointError: if a tensor cannot be divided among parameters.
        """
        packed, numbers = super().state_dict(), self._numbers()
        state: dict[int, Any] = {}
        for flat, rows in self._layout:
            entries = dict(self.inner.state.get(flat, {}))
            if rows and entries and rows[0].parameter.dtype != flat.dtype:
                entries[_MAIN] = flat.detach()
            for row, (key, value) in itertools.product(rows, entries.items()):
                is_plain = not isinstance(value, torch.Tensor) or not value.ndim
                if not is_plain and value.shape == flat.shape:
                    value = row.piece(value.contiguous(), is_replica=self._is_replica)
                elif not is_plain:
                    raise CheckpointError(
                        f"The {type(self.inner).__name__} in DeepSpeed has {key!r} of shape {tuple(value.shape)} for "
                        "numbers of several parameters, which cannot be saved. Use AdamW or SGD, or stage 0."
                    )
                # Each parameter has a count of its own: optimizers without DeepSpeed count in place.
                state.setdefault(numbers[id(row.parameter)], {})[key] = copy.deepcopy(value) if is_plain else value
        used = [group for group in packed["param_groups"] if group["params"]]
        for group, inner in zip(used, self.inner.param_groups, strict=True):
            group.update({"step": inner["step"]} if "step" in inner else {})
        scale = scale_of(self.engine.optimizer)
        counts = {name: getattr(self.engine, name) for name in _COUNTS}
        scales = {name: getattr(scale, name) for name in _SCALE if hasattr(scale, name)}
        return {**packed, "state": state, "engine": {**counts, **scales}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, whose tensors are whole or this rank's pieces."""
        numbers = self._numbers()
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update({name: value for name, value in saved.items() if name != "params"})
        for inner, own in zip(self.inner.param_groups, self._used(), strict=True):
            inner.update({"step": own.pop("step")} if "step" in own else {})
        self.inner.state.clear()
        self._must_take_weights = self.is_cut
        for flat, rows in self._layout:
            entries = [state_dict["state"].get(numbers[id(row.parameter)], {}) for row in rows]
            for key, first in next(filter(None, entries), {}).items():
                if not isinstance(first, (torch.Tensor, Shard)) or not len(first.shape):
                    is_on_device = any(group.get("fused") or group.get("capturable") for group in self.param_groups)
                    moves = isinstance(first, torch.Tensor) and is_on_device
                    self.inner.state[flat][key] = first.to(flat.device) if moves else copy.deepcopy(first)
                    continue
                filled = torch.zeros_like(flat, memory_format=torch.contiguous_format)
                for row, entry in zip(rows, entries, strict=True):
                    if key in entry:  # else it never had a gradient
                        row.of(filled).copy_(_row_of(entry[key], row.start, row.count))
                if key == _MAIN:
                    flat.copy_(filled)
                    self._must_take_weights = False
                else:
                    self.inner.state[flat][key] = filled
        for name, value in state_dict.get("engine", {}).items():
            target = self.engine if name in _COUNTS else scale_of(self.engine.optimizer)
            if target is not None:
                setattr(target, name, value)

    def _take_weights(self) -> None:
        """Continue from the weights that the model has, not from those after the last step."""
        self._must_take_weights = False
        for flat, rows in self._layout:
            for row in rows:
                tensor = getattr(row.parameter, "ds_tensor", row.parameter).detach()
                start = 0 if hasattr(row.parameter, "ds_tensor") else row.start
                row.of(flat.detach()).copy_(tensor.reshape(-1)[start : start + row.count])

    def _numbers(self) -> dict[int, int]:
        every = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        return {id(parameter): number for number, parameter in enumerate(every)}

    def _used(self) -> list[dict[str, Any]]:
        """The groups that have parameters: the engine knows only these."""
        return [group for group in self.param_groups if group["params"]]


class _Traces:
    """What DeepSpeed leaves on a model: hooks, attributes of parameters, memory shared by parameters, their dtype."""

    def __init__(self, model: nn.Module) -> None:
        stores = map(forward_hook_stores, model.modules())
        self._hooks: list[Any] = [(hooks, hooks.copy()) for hooks in itertools.chain.from_iterable(stores)]
        self._parameters = [(each, each.dtype, set(vars(each))) for each in model.parameters()]

    def remove(self) -> None:
        for hooks, before in self._hooks:
            hooks.clear()
            hooks.update(before)
        for parameter, dtype, names in self._parameters:
            if is_in_pieces(parameter):
                continue
            for name in set(vars(parameter)) - names:
                delattr(parameter, name)
            parameter.data = parameter.data.to(dtype, copy=True)
            parameter.grad = None


class _End:
    """Ends an engine. A copy of the model that has it, such as an average, is in no engine."""

    def __init__(self, engine: Any, traces: _Traces) -> None:
        self._engine, self._traces = engine, traces

    def __call__(self) -> None:
        self._engine.destroy()
        self._traces.remove()

    def __reduce__(self) -> Any:
        return bool, ()


def _share_buffers(model: nn.Module, *_: Any) -> None:
    """Give all ranks the buffers of the first one, such as the statistics of BatchNorm, as DDP does."""
    if torch.is_grad_enabled() and model.training:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def _in_dtype_of_weights(model: nn.Module, arguments: Any, named: Any) -> Any:
    """The arguments of a forward pass, with floating-point tensors in 16 bits if the weights are."""
    dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
    if dtype == torch.float32:
        return None

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return trees.map_leaves(converted, (arguments, named), parts=trees.plain_parts_of)


def _initialize(model: nn.Module, optimizer: Any, config: dict[str, Any]) -> Any:
    room = require("deepspeed", needed_by="DeepSpeed")
    given = {"model_parameters" if isinstance(optimizer, list) else "optimizer": optimizer}
    try:
        return room.initialize(model=model, config=config, **given)[0]
    except (AssertionError, ValueError) as error:
        raise ConfigurationError(f"DeepSpeed refuses its config, or this model: {error}") from error


def _config_of(context: Any, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The config for the engine: the accelerator's, without what the loop does, and with what the run asks for.

    Raises:
        ConfigurationError: if it asks for something else than the run.
    """
    parts, settings, optimizer = context.parts, context.asked.settings, getattr(optimizer, "given", optimizer)
    config: dict[str, Any] = copy.deepcopy(parts.accelerator.state.deepspeed_plugin.deepspeed_config)
    rows, steps = settings.per_device_batch_size, settings.gradient_accumulation_steps or 1
    clip = settings.gradient_clip_norm or 0.0
    asked = {
        "train_micro_batch_size_per_gpu": ("per_device_batch_size", rows),
        "gradient_accumulation_steps": ("gradient_accumulation_steps", steps),
        "gradient_clipping": ("gradient_clip_norm", clip),
        "train_batch_size": ("rows of an update", rows * steps * parts.ranks.count),
    }
    wrong = [
        f"{name}: {config[name]!r}, but the run has {argument}={value!r}"
        for name, (argument, value) in asked.items()
        if optimizer is not None
        and config.get(name, AUTO) not in (AUTO, value, 0.0)
        and (name, config[name]) != ("gradient_accumulation_steps", 1)
    ]
    wrong += [f"{each}: 'nvme', of which no state is saved" for each in _OFFLOADS if found(config, each) == "nvme"]
    if wrong:
        raise ConfigurationError(f"DeepSpeed's config has {'; '.join(wrong)}. Make them equal, or write {AUTO!r}.")
    zero = config.setdefault("zero_optimization", {})
    has_cut = bool(zero.get("stage")) or _has_16_bits(config)
    of_loop = ["train_batch_size", "scheduler"] + ["optimizer"] * (optimizer is None)
    config = {name: value for name, value in config.items() if name not in of_loop}
    if hasattr(optimizer, "param_groups"):
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False  # the user's own steps, wherever its state is
    elif optimizer is not None:
        given = config.get("optimizer", {}).get("params", {})
        given.update({name: getattr(optimizer, name) for name in ("lr", "weight_decay") if given.get(name) == AUTO})
    config.update(
        train_micro_batch_size_per_gpu=rows or 1,
        gradient_accumulation_steps=1,
        gradient_clipping=clip if has_cut else 0.0,
    )
    return _without_auto(config)


def _refuse(model: nn.Module, optimizer: Any, context: Any) -> None:
    """Reject what DeepSpeed cannot train."""
    optimizer = getattr(optimizer, "given", optimizer)  # after another run
    settings, kind = context.asked.settings, type(optimizer).__name__
    config = context.parts.accelerator.state.deepspeed_plugin.deepspeed_config
    has_16_bits = _has_16_bits(config)
    kinds = (torch.float32, torch.float16, torch.bfloat16) if has_16_bits else (torch.float32,)
    reason = None
    if isinstance(optimizer, Optimizers):
        reason = "there are several optimizers, and an engine steps one: make it of groups"
    elif not isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "params"):
        reason = f"the optimizer is a {kind}: give one of torch's"
    elif hasattr(optimizer, "param_groups") == ("optimizer" in config):
        reason = (
            f"the optimizer is a {kind}, and the config has {'one' if 'optimizer' in config else 'none'}: give one of "
            "torch's here, or accelerate's `DummyOptim` here and an `optimizer` there"
        )
    elif context.parts.mode.has_modes:
        reason = f"{kind} changes the weights between training and evaluation: use another optimizer"
    elif settings.gradient_clip_value is not None or isinstance(settings.gradient_clip_norm, (Mapping, list, tuple)):
        reason = "no rank has whole gradients to clip so: give one number as `gradient_clip_norm`"
    elif config.get("scheduler") and context.trainer.create_scheduler_fn is not None:
        reason = "its config has a `scheduler`, and `create_scheduler_fn` is given: leave one out"
    elif scalars := [name for name, each in model.named_parameters() if not each.ndim]:
        reason = f"the parameters {', '.join(scalars)} have no dimension: give them the shape (1,)"
    others = {str(each.dtype) for each in model.parameters()} - {str(dtype) for dtype in kinds}
    if others and reason is None:
        reason = (
            f"weights are {', '.join(sorted(others))}, of which it would train copies in float32: convert them by "
            "`model.float()`, and enable `bf16` or `fp16` in its config for mixed precision"
        )
    if reason is not None:
        raise ConfigurationError(f"DeepSpeed cannot train this: {reason}.")


def _has_16_bits(config: Mapping[str, Any]) -> bool:
    return any(config.get(name, {}).get("enabled") is True for name in ("fp16", "bf16"))


def _twin(optimizer: Any) -> Any:
    """A second optimizer of the same kind and settings for the same parameters, without state."""
    twin = copy.copy(optimizer)
    vars(twin).pop("step", None)  # schedules put one there, which steps the original
    twin.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    twin.state = defaultdict(dict)
    return twin


def _groups_of(parameters: Any) -> list[dict[str, Any]]:
    listed = list(parameters)
    return [dict(each) for each in listed] if isinstance(listed[0], dict) else [{"params": listed}]


def _row_of(value: Any, start: int, count: int) -> torch.Tensor:
    if isinstance(value, Shard):
        return value.part
    row: torch.Tensor = value.reshape(-1)[start : start + count]
    return row


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with DeepSpeed's own values where nobody has filled in another one."""
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if value != AUTO
    }
