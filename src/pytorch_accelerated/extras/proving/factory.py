"""Makes a run again from the script that defines it, in any process."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.errors import ConfigurationError

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer

HELP = "what makes the run: SCRIPT.py:FUNCTION, or MODULE:FUNCTION, also with arguments: 'train.py:make_run(seed=1)'"
_folders_of_scripts: set[Path] = set()
_EXAMPLE = """\
    def make_run():
        return Trainer(...), {"train_dataset": train_dataset, "num_epochs": 3}"""


def make_run(place: str, without: Collection[str] = ()) -> tuple[Trainer, dict[str, Any]]:
    """A new trainer and its arguments of `train`, from the function at `place`.

    Args:
        place: a script or module and a function in it, separated by a colon; the arguments of a call are literals.
        without: arguments of `train` that are left out.

    Raises:
        ConfigurationError: if there is no such function, or it returns something else.
    """
    made = function_at(place)()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        raise ConfigurationError(
            f"{place} returned a {type(made).__name__}, not a trainer and a dict of the arguments of "
            f"`train`:\n{_EXAMPLE}"
        )
    return made[0], {name: value for name, value in made[1].items() if name not in without}


def function_at(place: str) -> Callable[..., Any]:
    """The function at a place such as "train.py:make_run", with the arguments that stand there.

    Raises:
        ConfigurationError: if there is no such function.
    """
    found = re.fullmatch(r"(.+):(\w+(\(.*\))?)", place, re.DOTALL)  # an argument may have a colon, too
    source, call = found.groups()[:2] if found else ("", "")
    name, arguments, keywords = _parsed(call) if source else ("", [], {})
    if not name:
        raise ConfigurationError(f"{place!r} names no function. Give {HELP}.")
    module = _imported(source)
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, vars(module), n=1)
        advice = f" Did you mean {near[0]!r}?" if near else f" Write one:\n{_EXAMPLE}"
        raise ConfigurationError(f"{source} has no function {name!r}.{advice}")
    return functools.partial(function, *arguments, **keywords) if arguments or keywords else function


def _parsed(call: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name and arguments of a function; no name if it is neither a name nor a call with literals."""
    try:
        node = ast.parse(call if "(" in call else f"{call}()", mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            keywords = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
            return node.func.id, [ast.literal_eval(each) for each in node.args], keywords
    except (SyntaxError, ValueError):
        pass
    return "", [], {}


def _imported(source: str) -> Any:
    """The module `source`, or that of a script, whose folder it can import from, as if it had been started."""
    path = Path(source)
    if path.suffix != ".py":
        return importlib.import_module(source)
    if not path.is_file():
        raise ConfigurationError(f"There is no script {source}. Check the path.")
    folder = path.resolve().parent
    # A neighbour of an earlier script may have the name of one of this script.
    for known in [each for each in sys.modules if _folder_of(each) in _folders_of_scripts - {folder}]:
        del sys.modules[known]
    _folders_of_scripts.add(folder)
    sys.path[:] = [str(folder), *(each for each in sys.path if each != str(folder))]
    name = path.stem
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # so that worker processes find the classes in it
    specification.loader.exec_module(module)
    return module


def _folder_of(name: str) -> Path | None:
    """The folder that has the module or package in which a module is; None for others, and for the running script."""
    top = sys.modules.get(name.partition(".")[0])
    places = [*getattr(top, "__path__", ()), getattr(top, "__file__", None)]
    return None if name == "__main__" or places[0] is None else Path(places[0]).resolve().parent
