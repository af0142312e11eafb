"""Imports of the package point one way: a room imports from the lines above it in the table below, and from itself.

Only what the code says is read here; nothing is imported.
"""

import ast
import graphlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "pytorch_accelerated"
SOURCE = Path(__file__).parents[1] / "src"

# Rooms are folders and files of the package. Those of one line do not know each other.
ROOMS = (
    ("errors", "run_config"),
    ("facts",),
    ("ranks",),
    ("finetuning", "record"),
    ("data",),
    ("schedulers", "states"),
    ("prediction",),
    ("loop",),
    ("callbacks",),
    ("trainer",),
    ("huggingface",),
    ("extras",),
    ("__main__",),
)
# For users: they collect names that are defined elsewhere. Every `__init__` is one too.
FACADES = {"looking", "recipes", "tracking", "utils"}
ACCELERATE_DOORS = {
    "ranks.compat.accelerate",
    "ranks.launching",
    "ranks.accelerators",
    "extras.trackers",
    "trainer",
}


# What `extras` stands on: names that users can import. The `__init__` of a room lists them; some modules are public
# as a whole.
PUBLIC = {
    *("", "callbacks", "data", "errors", "facts", "finetuning", "huggingface", "loop", "prediction", "ranks", "record"),
    *("run_config", "schedulers", "states", "tracking", "trainer", "utils"),
    *("facts.trees", "record.text", "states.disk", "states.layout", "states.publish", "states.verify"),
    *("extras.looking.rehearsal", "extras.report.reading", "huggingface.trainer_utils"),
}


@dataclass(frozen=True)
class Module:
    """A source file: its name below the package ("" for the package itself) and the absolute names it imports.

    `imports_at_once` are those outside of functions.
    """

    name: str
    is_facade: bool
    imports: frozenset[str]
    imports_at_once: frozenset[str]


def test_imports_of_the_package_follow_the_rules() -> None:
    complaints = find_complaints(read_modules(SOURCE))
    assert not complaints, "\n".join(complaints)


def read_modules(source: Path) -> list[Module]:
    """Read all modules of the package in the folder `source`."""
    files = {dotted_name(file.relative_to(source)): file for file in sorted((source / PACKAGE).rglob("*.py"))}
    trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in files.items()}
    return [
        Module(
            name.removeprefix(PACKAGE).removeprefix("."),
            is_facade=file.name == "__init__.py" or name.removeprefix(f"{PACKAGE}.") in FACADES,
            imports=frozenset(imports(trees[name], file.relative_to(source), files)),
            imports_at_once=frozenset(imports(trees[name], file.relative_to(source), files, in_functions=False)),
        )
        for name, file in files.items()
    ]


def dotted_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(node: ast.AST, path: Path, names: Collection[str], *, in_functions: bool = True) -> Iterator[str]:
    """The modules that the code below `node` imports, but not under ``if TYPE_CHECKING``.

    For ``from a import b``, that is ``a.b`` if it is a module, else ``a``.
    """
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        folder = path.parent.parts
        parents = folder[: len(folder) - node.level + 1] if node.level else ()
        base = ".".join([*parents, *([node.module] if node.module else [])])
        yield from (f"{base}.{each.name}" if f"{base}.{each.name}" in names else base for each in node.names)
    runs = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        runs = iter(node.orelse)
    for child in runs:
        if in_functions or not isinstance(child, ast.FunctionDef):
            yield from imports(child, path, names, in_functions=in_functions)


def find_complaints(modules: list[Module]) -> list[str]:
    """Every broken rule, as a sentence."""
    by_name = {module.name: module for module in modules}
    own = {module.name: own_names(module.imports) for module in modules}
    complaints = []
    for module in modules:
        rank = None if module.is_facade else rank_of(module.name)
        if rank is None and not module.is_facade:
            complaints.append(f"{module.name} is in no room: add it to the table ROOMS.")
        if module.name not in ACCELERATE_DOORS and any(name.split(".")[0] == "accelerate" for name in module.imports):
            complaints.append(f"{module.name} imports accelerate: go through one of ACCELERATE_DOORS.")
        for name in sorted(own_names(module.imports_at_once)):
            if is_extra(name) and not may_name_extras(module):
                complaints.append(f"{module.name} imports {name}, which can be taken away: do so where it is used.")
        for name in sorted(own[module.name]):
            if is_extra(module.name):
                if name not in PUBLIC and part_of(name) not in (name, part_of(module.name)):
                    complaints.append(f"{module.name} can be taken away, but imports {name}, which is not public.")
            elif module.is_facade and is_extra(name):
                continue  # a door
            elif by_name[name].is_facade and not (module.is_facade and name.startswith(f"{module.name}.")):  # its part
                complaints.append(f"{module.name} imports a name through {name or PACKAGE}, which is for users.")
            elif (
                rank is not None
                and room_of(name) not in ("extras", room_of(module.name))
                and (rank_of(name) or 0) >= rank
            ):
                complaints.append(f"{module.name} imports {name}, which does not stand above it in the table.")
        if not is_extra(module.name):  # a tool that is imported when it is called closes no circle
            late = own[module.name] - own_names(module.imports_at_once)
            own[module.name] -= {name for name in late if is_extra(name)}
    try:
        graphlib.TopologicalSorter(own).prepare()
    except graphlib.CycleError as error:
        complaints.append(f"these import each other in a circle: {' <- '.join(error.args[1])}.")
    return complaints


