"""What a run depends on besides what training states save: attributes, generators, variables of the user's objects."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import itertools
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytorch_accelerated.extras.proving.trace import GENERATORS, PLAIN, UpdateTrace, digest, state_of_generator
from pytorch_accelerated.ranks import Kept, Optimizers, held_parts, is_persistent

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

_CALLS = {functools.partial: ("func", "args", "keywords"), types.MethodType: ("__self__", "__func__")}
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# Those that can be copied.
_ITERATORS: tuple[type, ...] = (itertools.count, itertools.cycle, type(iter([])), type(iter(())), type(iter(range(0))))
_LIBRARIES = {"torch", "numpy", "builtins", "collections", "functools", "random", "accelerate", "pytorch_accelerated"}
_FOREIGN = ("pytorch_accelerated.", "torch.distributed.")  # whose objects have shards, or are in states
# What the trainer or torch itself keeps under these names does not decide what an update computes.
_OF_TRAINER = {"run_context", "loss_func", "callbacks", "create_scheduler_fn", "collate_fn", "train_dataset"}
_OF_TRAINER |= {"eval_dataset", "_callbacks", "_precision_at_start", "_batch_samples", "_counters"}
_OF_TRAINER |= {"_pad_uneven_eval_batches"}
_OF_MODULES = set(vars(nn.Module()))
# Where torch keeps hooks, and what they are.
_HOOKS = dict.fromkeys(("_forward_pre_hooks", "_forward_hooks"), "forward")
_HOOKS |= dict.fromkeys(("_backward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks"), "gradient")
_HOOKS |= dict.fromkeys(("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"), "step")
# Which of them it is decides, not what it keeps.
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)
_NAMED = (*_FUNCTIONS, nn.Module)
_MAX_DEPTH, _MAX_PLACES, _MAX_ITEMS, _MAX_NUMBERS = 8, 2000, 256, 4096
_MOST_NAMED, _LONGEST_TEXT, _ABSENT = 3, 60, "<not there>"

# Whose attributes decide about the rows of an update, and what to do about one that is lost.
BY_DATA = ("dataset", "sampler", "batch_sampler", "collate function")
_STRUCTURE = "the list of the model's modules"
_SEEDED = "draw from torch, numpy or random instead, which are seeded for each batch"
_REMEDIES = {
    "dataset": "make the row a function of its index, or draw from torch, numpy or random",
    "sampler": "make the order a function of the epoch, in `set_epoch`",
    "callback": "give the callback `state_dict` and `load_state_dict` with it",
    "model": "register it as a buffer",
    "hook": "keep it in a buffer of the model, or in a callback with `state_dict` and `load_state_dict`",
    "loss function": "make the loss function a module, and this a buffer of it",
    "trainer": "move it to a callback with `state_dict` and `load_state_dict`",
    "optimizer": "keep it in the optimizer's `state` or `param_groups`, and these in its `state_dict`",
    "scheduler": "compute the rate from the number that the schedule is called with",
    "choice": "choose it by the number of the epoch, whenever one starts",
}


_Part = tuple[str, Any, Callable[[Any], object] | None]  # a place in words, what is there, and what assigns another


class Place(NamedTuple):
    """Something that a run may depend on.

    Attributes:
        role: of the object that has it, such as "dataset".
        root: the object in words, such as "the callback EveryFive".
        text: the place in words, such as "`count` of the callback EveryFive".
        value: what is there.
        put: assigns another value; None for an item of a container.
    """

    role: str
    root: str
    text: str
    value: Any
    put: Callable[[Any], object] | None = None

    @property
    def is_compared(self) -> bool:
        """Whether two runs are compared in this, if only in what is there."""
        is_named = isinstance(self.value, _NAMED) and self.put is not None
        return is_named or isinstance(self.value, _CONTAINERS) or _is_comparable(self.value)

    def decides(self, part: str) -> bool:
        """Whether a part of an update may depend on it: rows on what has to do with data, and others on the rest."""
        return (self.role in BY_DATA) is (part in ("rows", "batch"))


class Outside:
    """Finds what the user's objects of a run keep, to compare two runs, and to give it back.

    Args:
        arguments: the arguments of `train`.

    Attributes:
        places: all that have been found, by their texts.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.places: dict[str, Place] = {}
        self._arguments = arguments

    def __call__(self, trainer: Trainer) -> dict[str, str]:
        """Plain values as texts and others as digests, by the texts of their places."""
        found = {place.text: place for place in self._walk(trainer) if place.is_compared}
        self.places |= found
        saved = _saved_modules(trainer)
        shown = {text: _shown(place.value, saved) for text, place in found.items()}
        return shown | _states_of_optimizers(trainer)

    def keep(self, before: Kept, trainer: Trainer) -> None:
        """Keep all of it, and whatever contains it."""
        elsewhere = _saved_modules(trainer)
        for place in self._walk(trainer):
            if place.put is not None:
                before.call(place.put, place.value)
                if isinstance(place.value, _ITERATORS):  # the user's stay where they are
                    place.put(_copied(place.value))
            if isinstance(place.value, nn.Module):
                _keep_module(before, place.value, is_kept_elsewhere=place.value in elsewhere)
                elsewhere.update(place.value.modules())
            elif not isinstance(place.value, type):
                before.object(place.value)
                _keep_contents(before, place.value)
        for _, part in _owners_of_hooks(trainer):  # a callback may add hooks in each rehearsal
            stores = [getattr(part, name, None) for name in _HOOKS]
            stores += [vars(part)] if isinstance(part, nn.Parameter) else []
            for store in stores:
                before.contents(store) if isinstance(store, dict) else None

    def differing(self, part: str, one: UpdateTrace, other: UpdateTrace, ignored: Collection[str]) -> list[str]:
        """The texts of places that differ between two runs before an update, where a `part` then differs too.

        Args:
            part: one of `trace.PARTS`.
            one: the update in the uninterrupted run.
            other: the same in the other run.
            ignored: texts of places that differ anyway.
        """
        first, second = one.outside, other.outside
        texts = dict.fromkeys([*first, *second])
        differing = [each for each in texts if first.get(each) != second.get(each) and each not in ignored]
        differing = [each for each in differing if each.partition("[")[0] not in differing or "[" not in each]
        if _STRUCTURE in differing:  # others differ with it
            return [_STRUCTURE]
        return [each for each in differing if self.place(each).decides(part)] or differing

    def sentence(self, text: str, one: UpdateTrace, other: UpdateTrace, when: str, given: str = "") -> str:
        """What to say about a place that differs.

        Args:
            text: the place.
            one: the update in the uninterrupted run.
            other: the same in the other run.
            when: completes "was 4 in the uninterrupted run and 0 ...".
            given: what to do about it; default: by what it is.
        """
        shown = [each.outside.get(text, _ABSENT) for each in (one, other)]
        place, values = self.place(text), [each.partition(" <")[0] for each in shown]
        # Somebody may have chosen between multiple functions, and none of them has changed.
        role = "choice" if isinstance(place.value, _FUNCTIONS) else place.role.removeprefix("evaluation ")
        remedy = given or _REMEDIES.get(role, "save it, or do without it")
        if isinstance(place.value, GENERATORS):
            remedy = _SEEDED if role in BY_DATA else f"draw from torch, numpy or random, or {remedy}"
            return f"{text} is a generator of its own, which no state saves: {remedy}"
        if "non-persistent" in text:
            remedy = given or "register it with `persistent=True`"
        if values[0] == values[1] or any(each.startswith("<") for each in values):
            return f"{text} was another one {when}: {remedy}"
        return f"{text} was {values[0]} in the uninterrupted run and {values[1]} {when}: {remedy}"

    def place(self, text: str) -> Place:
        """What a text is about."""
        return self.places.get(text, Place("optimizer", "", text, None))

    def _walk(self, trainer: Trainer) -> Iterator[Place]:
        """Every place once."""
        roots = ((role, f"the {role} {_name_of(root)}", root) for role, root in self._roots(trainer))
        found: dict[int, Any] = {}
        for role, text, root in itertools.chain(hooks_of(trainer), roots):
            found.setdefault(id(root), Place(role, text, text, root))
        seen: set[Any] = {id(trainer.run_context), *found}  # what is a root is called by its own name only
        places = (_within(place, seen) for place in found.values() if place.value is not None)
        counts: dict[str, int] = {}
        for place in itertools.islice(itertools.chain(_choices(trainer), *places), _MAX_PLACES):
            counts[place.text] = counts.get(place.text, 0) + place.is_compared
            yield place._replace(text=f"{place.text} ({counts[place.text]})") if counts[place.text] > 1 else place

    def _roots(self, trainer: Trainer) -> Iterator[tuple[str, Any]]:
        arguments = self._arguments
        yield "trainer", trainer
        loader = arguments.get("train_dataset")
        yield "dataset", getattr(loader, "dataset", loader) if isinstance(loader, DataLoader) else loader
        for name in ("sampler", "batch_sampler", "collate_fn"):
            yield name.replace("collate_fn", "collate function"), getattr(loader, name, None)
        evaluated = arguments.get("eval_dataset")
        for each in evaluated.values() if isinstance(evaluated, Mapping) else [evaluated]:
            yield "evaluation dataset", getattr(each, "dataset", each) if isinstance(each, DataLoader) else each
        yield "collate function", arguments.get("collate_fn")
        for name, value in (arguments.get("train_dataloader_kwargs") or {}).items():
            yield ("collate function" if name == "collate_fn" else "sampler"), value
        for value in (arguments.get("eval_dataloader_kwargs") or {}).values():
            yield "evaluation sampler", value
        yield from (("callback", callback) for callback in trainer.callback_handler)
        loss_func = trainer.loss_func
        yield from (("loss function", each) for each in _modules_of(loss_func) or [loss_func])
        yield from (("optimizer", each) for each in _optimizers_of(trainer))
        yield from (("scheduler", each) for each in (arguments.get("create_scheduler_fn"), trainer.scheduler))
        yield from (("model", module) for module in trainer.get_model().modules())  # there may be many


