"""Copies what a subclass of `Trainer` overrides into a script, with everything that it uses."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.facts import is_users_class

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

# Parts of the trainer that a script has as well.
_PARTS = ("model", "loss_func", "optimizer", "device")
# The hooks that a script calls, and the parts that ours use.
_HOOKS = {
    "calculate_train_batch_loss": _PARTS[:2],
    "calculate_eval_batch_loss": _PARTS[:2],
    "count_batch_items": (),
    "backward_step": (),
    "optimizer_step": ("optimizer",),
    "train_epoch_start": ("model",),
}
_OF_RUN = ("train_dataset", "eval_dataset", "collate_fn", "create_scheduler_fn")


def refused(what: str, remedy: str) -> ConfigurationError:
    """The error for what a plain script doesn't have."""
    return ConfigurationError(f"The run can't be written as a plain script: {what}. {remedy}")


def is_ours(value: Any) -> bool:
    """Whether something comes from this library."""
    module = getattr(value, "__module__", None) or getattr(value, "__name__", None) or type(value).__module__
    return str(module).partition(".")[0] == "pytorch_accelerated"


def refuse_replaced(trainer: Any) -> None:
    """Refuse methods that are set on a trainer, which its class doesn't show."""
    if own := [name for name in vars(trainer) if callable(getattr(type(trainer), name, None))]:
        names = ", ".join(own)
        raise refused(f"the trainer's {names} was replaced", "Override it in a subclass of the native `Trainer`.")


def is_literal(value: Any) -> bool:
    """Whether `repr` of a value is its source."""
    if type(value) in (tuple, list, dict):
        parts = [*value, *value.values()] if type(value) is dict else value
        return all(map(is_literal, parts))
    return type(value) in (bool, int, str, type(None)) or (type(value) is float and value - value == 0)


