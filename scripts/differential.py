"""Compares this library with the reference package, and writes the pages about the differences.

    make differential

Exits with 1 if there is a difference that `tests/differential/differences.py` does not explain.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.differential.both import is_installed  # noqa: E402
from tests.differential.differences import explanation  # noqa: E402
from tests.differential.pages import findings, pages  # noqa: E402


def main() -> int:
    """Compare both libraries and write the pages."""
    if not is_installed():
        print("The reference package is not installed: run `make differential`.", file=sys.stderr)
        return 1
    unexplained = [finding for finding in findings() if explanation(finding) is None]
    for finding in unexplained:
        print(f"{finding.name}\n    reference: {finding.reference}\n    ours:      {finding.ours}")
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
    print(f"{len(unexplained)} unintended differences")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