def _choices(trainer: Trainer) -> Iterator[Place]:
    """What callbacks may change within a run."""
    put: Any = functools.partial(setattr, trainer, "loss_func")
    yield Place("choice", "the trainer", "`loss_func` of the trainer", trainer.loss_func, put)
    parameters = dict(trainer.get_model().named_parameters())

    def freeze(names: list[str]) -> None:
        for name, each in parameters.items():
            each.requires_grad_(name not in names)

    structure = [f"{name}: {type(each).__name__}" for name, each in trainer.get_model().named_modules()]
    yield Place("choice", "the model", _STRUCTURE, structure)
    frozen = [name for name, each in parameters.items() if not each.requires_grad]
    yield Place("choice", "the model", "the list of frozen parameters", frozen, freeze)


def _saved_modules(trainer: Trainer) -> set[nn.Module]:
    """The modules that the trainer trains or holds, which states have."""
    parts = (trainer.get_model(), trainer.loss_func, *held_parts(trainer).values())
    return {module for part in parts for module in _modules_of(part)}


def differing_in(runs: Iterable[tuple[UpdateTrace, UpdateTrace]]) -> set[str]:
    """The texts of all places that differ anywhere between two runs."""
    return {text for one, other in runs for text, _ in one.outside.items() ^ other.outside.items()}


