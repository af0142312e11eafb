"""The code of a page of documentation as one script.

All ``python`` blocks of a page are one script, from top to bottom. ``bash`` blocks are run between them (`commands`),
in the same folder. A comment before a block says what else becomes of it: ``<!-- file: train.py -->`` writes it to that
file, ``<!-- not run: a reason -->`` leaves it out. Blocks of output and settings (`SHOWN_LANGUAGES`) are not run.
"""

import re
from pathlib import Path
from typing import NamedTuple

RUN_LANGUAGES = {"python", "bash"}
SHOWN_LANGUAGES = {"text", "diff", "json", "yaml", "toml", "ini", "csv", "html"}
# ``:::`` and braces are MyST's: they hold no code of their own.
_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<word>file|not run): (?P<value>[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=fence) *$",
    re.DOTALL | re.MULTILINE,
)
_PREAMBLE = """import sys as _sys

from tests.support.commands import Shell as _Shell

_sys.path.insert(0, "")  # files that the page writes can be imported
_bash = _Shell()

"""


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
        language: the word after the fence.
        code: what is in it, without indentation.
        line: the line of the fence, counted from 1.
        file: the file that it becomes, or None.
        reason: why it is not run, or None.
    """

    language: str
    code: str
    line: int
    file: str | None
    reason: str | None


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks of a page but MyST's directives."""
    found = []
    for match in _BLOCK.finditer(text):
        language = match["language"].strip()
        if language.startswith("{"):
            continue
        code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        named = {match["word"]: match["value"]}
        line = text.count("\n", 0, match.start("fence")) + 1
        found.append(Block(language, code, line, named.get("file"), named.get("not run")))
    return found


def prose_of(text: str) -> str:
    """A page without its fenced blocks."""
    return _BLOCK.sub("", text)


def script_of(path: Path) -> str | None:
    """The page as a script whose line numbers are not the page's, or None if there is nothing to run.

    Raises:
        ValueError: if a block's language is unknown.
    """
    parts = []
    for block in blocks_of(path.read_text(encoding="utf-8")):
        place = f"# {path.name}, line {block.line}\n"
        if block.reason is not None:
            continue
        if block.file is not None:
            parts.append(f"{place}open({block.file!r}, 'w').write({block.code!r})\n")
        elif block.language == "python":
            parts.append(place + block.code)
        elif block.language == "bash":
            parts.append(f"{place}_bash({block.code!r})\n")
        elif block.language not in SHOWN_LANGUAGES:
            raise ValueError(
                f"{path}, line {block.line}: a block of {block.language or 'no language'!r} is neither run nor shown. "
                f"Languages that are run: {sorted(RUN_LANGUAGES)}; that are shown: {sorted(SHOWN_LANGUAGES)}."
            )
    return _PREAMBLE + "\n".join(parts) if parts else None
