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
from pytorch_accelerated.extras.deepspeed import pieces
from pytorch_accelerated.extras.deepspeed.config import (
    AUTO,
    contradictions,
    fill,
    found,
    in_precision_of,
    make_schedule,
    misfits,
)
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

_AROUND = "_around_deepspeed"  # the attribute of a model that ends the engine around it
# What accelerate writes where nobody says anything.
_DEFAULTS = (("gradient_accumulation_steps", 1), ("gradient_clipping", 0.0))


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
            if has_shards(model) and _AROUND not in vars(model):  # made in `zero.Init`; an engine gathers its parts
                around = _Around(model)
                around.engine = _initialize(model, None, _config_of(context, None))
                vars(model)[_AROUND] = around
            return
        Parallel.register(require("deepspeed", needed_by="DeepSpeed").DeepSpeedEngine)
        if wrong := list(_complaints(model, getattr(optimizer, "given", optimizer), context)):
            raise ConfigurationError(f"DeepSpeed cannot train this: {'; '.join(wrong)}.")
        if before := vars(model).pop(_AROUND, None):
            before.end()
        around = _Around(model)
        self.optimizer = EngineOptimizer(model, optimizer, _config_of(context, optimizer))
        self.model = around.engine = self.optimizer.engine
        accelerator.deepspeed_engine_wrapped = self.optimizer
        model.register_forward_pre_hook(_share_buffers)
        model.register_forward_pre_hook(_convert, with_kwargs=True)
        vars(model)[_AROUND] = around

    def make_schedule(self) -> Any:
        """The schedule of the config, if it has one."""
        config = copy.deepcopy(self._accelerator.state.deepspeed_plugin.deepspeed_config)
        known = {
            "scheduler.params.total_num_steps": (self._context.parts.config.max_num_train_steps, ""),
            "scheduler.params.warmup_max_lr": (self.optimizer.param_groups[0]["lr"], ""),
        }
        fill(config, config, known)
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
                vars(self._bare_model).pop(_AROUND).end()
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
        advice: where its state cannot be loaded.
        is_cut: whether the engine cuts up gradients, or converts them, so that only its step can clip them.
        norm: of the gradient of the last update, the same on all ranks; None if the engine has none.
    """

    def __init__(self, model: nn.Module, given: Any, config: dict[str, Any]) -> None:
        state = None
        if isinstance(given, EngineOptimizer):
            given, state = given.given, given.state_dict()
        self.given: Any = given
        is_own = hasattr(given, "param_groups")
        was, do = ("with an", "add it to") if is_own else ("without an", "remove it from")
        self.advice = f"If it was saved {was} `optimizer` in DeepSpeed's config, {do} this one. "
        groups = (given if is_own else torch.optim.Optimizer(given.params, {})).param_groups
        # DeepSpeed puts its own tensors into the groups that it gets.
        self.engine = _initialize(model, _twin(given) if is_own else [dict(group) for group in groups], config)
        self.inner = self.engine.basic_optimizer
        is_replaced = getattr(self.engine.optimizer, "optimizer", self.inner) is not self.inner
        if is_replaced or (not is_own and len(self.inner.param_groups) != len(groups)):
            kind = type(given).__name__ if is_own else found(config, "optimizer.type")
            raise ConfigurationError(
                f"DeepSpeed has made another optimizer of this {kind}, which has other groups. Use AdamW or SGD"
                f"{', or stage 0' if is_own else ''}."
            )
        if not is_own:
            for group, made in zip(groups, self.inner.param_groups, strict=True):
                group.update({name: value for name, value in made.items() if name not in ("params", "step")})
        super().__init__([{"params": []}], dict(self.inner.defaults))
        self.param_groups = groups
        outer = self.engine.optimizer
        self.is_cut = outer is not self.inner
        self._layout: pieces.Layout = pieces.layout_of(self.engine, [group["params"] for group in self._used()])
        self._rows = {id(row.parameter): row for _, rows in self._layout for row in rows}
        has_all = all(row.count == row.shape.numel() for row in self._rows.values())
        self._is_replica = has_all and torch.distributed.get_rank() > 0
        self._must_take_weights = False
        self.norm: torch.Tensor | None = None
        if state is not None:
            for entry in state["state"].values():
                entry.pop(pieces.MAIN, None)  # the model's may have been changed meanwhile
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
        self.norm = pieces.norm_of(self.engine, scale) if self.engine.was_step_applied() else torch.tensor(torch.inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the step of the engine does it."""

    def piece_of(self, parameter: Any) -> pieces.Piece | None:
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
                entries[pieces.MAIN] = flat.detach()
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
        scale = pieces.scale_of(self.engine.optimizer)
        counts = {name: getattr(self.engine, name) for name in pieces.COUNTS}
        scales = {name: getattr(scale, name) for name in pieces.SCALE if hasattr(scale, name)}
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
                        row.of(filled).copy_(row.part_of(entry[key]))
                if key == pieces.MAIN:
                    flat.copy_(filled)
                    self._must_take_weights = False
                else:
                    self.inner.state[flat][key] = filled
        for name, value in state_dict.get("engine", {}).items():
            target = self.engine if name in pieces.COUNTS else pieces.scale_of(self.engine.optimizer)
            if target is not None:
                setattr(target, name, value)

    def _take_weights(self) -> None:
        """Continue from the weights that the model has, not from those after the last step."""
        self._must_take_weights = False
        for flat, rows in self._layout:
            for row in rows:
                held = pieces.piece_of(row.parameter) if is_in_pieces(row.parameter) else row.parameter.detach()
                row.of(flat.detach()).copy_(row.part_of(held))

    def _numbers(self) -> dict[int, int]:
        every = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        return {id(parameter): number for number, parameter in enumerate(every)}

    def _used(self) -> list[dict[str, Any]]:
        """The groups that have parameters: the engine knows only these."""
        return [group for group in self.param_groups if group["params"]]