class OwnCode:
    """The overridden hooks of a trainer, and what they use, as the source of a script.

    Attributes:
        has: which hooks are overridden, by name.
        ours: which of `Trainer`'s own versions they call by `super()`.
        calls_ours: whether they call any.
        values: the trainer's parts and attributes that they use.
        parameters: those of them that the script's function must get.
        imports: lines.
        source: constants, functions, and classes with the hooks; empty if none is overridden.
        hooks: what makes the object with the hooks.

    Raises:
        ConfigurationError: names the first thing that a script can't have.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._kinds = [kind for kind in type(trainer).__mro__ if is_users_class(kind) and kind is not object]
        self._ours = next(kind for kind in type(trainer).__mro__ if not is_users_class(kind))
        if (self._ours.__module__, self._ours.__name__) != ("pytorch_accelerated.trainer", "Trainer"):
            raise refused(f"the trainer is a {self._ours.__module__}.{self._ours.__name__}", "Use `Trainer`.")
        refuse_replaced(trainer)
        names = {name for kind in self._kinds for name in vars(kind) if hasattr(self._ours, name) and name[:2] != "__"}
        if unknown := sorted(names - _HOOKS.keys() - {"calculate_predict_batch_outputs"}):
            raise refused(f"{type(trainer).__name__} overrides {', '.join(unknown)}", "Leave that out.")
        self.ours, self.imports = SimpleNamespace(**dict.fromkeys(_HOOKS, False)), set[str]()
        self.values: dict[str, Any] = {}
        self.has = SimpleNamespace(**{name: name in names for name in _HOOKS})
        self._methods: dict[type, dict[str, str]] = {kind: {} for kind in reversed(self._kinds)}
        self._globals: dict[str, str] = {}  # functions, classes and constants of the user's module
        for name in _HOOKS:
            if name in names:
                self._copy_method(name)
        self.calls_ours, self.parameters = any(vars(self.ours).values()), list[str]()
        self.source, self.hooks = self._written() if names else ("", "")

    def _written(self) -> tuple[str, str]:
        kind, classes = "Defaults" if self.calls_ours else "SimpleNamespace", []
        for each, methods in self._methods.items():
            if methods:
                doc = [f'    """{line}"""' for line in (each.__doc__ or "").splitlines()[:1]]
                classes.append(f"class {each.__name__}({kind}):\n" + "\n\n".join([*doc, *methods.values()]))
                kind = each.__name__
        # A constant is a line.
        constants = "\n".join(text for text in self._globals.values() if "\n" not in text)
        functions = [text for text in self._globals.values() if "\n" in text]
        sources = {"device": f'torch.device("{self._trainer.device}")'}
        sources |= {name: repr(value) for name, value in self.values.items() if is_literal(value)}
        self.parameters = [name for name in self.values if name not in sources]
        names = sorted(self.values, key=lambda name: (name not in _PARTS, name))
        arguments = ", ".join(f"{name}={sources.get(name, name)}" for name in names)
        return "\n\n\n".join(filter(None, [constants, *functions, *classes])), f"{kind}({arguments})"

    def _copy_method(self, name: str, after: type | None = None) -> None:
        """Copy a method of the first class that has it; of those after one of them, if that calls it by `super()`."""
        kinds = self._kinds[0 if after is None else self._kinds.index(after) + 1 :]
        kind = next((kind for kind in kinds if name in vars(kind)), None)
        if kind is None:
            if name not in _HOOKS:
                raise refused(f"`super().{name}` is called", "A script has no such method.")
            setattr(self.ours, name, True)
            self.values |= {part: getattr(self._trainer, part) for part in _HOOKS[name]}
        elif name not in self._methods[kind]:
            method = vars(kind)[name]
            method = getattr(method, "fget", None) or getattr(method, "__func__", method)
            source, tree = self._copied(method, f"{kind.__name__}.{name}")
            self._methods[kind][name] = textwrap.indent(source, "    ")
            if "num_items_in_batch" in source:
                raise refused(f"{kind.__name__}.{name} returns `num_items_in_batch`", "Override `count_batch_items`.")
            for node in ast.walk(tree):
                if not isinstance(node, ast.Attribute):
                    continue
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    self._use(node.attr, f"{kind.__name__}.{name}")
                elif isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
                    self._copy_method(node.attr, after=kind)

    def _use(self, name: str, user: str) -> None:
        """What a hook reads of the trainer: a part, a method of the user's, or an attribute."""
        trainer = self._trainer
        if any(hasattr(vars(kind).get(name), "__get__") for kind in self._kinds) or name in _HOOKS:
            self._copy_method(name)
        elif name in _OF_RUN or (hasattr(self._ours, name) and name not in (*vars(trainer), *_PARTS)):
            raise refused(f"{user} uses `self.{name}`", f"A script has {', '.join(_PARTS)}, and what you added.")
        elif hasattr(trainer, name):
            self.values[name] = getattr(trainer, name)

    def _copied(self, value: Any, name: str) -> tuple[str, ast.AST]:
        """The source of a function or class, after what it uses: imports, and constants, functions and classes."""
        try:
            source = textwrap.dedent(inspect.getsource(value)).rstrip()
            tree = ast.parse(source).body[0]
        except (OSError, TypeError, SyntaxError) as error:
            raise refused(f"{name} has no source that can be copied", "Define it in a file, with `def`.") from error
        module = inspect.getmodule(value)
        known = {**vars(module), **(inspect.getclosurevars(value).nonlocals if inspect.isfunction(value) else {})}
        hints = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
        in_hints = {id(part) for hint in hints if isinstance(hint, ast.AST) for part in ast.walk(hint)}
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        local = {node.id for node in names if isinstance(node.ctx, ast.Store)} | {"__class__", name}
        local |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        for node in names:
            if node.id not in known or node.id in local:
                continue
            if id(node) not in in_hints:
                self._copy_global(node.id, known[node.id])
            elif hasattr(typing, node.id):
                self.imports.add(f"from typing import {node.id}")
        return source, tree

    def _copy_global(self, name: str, value: Any) -> None:
        if name in self._globals:
            return
        home = inspect.getmodule(value)
        if is_ours(value):
            raise refused(f"the hooks use `{name}` of this library", "Write them without it.")
        if inspect.ismodule(value):
            package, _, last = value.__name__.rpartition(".")
            known_as = f" as {name}" * (last != name)
            self.imports.add(f"from {package} import {last}{known_as}" if package else f"import {last}{known_as}")
        elif is_literal(value):
            self._globals[name] = f"{name} = {value!r}"
        elif not isinstance(value, (type, FunctionType, BuiltinFunctionType)) or home is None:
            raise refused(f"the hooks use `{name}`, a {type(value).__name__}", "Make it an attribute of the trainer.")
        elif any(map(is_ours, vars(home).values())):
            self._globals[name] = ""  # two functions may call each other
            source, _ = self._copied(value, name)
            del self._globals[name]
            self._globals[name] = source
        else:
            self.imports.add(f"from {home.__name__} import {value.__name__}" + f" as {name}" * (value.__name__ != name))
