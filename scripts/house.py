"""Counts how well the code keeps the rules of its layout, and writes a table.

    make house                          # prints the table and writes benchmarks/results/house.md
    python scripts/house.py ROOT        # prints the table of another checkout

Everything is counted in the source, except for what one update executes, which is measured in a run of ten. The limits
are kept by `tests/test_house.py`.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pytorch_accelerated"
PAGE = Path("benchmarks/results/house.md")
# Users annotate their callbacks with it, so this one import for annotations may close a circle.
DECLARED_EDGE = (f"{PACKAGE}.callbacks.base", f"{PACKAGE}.trainer")
# What computes a batch calls one of each.
FORWARD = {"calculate_train_batch_loss", "forward", "_output_of"}
BACKWARD = {"backward_step", "backward"}
# Names that a protocol of Python's world gives to what anybody may call, as it does with two underscores. Nobody uses
# them for anything else, so they are in no subclass's way.
PROTOCOLS = {"_repr_html_"}  # IPython's, for an object that is the last line of a cell


class ClassName(NamedTuple):
    """Where a class is defined."""

    module: str
    name: str


@dataclass(frozen=True)
class Module:
    """A source file."""

    name: str
    path: Path
    tree: ast.Module
    text: str

    @functools.cached_property
    def lines(self) -> int:
        return self.text.count("\n")


class House:
    """The source of a checkout, read once.

    Args:
        root: the folder of the checkout.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "src" / PACKAGE
        self.modules = {module.name: module for module in map(self._read, sorted(self.folder.rglob("*.py")))}
        self.classes = {
            ClassName(module.name, node.name): node
            for module in self.modules.values()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        }

    def _read(self, path: Path) -> Module:
        parts = (PACKAGE, *path.relative_to(self.folder).with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        return Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path, ast.parse(text), text)

    # ------------------------------------------------------------------------------------------------------- classes

    def bases(self, name: ClassName) -> list[ClassName]:
        """The class and those of ours that it inherits from."""
        if name not in self.classes:
            return []
        found = [name]
        for base in self.classes[name].bases:
            while isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                found += self.bases(self._defined_as(base.id, name.module))
        return found

    def _defined_as(self, name: str, module: str) -> ClassName:
        """What `name` means in `module`."""
        for node in ast.walk(self.modules[module].tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return ClassName(node.module or "", alias.name)
        return ClassName(module, name)

    def family(self, name: ClassName) -> list[ClassName]:
        """The class, what it inherits from, and what inherits from it."""
        ours = set(self.bases(name))
        return [each for each in self.classes if each in ours or name in self.bases(each)]

    @functools.cached_property
    def central(self) -> dict[str, ClassName]:
        """`Trainer`, `Run` and `Step`, as far as they are there."""
        places = {"Trainer": "trainer", "Run": "training.run", "Step": "training.step"}
        names = {name: ClassName(f"{PACKAGE}.{module}", name) for name, module in places.items()}
        return {name: place for name, place in names.items() if place in self.classes}

    def private_names(self, family: Iterable[ClassName]) -> set[str]:
        """Methods and attributes that begin with one underscore."""
        found: set[str] = set()
        for name in family:
            for node in ast.walk(self.classes[name]):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.add(node.name)
                elif isinstance(node, ast.Attribute) and _is_self(node.value):
                    found.add(node.attr)
            found |= {target.id for target in _targets(self.classes[name].body) if isinstance(target, ast.Name)}
        return {name for name in found if name.startswith("_") and not name.startswith("__") and name not in PROTOCOLS}

    def private_names_of_trainer(self) -> int:
        return len(self.private_names(self.bases(self.central["Trainer"])))

    def attributes_across_files(self) -> int:
        """Attributes of one object that methods in several files use, for the object that has most of them."""
        return max(len(self._shared_attributes(self.bases(name))) for name in self.central.values())

    def _shared_attributes(self, family: list[ClassName]) -> set[str]:
        assigned: set[str] = set()
        used_in = defaultdict(set)
        for name in family:
            for node in ast.walk(self.classes[name]):
                if isinstance(node, ast.Attribute) and _is_self(node.value):
                    used_in[node.attr].add(name.module)
                    if isinstance(node.ctx, ast.Store):
                        assigned.add(node.attr)
        return {attribute for attribute in assigned if len(used_in[attribute]) > 1}

    def accesses_from_outside(self) -> list[str]:
        """Where private members of `Trainer`, `Run` or `Step` are used by code that is not theirs."""
        families = [self.family(name) for name in self.central.values()]
        private = [(self.private_names(family), {self.classes[each] for each in family}) for family in families]
        return [
            f"{module.path.relative_to(self.root)}:{node.lineno} {ast.unparse(node)}"
            for module in self.modules.values()
            for node, owners in _attributes(module.tree)
            if not _is_self(node.value)
            and not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super")
            and any(node.attr in names and not owners & own for names, own in private)
        ]

    # ----------------------------------------------------------------------------------------------------- functions

    def functions(self) -> Iterator[ast.FunctionDef]:
        for module in self.modules.values():
            yield from (node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef))

    def copies_of_the_computation(self) -> int:
        """Functions that compute a batch: a forward pass, and a backward pass of its loss."""
        return sum(_calls(function, FORWARD) and _calls(function, BACKWARD) for function in self.functions())

    def long_functions(self) -> int:
        return sum((node.end_lineno or 0) - node.lineno >= 60 for node in self.functions())

    # --------------------------------------------------------------------------------------------------------- files

    def lines(self, folder: str = "") -> int:
        return sum(module.lines for module in self.modules.values() if folder in module.path.parts or not folder)

    def longest_file(self) -> int:
        return max(module.lines for module in self.modules.values())

    def loose_files(self) -> int:
        return len(list(self.folder.glob("*.py")))

    def count(self, words: str) -> int:
        """How often `words` are in the source."""
        return sum(module.text.count(words) for module in self.modules.values())

    def test_lines(self) -> int:
        return sum(path.read_text(encoding="utf-8").count("\n") for path in (self.root / "tests").rglob("*.py"))

    def circles(self, *, with_types: bool) -> list[list[str]]:
        """Groups of modules that import each other.

        Args:
            with_types: whether imports for annotations count, except for the declared one.
        """
        graph = {name: self._imports(module, with_types) for name, module in self.modules.items() if name != PACKAGE}
        reaches = {name: _reachable(name, graph) for name in graph}
        found = {frozenset(other for other in reaches[name] if name in reaches[other]) for name in graph}
        return sorted(sorted(circle) for circle in found if len(circle) > 1)

    def _imports(self, module: Module, with_types: bool) -> set[str]:
        found: set[str] = set()
        for node in _statements(module.tree.body, with_types):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name if name in self.modules else node.module for name in names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        return {
            name
            for name in found & self.modules.keys() - {module.name}
            if not module.name.startswith(f"{name}.") and (module.name, name) != DECLARED_EDGE
        }