class _Around:
    """Ends an engine, and removes what it leaves on a model: hooks, attributes of parameters, shared memory, dtypes.

    A copy of the model that has it, such as an average, is in no engine.

    Attributes:
        engine: of DeepSpeed, once it is made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.engine: Any = None
        stores = map(forward_hook_stores, model.modules())
        self._hooks: list[Any] = [(hooks, hooks.copy()) for hooks in itertools.chain.from_iterable(stores)]
        self._parameters = [(each, each.dtype, set(vars(each))) for each in model.parameters()]

    def end(self) -> None:
        self.engine.destroy()
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

    def __reduce__(self) -> Any:
        return bool, ()


def _share_buffers(model: nn.Module, *_: Any) -> None:
    """Give all ranks the buffers of the first one, such as the statistics of BatchNorm, as DDP does."""
    if torch.is_grad_enabled() and model.training:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def _convert(model: nn.Module, arguments: Any, named: Any) -> Any:
    """The arguments of a forward pass, with floating-point tensors in 16 bits if the weights are."""
    return in_precision_of(model, (arguments, named), trees.plain_parts_of)


def _initialize(model: nn.Module, optimizer: Any, config: dict[str, Any]) -> Any:
    module = require("deepspeed", needed_by="DeepSpeed")
    given = {"model_parameters" if isinstance(optimizer, list) else "optimizer": optimizer}
    try:
        return module.initialize(model=model, config=config, **given)[0]
    except (AssertionError, TypeError, ValueError, module.DeepSpeedConfigError) as error:
        raise ConfigurationError(f"DeepSpeed refuses its config, or this model: {error}") from error


def _config_of(context: Any, optimizer: Any) -> dict[str, Any]:
    """The config for the engine: the accelerator's, without what the loop does, and with what the run asks for."""
    parts, settings, optimizer = context.parts, context.asked.settings, getattr(optimizer, "given", optimizer)
    config: dict[str, Any] = copy.deepcopy(parts.accelerator.state.deepspeed_plugin.deepspeed_config)
    has_cut = bool(found(config, "zero_optimization.stage")) or _has_16_bits(config)
    of_loop = ["train_batch_size", "scheduler"] + ["optimizer"] * (optimizer is None)
    config = {name: value for name, value in config.items() if name not in of_loop}
    if hasattr(optimizer, "param_groups"):
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False  # the user's own steps, wherever its state is
    elif optimizer is not None:
        params = {f"optimizer.params.{name}": (getattr(optimizer, name), "") for name in ("lr", "weight_decay")}
        fill(config, config, params)
    config.update(
        train_micro_batch_size_per_gpu=settings.per_device_batch_size or 1,
        gradient_accumulation_steps=1,
        gradient_clipping=(settings.gradient_clip_norm or 0.0) if has_cut else 0.0,
    )
    return _without_auto(config)