def _within(place: Place, seen: set[Any], depth: int = 0) -> Iterator[Place]:
    """The place and those below it."""
    value = place.value
    is_data = isinstance(value, (torch.Tensor, np.ndarray))
    if depth > _MAX_DEPTH or is_data and np.prod(value.shape) > _MAX_NUMBERS and "buffer of" not in place.text:
        return
    is_foreign = type(value).__module__.startswith(_FOREIGN) and not isinstance(value, nn.Module)
    is_foreign |= isinstance(value, (type, types.FunctionType)) and not _is_users(value)
    is_foreign |= isinstance(value, (types.ModuleType, types.BuiltinFunctionType))
    key: Any = id(value)
    if isinstance(value, PLAIN):  # which is one object for all; but a class is found by itself and through its objects
        put: Any = place.put
        key = (id(put.args[-2]), put.args[-1]) if getattr(put, "func", None) in (setattr, _put_on_class) else None
    is_known = is_foreign or bool(depth) and key is not None and key in seen
    if not is_known or isinstance(value, _NAMED) and place.put is not None:
        yield place
    if is_known:
        return
    seen.add(key)
    if is_data or isinstance(value, (*PLAIN, *GENERATORS)):
        return
    owner = place.root if depth == 0 else f"{_name_of(value)} in {place.root}"
    for text, below, put in _parts(value, owner, place.text):
        yield from _within(Place(place.role, place.root, text, below, put), seen, depth + 1)


