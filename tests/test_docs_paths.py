"""Pages name files that exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY

ROOTS = ("benchmarks", "docs", "examples", "scripts", "src", "tests")
PAGES = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
# The changelog also names files that have gone since.
PAGES = sorted(page for page in PAGES if page.name != "CHANGELOG.md" and "_build" not in page.parts)
FILE = re.compile(r"(?:[\w-]+/)*[\w-]+\.(?:py|md)|(?:[\w-]+/)+")
# Files of users in examples, and those that this library writes beside a model.
EXAMPLE_FILES = {"train.py", "script.py", "README.md"}


@pytest.fixture(scope="module")
def tree() -> set[Path]:
    """Every file of the repository and every folder with files in it, relative to the repository."""
    found = {path for root in ROOTS for path in (REPOSITORY / root).rglob("*") if "__pycache__" not in path.parts}
    return {path.relative_to(REPOSITORY) for path in [*found, *REPOSITORY.glob("*")]}


def links(text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http:", "https:")):
            yield target


def names_in_code(text: str) -> Iterator[str]:
    """What looks like a Python file, a page or a folder between single backquotes."""
    for name in re.findall(r"`([^`\s]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        if FILE.fullmatch(name) and name not in EXAMPLE_FILES:
            yield name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_file_that_a_page_names_exists(page: Path, tree: set[Path]) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [target for target in links(text) if not (page.parent / target).exists()]
    for name in names_in_code(text):
        parts = Path(name).parts
        if not any(path.parts[-len(parts) :] == parts for path in tree):
            missing.append(name)
    assert not missing