def is_extra(name: str) -> bool:
    return room_of(name) == "extras"


def may_name_extras(module: Module) -> bool:
    return module.is_facade or room_of(module.name) in ("extras", "__main__") or module.name == "huggingface.replaying"


def part_of(name: str) -> str:
    """The room; in `extras`, the file or folder that can be taken away alone."""
    return ".".join(name.split(".")[: 2 if room_of(name) == "extras" else 1])


def own_names(names: Collection[str]) -> set[str]:
    of_package = (name for name in names if name.split(".")[0] == PACKAGE)
    return {name.removeprefix(PACKAGE).removeprefix(".") for name in of_package}


def room_of(name: str) -> str:
    return name.partition(".")[0]


def rank_of(name: str) -> int | None:
    return next((rank for rank, rooms in enumerate(ROOMS) if room_of(name) in rooms), None)


def test_the_trainer_has_few_private_names() -> None:
    """Each is one that a subclass of a user can't have."""
    files = [SOURCE / PACKAGE / file for file in ("trainer.py", "loop/hooks.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    named = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    named |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
    assert "_run_training" in named
    assert len({name for name in named if re.match("_(?!_|repr_html_)", name)}) <= 32


@pytest.mark.parametrize(
    ("file", "code", "complaint"),
    [
        ("run_config.py", "def late():\n    from .trainer import Trainer", "trainer, which does not stand above"),
        ("run_config.py", "from pytorch_accelerated.data.order import E", "in a circle"),
        ("errors.py", "from pytorch_accelerated.run_config import E", "run_config, which does not stand above"),
        ("trainer.py", "from pytorch_accelerated import Trainer", "through pytorch_accelerated, which is for users"),
        ("loop/callback.py", "import accelerate.utils", "imports accelerate"),
        ("telemetry.py", "", "telemetry is in no room: add it to the table"),
        ("extras/report/callback.py", "from pytorch_accelerated.data.order import E", "which is not public"),
        ("trainer.py", "from pytorch_accelerated.extras.report import page", "which can be taken away"),
        ("trainer.py", "def show():\n    from pytorch_accelerated.extras.report import page", None),
        ("loop/callback.py", "def show():\n    from pytorch_accelerated.extras.report import tool", None),
        ("loop/callback.py", "from pytorch_accelerated.extras.report import tool", "in a circle"),
        ("extras/report/callback.py", "from pytorch_accelerated.callbacks import Event", None),
        ("loop/callback.py", "if TYPE_CHECKING:\n    from pytorch_accelerated.trainer import Trainer", None),
        ("callbacks/__init__.py", "from pytorch_accelerated.loop.callback import Event", None),
    ],
)
def test_a_broken_rule_is_found(file: str, code: str, complaint: str | None, tmp_path: Path) -> None:
    modules = ["__init__", "run_config", "utils", "trainer", "data/__init__", "data/order", "callbacks/__init__"]
    modules += ["extras/__init__", "extras/report/__init__", "extras/report/page", "extras/report/tool"]
    written = {f"{name}.py": "" for name in [*modules, "loop/callback"]}
    written["extras/report/tool.py"] = "from pytorch_accelerated.trainer import Trainer"
    written["trainer.py"] = "from pytorch_accelerated.loop.callback import TrainerCallback"
    written |= {
        "data/order.py": "from pytorch_accelerated.run_config import mixed_seed",
        "errors.py": "",
        file: code,
    }
    for name, text in written.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = find_complaints(read_modules(tmp_path))
    assert complaint in "\n".join(found) if complaint else found == []
