"""Nothing that is read from a file can become code: the package has no way to make it so."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "pytorch_accelerated"

PICKLING_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "runpy", "shelve", "_pickle"}
CALLS = {"__import__", "compile", "eval", "exec"}  # by their bare names; `model.eval()` is something else
ATTRIBUTES = {"torch.load", "np.load", "numpy.load", "importlib.import_module", "import_module", "pydoc.locate"}
KEYWORDS = {"allow_pickle", "pickle_module"}
ALLOWED = {
    ("facts/optional.py", "importlib.import_module"),  # of a name that stands in our code, see below
    ("extras/proving/factory.py", "importlib.import_module"),  # the user's script, named on the command line
    # What a process sends to children of its own, in a folder that only its user can enter; and the script it runs.
    ("extras/proving/children.py", "pickle"),
    ("extras/proving/children.py", "runpy"),
}


def dangers(file: Path, source: Path = SOURCE) -> Iterator[str]:
    """What in a file could turn data into code."""
    place = file.relative_to(source).as_posix()
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    safe = [node.func for node in nodes if isinstance(node, ast.Call) and loads_weights_only(node)]
    for node in nodes:
        for name in names_in(node) if node not in safe else ():
            if (place, name) not in ALLOWED:
                yield f"{place}:{getattr(node, 'lineno', '?')} has {name}"


def loads_weights_only(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "torch.load" and "weights_only=True" in map(ast.unparse, call.keywords)


def names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLING_MODULES)
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in modules if name.partition(".")[0] in PICKLING_MODULES or name in ATTRIBUTES)
    elif isinstance(node, ast.Attribute):
        name = ast.unparse(node)
        if name in ATTRIBUTES or name.endswith(("serialization.load", "jit.load", "hub.load")):
            yield name
    # A field of that name, such as the loader for evaluation, calls nothing.
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in CALLS | {"import_module"}:
        yield node.id
    elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
        yield node.arg


def test_nothing_that_is_read_can_become_code() -> None:
    found = [danger for file in sorted(SOURCE.rglob("*.py")) for danger in dangers(file)]
    assert not found, "\n".join(found)


def test_packages_are_required_by_names_that_stand_in_the_code() -> None:
    seen = 0
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "require":
                name = node.args[0]
                start = name.values[0] if isinstance(name, ast.JoinedStr) else name
                assert isinstance(start, ast.Constant), f"{file.name}:{node.lineno} requires {ast.unparse(name)}"
                seen += 1
    assert seen >= 5


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "from _pickle import loads",
        "torch.load(path, weights_only=False)",
        "from torch import load",
        "torch.jit.load(path)",
        "numpy.load(path)",
        "load(path, allow_pickle=True)",
        "eval(text)",
        "run = exec",
        "importlib.import_module(name)",
        "from importlib import import_module",
    ],
)
def test_a_danger_is_found(code: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(code)
    assert list(dangers(tmp_path / "module.py", tmp_path))
