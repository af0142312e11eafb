"""Every public name has a docstring, is in the reference, and is named on a page that readers come to otherwise."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated import Trainer
from tests.support.processes import REPOSITORY

# The modules that users import from. Deeper ones are for reading, not for importing.
MODULES = [
    "pytorch_accelerated",
    "pytorch_accelerated.callbacks",
    "pytorch_accelerated.errors",
    "pytorch_accelerated.finetuning",
    "pytorch_accelerated.huggingface",
    "pytorch_accelerated.looking",
    "pytorch_accelerated.prediction",
    "pytorch_accelerated.run_config",
    "pytorch_accelerated.schedulers",
    "pytorch_accelerated.tracking",
    "pytorch_accelerated.trainer",
    "pytorch_accelerated.utils",
]
# Helpers of `TrainerRunConfig` beside it.
NOT_PUBLIC = {"describe_run", "plain_value"}
DOCS = REPOSITORY / "docs"


def public_names(module: str) -> dict[str, Any]:
    """The classes and functions of a module that users import from it."""
    found = importlib.import_module(module)
    own = [name for name, value in vars(found).items() if getattr(value, "__module__", None) == module]
    names = [name for name in getattr(found, "__all__", own) if not name.startswith("_") and name not in NOT_PUBLIC]
    values = {name: getattr(found, name) for name in names}
    return {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)}


def words_of(pages: list[Path]) -> set[str]:
    return {word for page in pages for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))}


def pages_but_the_reference() -> list[Path]:
    found = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb"), REPOSITORY / "README.md"]
    return [page for page in found if not {"_build", "reference", "zh"} & set(page.relative_to(REPOSITORY).parts)]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    missing = []
    for name, value in public_names(module).items():
        methods = [f"{name}.{key}" for key, member in vars(value).items() if lacks_docstring(value, key, member)]
        missing += [*([] if inspect.getdoc(value) else [name]), *(methods if inspect.isclass(value) else [])]
    assert not missing


def lacks_docstring(owner: Any, key: str, member: Any) -> bool:
    return not key.startswith("_") and inspect.isfunction(member) and not inspect.getdoc(getattr(owner, key))


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_named_outside_the_reference(module: str) -> None:
    unreached = set(public_names(module)) - words_of(pages_but_the_reference())
    assert not unreached, "name these where a reader needs them, for example on a page of docs/how_to"


def test_every_public_method_of_the_trainer_is_named_outside_the_reference() -> None:
    methods = {name for name in dir(Trainer) if not name.startswith("_") and callable(getattr(Trainer, name))}
    assert not methods - words_of(pages_but_the_reference())