def _targets(body: list[ast.stmt]) -> Iterator[ast.expr]:
    """What the statements assign to."""
    for node in body:
        if isinstance(node, ast.AnnAssign):
            yield node.target
        elif isinstance(node, ast.Assign):
            yield from node.targets


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _attributes(node: ast.AST, owners: frozenset[ast.AST] = frozenset()) -> Iterator[tuple[ast.Attribute, Any]]:
    """Each attribute access, and the classes that it stands in."""
    if isinstance(node, ast.ClassDef):
        owners |= {node}
    if isinstance(node, ast.Attribute):
        yield node, owners
    for child in ast.iter_child_nodes(node):
        yield from _attributes(child, owners)


def _calls(function: ast.FunctionDef, names: set[str]) -> bool:
    """Whether the function names one of the methods, other than its own."""
    return any(
        isinstance(node, ast.Attribute) and node.attr in names and node.attr != function.name
        for node in ast.walk(function)
    )


def _statements(body: list[ast.stmt], with_types: bool) -> Iterator[ast.stmt]:
    """The statements of a module, those below an ``if`` included."""
    for node in body:
        if isinstance(node, ast.If):
            if with_types or "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _statements(node.body, with_types)
            yield from _statements(node.orelse, with_types)
        else:
            yield node


def _reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph.get(waiting.pop(), set()) - found:
            found.add(name)
            waiting.append(name)
    return found


# ----------------------------------------------------------------------------------------- what an update executes


class Update(NamedTuple):
    """What one update of a plain run executes.

    Attributes:
        functions: of ours, as file and name.
        lines: of ours, as file and number.
    """

    functions: list[tuple[str, str]]
    lines: list[tuple[str, int]]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def decisions(self, house: House) -> list[str]:
        """The branches that are taken: each executed ``if``, ``while`` and conditional expression."""
        executed = set(self.lines)
        return [
            f"{module.path.relative_to(house.root)}:{node.test.lineno} {ast.unparse(node.test)}"
            for module in house.modules.values()
            for node in ast.walk(module.tree)
            if isinstance(node, (ast.If, ast.While, ast.IfExp)) and (str(module.path), node.test.lineno) in executed
        ]


