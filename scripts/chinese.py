"""Keeps the Chinese pages in step with the English pages that they translate.

    python scripts/chinese.py                # all pages: prints what is wrong, else writes their digests
    python scripts/chinese.py start loop     # these

The first line of a Chinese page names the English page, and a digest of its text when the translation was last checked:

    <!-- translation of docs/start.md: 0123456789abcdef -->

Before a release, carry over what has changed in the English pages since (`git log -p docs/start.md` shows it), then run
this script: it compares the headings, code, links, names in backquotes and rows of tables of the two, and writes the
new digest if they agree.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.pages import Block, blocks_of, prose_of  # noqa: E402

_HEAD = re.compile(r"<!-- translation of (?P<page>\S+):(?: (?P<digest>\w+))? -->\n")
_CHINESE = re.compile(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]")
# Tables of results are written by a program, and the contents of the site are no text.
_NOT_TRANSLATED = re.compile(
    r"<!-- (?:table|benchmark): .*?<!-- end of table -->|^```\{toctree\}.*?^```$", re.DOTALL | re.MULTILINE
)


class Translation(NamedTuple):
    """A Chinese page and what it translates.

    Attributes:
        path: the Chinese page.
        english: the English page.
        digest: of the English page when the translation was checked; None if it never was.
    """

    path: Path
    english: Path
    digest: str | None

    @property
    def name(self) -> str:
        """The name by which this script knows the page."""
        return self.path.name.partition(".")[0]

    @property
    def has_changed(self) -> bool:
        """Whether the English page is another one than at the last check."""
        return self.digest != digest_of(self.english.read_text(encoding="utf-8"))


def translations(root: Path = ROOT) -> list[Translation]:
    """All Chinese pages of a checkout.

    Raises:
        ValueError: if a page doesn't say what it translates.
    """
    found = []
    for path in [root / "README.zh-CN.md", *sorted((root / "docs" / "zh").glob("*.md"))]:
        head = _HEAD.match(path.read_text(encoding="utf-8"))
        if head is None or not (root / head["page"]).is_file():
            raise ValueError(
                f"The first line of {path.relative_to(root)} doesn't name the page that it translates. "
                "It should read <!-- translation of docs/start.md: --> with the path of an English page."
            )
        found.append(Translation(path, root / head["page"], head["digest"]))
    return found


def digest_of(text: str) -> str:
    """A short digest of what a page says, without tables of results."""
    return hashlib.sha256(_NOT_TRANSLATED.sub("", text).encode()).hexdigest()[:16]


def differences(page: Translation, all_pages: list[Translation]) -> list[str]:
    """Where a Chinese page isn't built like the English one, in sentences."""
    texts = [path.read_text(encoding="utf-8") for path in (page.english, page.path)]
    english, chinese = (prose_of(_NOT_TRANSLATED.sub("", text)) for text in texts)
    found = []
    levels = [[len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)] for text in (english, chinese)]
    if levels[0] != levels[1]:
        found.append(f"The levels of its headings are {levels[1]}, those of the English page are {levels[0]}.")
    rows = [len(re.findall(r"^ *\|", text, re.MULTILINE)) for text in (english, chinese)]
    if rows[0] != rows[1]:
        found.append(f"Its tables have {rows[1]} rows, those of the English page {rows[0]}.")
    names = [set(re.findall(r"`([^`]+)`", text)) for text in (english, chinese)]
    found += [f"`{name}` is only on the English page." for name in sorted(names[0] - names[1])]
    found += [f"`{name}` is not on the English page." for name in sorted(names[1] - names[0])]
    tables = [re.findall(r"<!-- (?:table|benchmark): (.*?)(?:, zh)? -->", text) for text in texts]
    if tables[0] != tables[1]:
        found.append(f"Its tables of results are {tables[1]}, those of the English page are {tables[0]}.")
    found += _different_links(english, chinese, page, all_pages)
    for number, (here, there) in enumerate(zip_longest(blocks_of(texts[0]), blocks_of(texts[1])), start=1):
        if here is None or there is None:
            found.append(f"Only one of the pages has a block of code number {number}.")
        elif not _is_same_block(here, there):
            found.append(f"The block of code in line {there.line} is not that in line {here.line} of the English page.")
    return found