def _parts(value: Any, owner: str, place: str) -> Iterator[_Part]:
    """What an object consists of: in words, the value, and what assigns another one."""
    if isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        some = itertools.islice(items, _MAX_ITEMS)
        yield from ((f"{place}[{key!r}]", item, None) for key, item in some if not isinstance(item, PLAIN))
        return
    yield from ((f"{place}.{name}", getattr(value, name), None) for name in _CALLS.get(type(value), ()))
    if isinstance(value, types.FunctionType):
        yield from _variables_of(value, place if " hook " in place else value.__qualname__)
    is_kind = isinstance(value, type)
    own = {} if is_kind else getattr(value, "__dict__", {})
    for name, each in own.items():
        if name not in _left_out(value):
            yield f"`{name}` of {owner}", each, functools.partial(own.__setitem__, name)
    for name in getattr(type(value), "__slots__", ()):
        if hasattr(value, name):
            yield f"`{name}` of {owner}", getattr(value, name), functools.partial(setattr, value, name)
    buffers = dict(value.named_buffers(recurse=False)) if isinstance(value, torch.nn.Module) else {}
    for name, buffer in buffers.items():
        sort = "a buffer" if is_persistent(value, name) else "a non-persistent buffer"
        yield f"`{name}`, {sort} of {owner},", buffer, functools.partial(setattr, value, name)
    if is_kind:
        is_function = issubclass(value, torch.autograd.Function)
        owner = f"the {'autograd function' if is_function else 'class'} {_name_of(value)}"
    kinds = (each for each in (value if is_kind else type(value)).__mro__ if not issubclass(each, enum.Enum))
    for kind in filter(_is_users, kinds):
        for name, static in vars(kind).items():
            each = getattr(static, "__func__", static)
            put = functools.partial(_put_on_class, own, kind, name) if each is static else None
            if isinstance(each, types.FunctionType):
                yield place, each, None
            elif not (name.startswith("__") or name in own) and _may_keep_something(each):
                yield f"`{name}` of {owner}", each, put


def _put_on_class(own: dict[str, Any], kind: type, name: str, value: Any) -> None:
    own.pop(name, None)  # it would hide that of the class
    setattr(kind, name, value)


def _left_out(value: Any) -> set[str]:
    """Attributes that do not decide what an update computes, or are saved."""
    if isinstance(value, torch.optim.Optimizer):
        return _of_every_optimizer()
    return _OF_MODULES if isinstance(value, nn.Module) else _OF_TRAINER if hasattr(value, "run_context") else set()


def hooks_of(trainer: Trainer) -> Iterator[tuple[str, str, Any]]:
    """The user's hooks on the model, its parameters and optimizers: role, what it is in words, and the hook."""
    for owner, part in _owners_of_hooks(trainer):
        for name, kind in _HOOKS.items():
            for hook in (getattr(part, name, None) or {}).values():
                yield "hook", f"the {kind} hook {_name_of(hook)} of the {owner}", hook


