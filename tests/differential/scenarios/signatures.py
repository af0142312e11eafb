"""Names, members and arguments."""

import importlib
import inspect
from typing import Any

import torch

from pytorch_accelerated.callbacks import TrainerCallback
from tests.differential.scenarios.common import plain

MODULES = ["", "trainer", "callbacks", "tracking", "run_config", "schedulers", "finetuning", "utils"]


def names() -> dict[str, Any]:
    """Which public names each module has, also those that it only imports from another one."""
    return {
        short or "pytorch_accelerated": {name: "there" for name, value in _public(short) if _is_of_the_package(value)}
        for short in MODULES
    }


def members() -> dict[str, Any]:
    """The arguments of each function, and the members of each class with theirs."""
    return {
        name: _described(value)
        for short in MODULES
        for name, value in _public(short)
        if _is_of_the_package(value) and callable(value)
    }


def _public(short: str) -> list[tuple[str, Any]]:
    module = importlib.import_module(f"pytorch_accelerated.{short}".rstrip("."))
    return [(name, value) for name, value in vars(module).items() if not name.startswith("_")]


def _is_of_the_package(value: Any) -> bool:
    if inspect.ismodule(value):
        return False
    return getattr(value, "__module__", "pytorch_accelerated").startswith("pytorch_accelerated")


def _described(value: Any) -> Any:
    if inspect.isclass(value):
        # Events are described once, at the base of all callbacks.
        inherited = [object, Exception, torch.nn.Module]
        if value is not TrainerCallback:
            inherited.append(TrainerCallback)
        members = {
            name: _described(getattr(value, name))
            for name in dir(value)
            if not name.startswith("_") and not any(hasattr(base, name) for base in inherited)
        }
        return {"()": _arguments(value), **members}
    if callable(value):
        return _arguments(value)
    return "there"


def _arguments(function: Any) -> Any:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "no signature"
    return {
        parameter.name: f"{position}, {parameter.kind.description}, {_default(parameter.default)}"
        for position, parameter in enumerate(parameters)
        if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        and parameter.name != "self"
    }


def _default(value: Any) -> str:
    return "required" if value is inspect.Parameter.empty else str(plain(value))