def plain_update(root: Path) -> Update:
    """Measure an update: from the forward pass of the fifth batch to that of the sixth, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    functions, lines = json.loads(done.stdout.splitlines()[-1])
    return Update([(file, name) for file, name in functions], [(file, line) for file, line in lines])


def measure(root: Path) -> None:
    """Print what an update executes, as JSON."""
    sys.path.insert(0, str(root / "src"))
    import torch
    from torch import nn

    from pytorch_accelerated import Trainer

    folder = str(root / "src" / PACKAGE)
    functions: set[tuple[str, str]] = set()
    lines: set[tuple[str, int]] = set()
    calls = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if calls != 5 or not code.co_filename.startswith(folder):
            return trace if code.co_filename.startswith(folder) else None
        if event == "call" and not code.co_name.startswith("<"):
            functions.add((code.co_filename, getattr(code, "co_qualname", code.co_name)))
        elif event == "line":
            lines.add((code.co_filename, frame.f_lineno))
        return trace

    class Counting(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return super().forward(inputs)

    torch.manual_seed(0)
    model = Counting(2, 1)
    data = torch.utils.data.TensorDataset(torch.randn(40, 2), torch.randn(40, 1))
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    sys.settrace(trace)
    # A short run would otherwise have a step record for each update.
    arguments: dict[str, Any] = {"record_every_n_steps": 64} if hasattr(trainer.run_history, "step_records") else {}
    trainer.train(data, 1, per_device_batch_size=4, **arguments)
    sys.settrace(None)
    print(json.dumps([sorted(functions), sorted(lines)]))


# -------------------------------------------------------------------------------------------------------- the table


class Figure(NamedTuple):
    """A row of the table.

    Attributes:
        name: what is counted.
        found: what a reader counted by hand before the layout was made; None where nobody did.
        before: what this script counts in the last commit before the layout.
        limit: the highest number that the layout allows; None for no limit.
        now: the number in this checkout.
    """

    name: str
    found: int | None
    before: int
    limit: int | None
    now: int


# Where a limit is missed: the number that has been reached, and why it is not lower. It should not become higher.
MISSED = {
    "functions of ours in a plain update": (
        18,
        "five are the parts of a step that a variant replaces, five are hooks that users override, and four belong to "
        "the loader",
    ),
    "files of ours in a plain update": (
        10,
        "loader, run, step, hooks, their default and its check, and the mean loss are in files of their own",
    ),
    "decisions in a plain update": (
        18,
        "eight are about callbacks, requests and signals, which may come at any time, and six about what a batch, its "
        "loss and its weight are; a scheduler, a scaler, accumulation and how the optimizer discards gradients are "
        "asked for once each",
    ),
    "lines of source": (
        41_200,
        "more was promised meanwhile than was taken out: loaders that choose their workers and that read Arrow by "
        "columns, what shows a run (curves within epochs, trackers, reports, notebooks, a look before training), and "
        "warnings about what used to be silent",
    ),
    "lines of source, Hugging Face": (9_200, "every argument and method of the API is honoured or refused in words"),
    "lines of tests": (52_400, "tests were joined, but each promise keeps its proof"),
}


def missed_limits() -> str:
    """Why limits are missed, as Markdown."""
    return "\n".join(f"- {name}: {why}." for name, (_, why) in MISSED.items())


def figures(house: House) -> list[Figure]:
    """All figures of a checkout."""
    update = plain_update(house.root)
    return [
        Figure("names beginning with `_` on `Trainer`'s classes", 136, 142, 35, house.private_names_of_trainer()),
        Figure("attributes of one object that several files use", 57, 60, 10, house.attributes_across_files()),
        Figure("copies of forward, report, weigh, backward", 8, 5, 2, house.copies_of_the_computation()),
        Figure("functions of ours in a plain update", 30, 28, 15, len(update.functions)),
        Figure("files of ours in a plain update", 14, 14, 6, len(update.files)),
        Figure("decisions in a plain update", 25, 33, 12, len(update.decisions(house))),
        Figure("accesses to private members from outside", 172, 179, 19, len(house.accesses_from_outside())),
        Figure("loose files in the root", 32, 34, 10, house.loose_files()),
        Figure("import circles", 0, 0, 0, len(house.circles(with_types=False))),
        Figure("import circles with imports for annotations", 4, 4, 0, len(house.circles(with_types=True))),
        Figure("lines of source", 25_500, 31_332, 21_500, house.lines()),
        Figure("lines of source, Hugging Face", 7_474, 8_680, 5_800, house.lines("huggingface")),
        Figure("lines of tests", 34_700, 45_058, 31_000, house.test_lines()),
        Figure("lines of the longest file", None, 973, None, house.longest_file()),
        Figure("functions of more than 60 lines", None, 6, None, house.long_functions()),
        Figure("`type: ignore`", None, 66, None, house.count("type: ignore")),
        Figure("methods that only raise NotImplementedError", None, 12, None, house.count("raise NotImplementedError")),
    ]


def table(rows: Iterable[Figure]) -> str:
    """The figures as Markdown."""
    lines = ["| | found | before | limit | now |", "| --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        is_missed = row.limit is not None and row.now > row.limit
        numbers = ["" if number is None else f"{number:,}" for number in (row.found, row.before, row.limit, row.now)]
        lines.append(f"| {row.name} | {' | '.join(numbers)}{' (missed)' if is_missed else ''} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the table; write it for this checkout."""
    if arguments[:1] == ["--measure"]:
        measure(Path(arguments[1]))
        return
    root = Path(arguments[0]).resolve() if arguments else ROOT
    text = table(figures(House(root)))
    print(text)
    if root == ROOT:
        header = (
            "# Figures of the layout\n\nMade by `make house`; `scripts/house.py` says how each is counted. *Found* was "
            "counted by hand before the layout was made, *before* by the script in the last commit without it.\n\n"
        )
        (root / PAGE).write_text(f"{header}{text}\n\nWhy limits are missed:\n\n{missed_limits()}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