def _complaints(model: nn.Module, optimizer: Any, context: Any) -> Iterator[str]:
    """What DeepSpeed cannot train, and what its config and the run say differently."""
    parts, settings, kind = context.parts, context.asked.settings, type(optimizer).__name__
    config: dict[str, Any] = parts.accelerator.state.deepspeed_plugin.deepspeed_config
    if isinstance(optimizer, Optimizers):
        yield "there are several optimizers, and an engine steps one: make it of groups"
    elif hasattr(optimizer, "param_groups") == ("optimizer" in config):
        yield (
            f"the optimizer is a {kind}, and the config has {'one' if 'optimizer' in config else 'none'}: give one of "
            "torch's here, or accelerate's `DummyOptim` here and an `optimizer` there"
        )
    if parts.mode.has_modes:
        yield f"{kind} changes the weights between training and evaluation: use another optimizer"
    if settings.gradient_clip_value is not None or isinstance(settings.gradient_clip_norm, (Mapping, list, tuple)):
        yield "no rank has whole gradients to clip so: give one number as `gradient_clip_norm`"
    if config.get("scheduler") and context.trainer.create_scheduler_fn is not None:
        yield "its config has a `scheduler`, and `create_scheduler_fn` is given: leave one out"
    if scalars := [name for name, each in model.named_parameters() if not each.ndim]:
        yield f"the parameters {', '.join(scalars)} have no dimension: give them the shape (1,)"
    fine = (torch.float32, torch.float16, torch.bfloat16) if _has_16_bits(config) else (torch.float32,)
    if others := sorted({str(each.dtype) for each in model.parameters() if each.dtype not in fine}):
        yield (
            f"weights are {', '.join(others)}, of which it would train copies in float32: convert them by "
            "`model.float()`, and enable `bf16` or `fp16` in its config for mixed precision"
        )
    yield from (f"its config has {each}" for each in misfits(config))
    rows, steps = settings.per_device_batch_size, settings.gradient_accumulation_steps or 1
    asked = {
        "train_micro_batch_size_per_gpu": (rows, "`train(per_device_batch_size=...)`"),
        "gradient_accumulation_steps": (steps, "`train(gradient_accumulation_steps=...)`"),
        "gradient_clipping": (settings.gradient_clip_norm or 0.0, "`train(gradient_clip_norm=...)`"),
        "train_batch_size": (rows * steps * parts.ranks.count, "the number of rows of an update"),
    }
    given = {each: value for each, value in config.items() if (each, value) not in _DEFAULTS}
    advice = f"give the same in both places, or write {AUTO!r} in the config"
    yield from contradictions(given, asked, whose="its config", advice=advice)


def _has_16_bits(config: Mapping[str, Any]) -> bool:
    return any(config.get(name, {}).get("enabled") is True for name in ("fp16", "bf16"))


def _twin(optimizer: Any) -> Any:
    """A second optimizer of the same kind and settings for the same parameters, without state."""
    twin = copy.copy(optimizer)
    vars(twin).pop("step", None)  # schedules put one there, which steps the original
    twin.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    twin.state = defaultdict(dict)
    return twin


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with DeepSpeed's own values where nobody has filled in another one."""
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if value != AUTO
    }