def _different_links(english: str, chinese: str, page: Translation, all_pages: list[Translation]) -> Iterator[str]:
    to_english = {each.path: each.english for each in all_pages}
    counts = []
    for text, path in ((english, page.english), (chinese, page.path)):
        targets: Counter[str] = Counter()
        for mark, target in re.findall(r"(!?)\[[^\]]*\]\(<?([^)\s>]+)>?\)", text):
            if re.match(r"\w+:", target):
                targets[mark + target] += 1
                continue
            name, _, fragment = target.partition("#")
            file = Path(os.path.normpath(path.parent / name)) if name else path
            if to_english.get(file, file) == page.english:
                continue  # the other language, or a place on the same page
            if path == page.path and file in to_english.values():
                yield f"It links to {target}, but there is a Chinese page."
            if file in to_english or file in to_english.values():
                fragment = ""  # of a heading, which is translated
            from_english = os.path.relpath(to_english.get(file, file), page.english.parent)
            targets[f"{mark}{from_english}{fragment and '#'}{fragment}"] += 1
        counts.append(targets)
    for target in sorted((counts[0] - counts[1]).elements()):
        yield f"The link to {target} is only on the English page."
    for target in sorted((counts[1] - counts[0]).elements()):
        yield f"The link to {target} is not on the English page."


def _is_same_block(english: Block, chinese: Block) -> bool:
    if english.language != chinese.language or english.file != chinese.file:
        return False
    if (english.reason is None) != (chinese.reason is None):
        return False
    if english.language == "python":
        return _is_same_code(ast.parse(english.code), ast.parse(chinese.code))
    lines = [block.code.splitlines() for block in (english, chinese)]
    if english.language == "bash":
        lines = [[re.sub(r"(^|\s+)#.*", "", line) for line in each] for each in lines]
    return len(lines[0]) == len(lines[1]) and all(
        here == there or (english.language == "text" and _CHINESE.search(there))
        for here, there in zip(*lines, strict=True)
    )


def _is_same_code(english: object, chinese: object) -> bool:
    """Whether two syntax trees are the same but for strings that are Chinese in the second."""
    if type(english) is not type(chinese):
        return False
    if isinstance(english, ast.Constant) and isinstance(chinese, ast.Constant):
        is_translated = isinstance(english.value, str) and _CHINESE.search(str(chinese.value))
        return bool(is_translated) or repr(english.value) == repr(chinese.value)
    if isinstance(english, ast.JoinedStr) and isinstance(chinese, ast.JoinedStr) and _CHINESE.search(ast.dump(chinese)):
        english, chinese = (
            [part for part in text.values if isinstance(part, ast.FormattedValue)] for text in (english, chinese)
        )
    if isinstance(english, list) and isinstance(chinese, list):
        return len(english) == len(chinese) and all(map(_is_same_code, english, chinese))
    if isinstance(english, ast.AST) and isinstance(chinese, ast.AST):
        return all(
            _is_same_code(getattr(english, field, None), getattr(chinese, field, None)) for field in english._fields
        )
    return english == chinese


def main(names: list[str]) -> int:
    pages = translations()
    unknown = set(names) - {page.name for page in pages}
    if unknown:
        print(f"There is no page {sorted(unknown)}. Pages: {[page.name for page in pages]}.", file=sys.stderr)
        return 2
    has_problems = False
    for page in pages:
        if names and page.name not in names:
            continue
        path = page.path.relative_to(ROOT)
        problems = differences(page, pages)
        has_problems |= bool(problems)
        print(*[f"{path}: {problem}" for problem in problems], sep="\n", end="\n" if problems else "")
        if page.has_changed and not problems:
            text = page.path.read_text(encoding="utf-8")
            english = page.english.relative_to(ROOT)
            digest = digest_of(page.english.read_text(encoding="utf-8"))
            page.path.write_text(_HEAD.sub(f"<!-- translation of {english}: {digest} -->\n", text, 1), encoding="utf-8")
            print(f"{path}: checked against {english}")
    return int(has_problems)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of pages, such as start; default: all")
    sys.exit(main(parser.parse_args().names))
