"""Imports of the package point one way: down the table below.

Words and facts at the bottom, then machinery, watchers, the loop, and the faces on top. Only what the code says is read
here; nothing is imported.
"""

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "pytorch_accelerated"
SOURCE = Path(__file__).parents[1] / "src"

# The longest name that fits decides. A module may import others of its own rank, as long as there is no circle.
RANKS = {
    # words and ground rules
    "errors": 0,
    "optional": 0,
    "seeding": 0,
    "training.order": 0,
    "trees": 0,
    "compat": 0,
    # facts and pure parts
    "finetuning": 1,
    "models.averaging": 1,
    "models.sharding": 1,
    "models.wrappers": 1,
    "processes": 1,
    "run_config": 1,
    "schedulers": 1,
    "tracking": 2,
    "tracking.figures": 1,
    "tracking.history": 1,
    "tracking.html": 1,
    "tracking.logged": 1,
    "tracking.loss": 1,
    "tracking.names": 1,
    "tracking.plotting": 1,
    "tracking.recording": 1,
    "tracking.step_records": 1,
    "tracking.timing": 1,
    "tracking.values": 1,
    "training.error_notes": 1,
    "training.tracebacks": 0,
    "training.names": 1,
    "training.placeholders": 1,
    "training.run_state": 1,
    "training.settings": 1,
    "training.signals": 1,
    # machinery
    "checkpointing": 2,
    "data": 2,
    "models": 2,
    "prediction": 2,
    "progress": 2,
    "report": 2,
    "training.batches": 2,
    "training.hook_output": 2,
    "training.late_counts": 2,
    # watchers, the loop, faces and tools
    "callbacks": 3,
    "looking": 4,
    "training": 4,
    "steps": 4,
    "trainer": 4,
    "huggingface": 5,
    "__main__": 5,
}
# For users: they collect names that are defined elsewhere. Every `__init__` is one too.
FACADES = {
    "utils",
    "huggingface.trainer_callback",
    "huggingface.trainer_utils",
    "huggingface.training_args",
}
ACCELERATE_DOORS = {
    "compat.accelerate",
    "processes.launching",
    "processes.accelerators",
    "processes.notebooks",
    "tracking.trackers",
    "trainer",
}


@dataclass(frozen=True)
class Module:
    """A source file: its name below the package ("" for the package itself) and the absolute names it imports."""

    name: str
    is_facade: bool
    imports: frozenset[str]

    def __str__(self) -> str:
        return self.name or PACKAGE


def test_imports_of_the_package_follow_the_rules() -> None:
    complaints = find_complaints(read_modules(SOURCE))
    assert not complaints, "\n".join(complaints)


def read_modules(source: Path) -> list[Module]:
    """Read all modules of the package in the folder `source`."""
    files = sorted((source / PACKAGE).rglob("*.py"))
    names = {_dotted_name(file.relative_to(source)) for file in files}
    return [_read_module(file, source, names) for file in files]


def _read_module(file: Path, source: Path, names: set[str]) -> Module:
    relative = file.relative_to(source)
    name = _dotted_name(relative).removeprefix(PACKAGE).removeprefix(".")
    folder = relative.parent.parts
    statements = _statements_that_run(ast.parse(file.read_text(encoding="utf-8")))
    imports = frozenset(target for statement in statements for target in _targets(statement, folder, names))
    return Module(name, is_facade=file.name == "__init__.py" or name in FACADES, imports=imports)


def _dotted_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _statements_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes, those inside functions too, but not what stands under ``if TYPE_CHECKING``."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for otherwise in child.orelse:
                yield from _statements_that_run(otherwise)
        else:
            yield from _statements_that_run(child)