def _owners_of_hooks(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """What may have hooks, in words."""
    model = trainer.get_model()
    yield from ((f"module {name or _name_of(each)}", each) for name, each in model.named_modules())
    yield from ((f"optimizer {_name_of(each)}", each) for each in _optimizers_of(trainer))
    yield from ((f"parameter {name}", each) for name, each in model.named_parameters())


def _is_users(value: Any) -> bool:
    """Whether a class or function is not one of a library."""
    return not _is_library(str(value.__module__).partition(".")[0])


@functools.cache
def _is_library(name: str) -> bool:
    file = str(getattr(sys.modules.get(name), "__file__", ""))
    return name in _LIBRARIES or name in sys.stdlib_module_names or "site-packages" in file or "dist-packages" in file


def _modules_of(value: Any) -> list[Any]:
    return list(value.modules()) if isinstance(value, nn.Module) else []


def _variables_of(function: types.FunctionType, owner: str) -> Iterator[_Part]:
    """The variables of enclosing functions and of the module that a function uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        text = f"`{name}`, a variable of {owner},"
        with contextlib.suppress(ValueError):  # it may have no value yet
            yield text, cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
    module = function.__globals__
    script = str(module.get("__name__"))
    if script in ("__main__", "__mp_main__"):  # which a factory imports by its name
        script = getattr(module.get("__spec__"), "name", None) or Path(str(module.get("__file__", script))).stem
    for name in _names_in(function.__code__):
        if name in module and _may_keep_something(module[name]):
            text = f"`{name}`, a variable of the module {script},"
            yield text, module[name], functools.partial(module.__setitem__, name)


def _may_keep_something(value: Any) -> bool:
    """Whether a variable of a module is the user's to change."""
    kind = value if isinstance(value, (type, types.FunctionType)) else type(value)
    is_store = isinstance(value, (*_CONTAINERS, types.SimpleNamespace, threading.local, nn.Module))
    return is_store or _is_comparable(value) or _is_users(kind)


def _copied(value: Any) -> Any:
    """A copy of an iterator that continues by itself; else the value."""
    with contextlib.suppress(TypeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.copy(value)
    return value


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function, and the functions within it, use."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _name_of(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__name__))


def _optimizers_of(trainer: Trainer) -> list[Any]:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return list(optimizer) if isinstance(optimizer, Optimizers) else [optimizer]


def _states_of_optimizers(trainer: Trainer) -> dict[str, str]:
    """Digests of their live states, by name, because `state_dict` may leave something out."""
    found = {}
    for optimizer in _optimizers_of(trainer):
        groups, state = getattr(optimizer, "param_groups", []), getattr(optimizer, "state", {})
        entries = [state[each] for group in groups for each in group["params"] if each in state]
        for name in dict.fromkeys(name for entry in entries for name in entry):
            text = f"`{name}` in the state of the optimizer {_name_of(optimizer)}"
            found[text] = f"<{digest([entry.get(name) for entry in entries])}>"
    return found


def _is_comparable(value: Any) -> bool:
    """Whether a value is small and plain enough to tell whether two runs have the same."""
    if isinstance(value, _CONTAINERS):
        items = itertools.chain(value, value.values() if isinstance(value, dict) else ())
        return len(value) <= _MAX_ITEMS and all(isinstance(item, PLAIN) for item in items)
    if isinstance(value, torch.Tensor):
        return value.is_leaf  # others are computed when they are needed
    return isinstance(value, (*PLAIN, *GENERATORS, *_ITERATORS, np.ndarray, Synchronized))


def _shown(value: Any, saved: Collection[nn.Module] = ()) -> str:
    if isinstance(value, nn.Module) and value not in saved:
        return f"<{digest([type(value).__name__, value.state_dict()])}>"
    if isinstance(value, _NAMED):
        code = getattr(value, "__code__", None)
        return f"{_name_of(value)} <{code and code.co_firstlineno}>"
    if isinstance(value, _CONTAINERS) and not _is_comparable(value):
        some = itertools.islice(itertools.chain(value, value.values() if isinstance(value, dict) else ()), _MAX_ITEMS)
        names = [each if isinstance(each, PLAIN) else _name_of(each) for each in some]
        return f"a {type(value).__name__} of {len(value)} items <{digest(names)}>"
    if isinstance(value, Synchronized):
        return repr(value.value)
    if isinstance(value, _ITERATORS[1:]):
        copied = _copied(value)
        return "" if copied is value else f"<{digest(list(itertools.islice(copied, _MAX_ITEMS)))}>"
    if isinstance(value, (*GENERATORS, torch.Tensor, np.ndarray)):
        return f"<{digest(value)}>"
    text = repr(value).strip("<>")
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}… <{digest(text)}>"


def _keep_contents(before: Kept, value: Any) -> None:
    """Keep what is within a value that may be changed in place."""
    if isinstance(value, torch.Tensor):
        before.tensors([value] if value.is_contiguous() else [])
    elif isinstance(value, np.ndarray):
        before.call(np.copyto, value, value.copy()) if value.flags.writeable else None
    elif isinstance(value, np.random.Generator):
        before.call(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    elif isinstance(value, GENERATORS):
        generator: Any = value
        before.call(getattr(generator, "set_state", None) or generator.setstate, state_of_generator(value))
    elif isinstance(value, Synchronized):  # of `multiprocessing.Value`
        before.call(setattr, value, "value", value.value)
    elif isinstance(value, (list, set, dict, deque)):
        before.contents(value)


def _keep_module(before: Kept, module: nn.Module, *, is_kept_elsewhere: bool) -> None:
    """Keep the plain attributes of a module, but not what wrappers replace; and the tensors of one of the user's."""
    before.contents(vars(module)["_modules"])
    names = vars(module).keys() - _OF_MODULES
    own = {name: vars(module)[name] for name in names}

    def restore() -> None:
        for name in vars(module).keys() - _OF_MODULES - names:
            delattr(module, name)
        vars(module).update(own)

    before.call(restore)
    if not is_kept_elsewhere:
        before.module(module)


@functools.cache
def _of_every_optimizer() -> set[str]:
    """The attributes that torch gives to all optimizers and schedules, which states have or which do not matter."""
    return set(vars(torch.optim.SGD([torch.zeros(1)], 0.1))) | {"step", "_opt_called", "_step_count"}
