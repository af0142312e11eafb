"""Private members of other libraries are used in `compat` only.

The test reads the source, which has no types, so it goes by names. A name with one underscore in front belongs to
another library unless the package defines that name somewhere. Names that objects of torch or accelerate have belong to
another library even if the package defines them, too, except on `self` and `cls`. The test cannot see:

- private members of other objects that have the name of one of ours;
- names that are made while the program runs, keys of state dicts, and names of private modules in strings.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader

SOURCE = Path(__file__).parents[2] / "src" / "pytorch_accelerated"
# Documented by Python, whatever their underscores.
PUBLIC = {"_repr_png_", "_asdict", "_fields", "_getframe", "_make", "_replace"}
OF_DEEPSPEED = "extras/deepspeed/pieces.py"  # with its own tests
LOOKUPS = {"delattr", "getattr", "hasattr", "setattr"}


@cache
def source_trees() -> dict[str, ast.AST]:
    return {
        file.relative_to(SOURCE).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted(SOURCE.rglob("*.py"))
    }


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != "" and name not in PUBLIC


@cache
def names_of_ours() -> frozenset[str]:
    """What the package defines: functions, classes, variables, and attributes of `self`."""
    names = set()
    for tree in source_trees().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
                names.add(node.attr)
    return frozenset(filter(is_private, names))


@cache
def names_of_theirs() -> frozenset[str]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows: Any = [1]
    loader = DataLoader(rows)
    things = [
        torch,
        torch.distributed,
        model,
        model.weight,
        optimizer,
        torch.optim.lr_scheduler.ConstantLR(optimizer),
        torch.amp.GradScaler("cpu"),
        loader,
        iter(loader),
        AcceleratorState,
        accelerate.PartialState,
        accelerate.Accelerator(cpu=True),
    ]
    return frozenset(name for thing in things for name in dir(thing) if is_private(name))


def is_own(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every use of a private member of another library, as far as it can be seen."""
    for node in ast.walk(tree):
        owner, name = None, ""
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in LOOKUPS and len(node.args) > 1:
            if isinstance(node.args[1], ast.Constant):
                owner, name = node.args[0], str(node.args[1].value)
        elif isinstance(node, ast.Import):
            yield from (
                (node.lineno, alias.name) for alias in node.names if any(map(is_private, alias.name.split(".")))
            )
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("pytorch_accelerated"):
            if any(map(is_private, (node.module or "").split("."))):
                yield node.lineno, node.module or ""
            else:
                yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        is_theirs = name not in names_of_ours() or (name in names_of_theirs() and not is_own(owner))
        if is_private(name) and is_theirs:
            yield getattr(node, "lineno", 0), name


def test_private_members_of_other_libraries_are_used_in_compat_only() -> None:
    found = [
        f"{file}:{line} uses {name}"
        for file, tree in source_trees().items()
        if not file.startswith("ranks/compat/") and file != OF_DEEPSPEED
        for line, name in uses(tree)
    ]
    assert not found, "\n".join([*found, "Put what you need into a function of `compat`, with a test."])


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("torch._foreach_add_(a, b)", "_foreach_add_"),
        ("getattr(model, '_orig_mod', model)", "_orig_mod"),
        ("from torch.nn.modules.batchnorm import _BatchNorm", "_BatchNorm"),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree"),
        ("import torch._dynamo", "torch._dynamo"),
        ("self._foreach_add_", "_foreach_add_"),
        ("del queue._wakeup_it", "_wakeup_it"),
    ],
)
def test_uses_are_found(code: str, name: str) -> None:
    assert [found for _, found in uses(ast.parse(code))] == [name]