def _targets(statement: ast.AST, folder: tuple[str, ...], names: set[str]) -> Iterator[str]:
    """The modules that a statement imports; for ``from a import b``, that is ``a.b`` if it is a module, else ``a``."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        parents = folder[: len(folder) - statement.level + 1] if statement.level else ()
        base = ".".join([*parents, *([statement.module] if statement.module else [])])
        for alias in statement.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in names else base


def find_complaints(modules: list[Module]) -> list[str]:
    """Every broken rule, as a sentence that names the module and what to do."""
    by_name = {module.name: module for module in modules}
    own_imports = {module.name: _own_imports(module) for module in modules}
    complaints = []
    for module in modules:
        rank = None if module.is_facade else _rank(module.name)
        if rank is None and not module.is_facade:
            complaints.append(f"{module} has no rank: add it to the table RANKS in {Path(__file__).name}.")
        if module.name not in ACCELERATE_DOORS and any(name.split(".")[0] == "accelerate" for name in module.imports):
            complaints.append(f"{module} imports accelerate: go through {' or '.join(sorted(ACCELERATE_DOORS))}.")
        for name in sorted(own_imports[module.name]):
            target = by_name.get(name)
            if target is None:
                complaints.append(f"{module} imports {name}, which does not exist.")
            elif target.is_facade and not (module.is_facade and name.startswith(f"{module.name}.")):  # its own part
                complaints.append(
                    f"{module} imports a name through {target}, which is for users: "
                    "import it from the module that defines it."
                )
            elif rank is not None and (_rank(name) or 0) > rank:
                complaints.append(f"{module} imports {target}, which stands above it in the table.")
    try:
        graphlib.TopologicalSorter(own_imports).prepare()
    except graphlib.CycleError as error:
        complaints.append(f"these import each other in a circle: {' <- '.join(error.args[1])}.")
    return complaints


def _own_imports(module: Module) -> set[str]:
    of_package = (name for name in module.imports if name.split(".")[0] == PACKAGE)
    return {name.removeprefix(PACKAGE).removeprefix(".") for name in of_package}


def _rank(name: str) -> int | None:
    while name and name not in RANKS:
        name = name.rpartition(".")[0]
    return RANKS.get(name)


@pytest.mark.parametrize(
    ("file", "code", "complaint"),
    [
        ("seeding.py", "from pytorch_accelerated.trainer import Trainer", "trainer, which stands above"),
        ("seeding.py", "from pytorch_accelerated import trainer", "trainer, which stands above"),
        ("seeding.py", "import pytorch_accelerated.trainer as loop", "trainer, which stands above"),
        ("seeding.py", "def late():\n    from .trainer import Trainer", "trainer, which stands above"),
        ("data/order.py", "from ..callbacks.base import Event", "callbacks.base, which stands above"),
        ("tracking/loss.py", "from pytorch_accelerated.tracking.trackers import T", "trackers, which stands above"),
        ("seeding.py", "from pytorch_accelerated.errors import E", "in a circle"),
        ("trainer.py", "from pytorch_accelerated.callbacks import Event", "through callbacks, which is for users"),
        ("trainer.py", "from pytorch_accelerated import Trainer", "through pytorch_accelerated, which is for users"),
        ("callbacks/base.py", "from ..utils import helper", "through utils, which is for users"),
        ("callbacks/__init__.py", "from pytorch_accelerated.utils import helper", "through utils, which is for users"),
        ("callbacks/base.py", "import accelerate.utils", "imports accelerate"),
        ("__init__.py", "from accelerate import notebook_launcher", "imports accelerate"),
        ("trainer.py", "from pytorch_accelerated.trainers import Trainer", "trainers, which does not exist"),
        ("telemetry.py", "", "telemetry has no rank: add it to the table"),
    ],
)
def test_a_broken_rule_is_found(file: str, code: str, complaint: str, tmp_path: Path) -> None:
    write_tiny_package(tmp_path)
    (tmp_path / PACKAGE / file).write_text(code)
    assert complaint in "\n".join(find_complaints(read_modules(tmp_path)))


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("callbacks/base.py", "if TYPE_CHECKING:\n    from pytorch_accelerated.trainer import Trainer"),
        ("callbacks/__init__.py", "from pytorch_accelerated.callbacks.base import Event"),
        ("utils.py", "from pytorch_accelerated.trainer import Trainer"),
        ("trainer.py", "import accelerate"),
        ("trainer.py", "from pytorch_accelerated import errors"),
        ("data/order.py", "from torch.utils.data import Dataset"),
    ],
)
def test_allowed_values_bring_no_complaint(file: str, code: str, tmp_path: Path) -> None:
    write_tiny_package(tmp_path)
    (tmp_path / PACKAGE / file).write_text(code)
    assert find_complaints(read_modules(tmp_path)) == []


def write_tiny_package(source: Path) -> None:
    files = {
        "errors.py": "from pytorch_accelerated.seeding import mixed_seed",
        "tracking/trackers.py": "from pytorch_accelerated.errors import E",
    }
    empty = ["__init__.py", "seeding.py", "utils.py", "trainer.py", "data/__init__.py", "data/order.py"]
    empty += ["callbacks/__init__.py", "callbacks/base.py", "tracking/__init__.py", "tracking/loss.py"]
    for name, code in [*files.items(), *((name, "") for name in empty)]:
        path = source / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
