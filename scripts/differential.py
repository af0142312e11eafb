"""Records what the reference package shows, compares this library with it, and counts what differs.

    make differential
    python scripts/differential.py --recorded  # compares with what was recorded before

Exits with 1 if there is a difference that `docs/coming_from/pytorch_accelerated.md` does not explain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.differential.both import REFERENCE, VERSION, observations, record  # noqa: E402
from tests.differential.differences import WHERE, explanation, findings  # noqa: E402

TABLE = ROOT / "benchmarks" / "results" / "differential.md"
_HEAD = f"""\
# Observations of the differential tests

Written by `make differential`: the same scripts run with version {VERSION} and with this library in the same
environment. An observation is one value that a script can see.
[Coming from pytorch-accelerated](../../docs/coming_from/pytorch_accelerated.md) has the reasons.
"""


def main() -> int:
    """Record, compare and write the table."""
    is_recorded = "--recorded" in sys.argv
    if not is_recorded and not (REFERENCE / f"pytorch_accelerated-{VERSION}.dist-info").is_dir():
        print(f"Version {VERSION} of the reference package is not installed: run `make differential`.", file=sys.stderr)
        return 1
    if not is_recorded:
        record()
    explained = [(finding, explanation(finding)) for finding in findings()]
    unexplained = [finding for finding, row in explained if row is None]
    for finding in unexplained:
        print(f"{finding.name}\n    reference: {finding.reference}\n    ours:      {finding.ours}")
    reference, _ = observations()
    total = sum(1 for _ in _leaves(reference))
    purpose = "all of them on purpose" if not unexplained else f"{len(unexplained)} of them unintended"
    lines = [_HEAD, f"{total} observations, {len(explained)} of them different, {purpose}.", ""]
    lines += ["| difference | observations | for example |", "| --- | --- | --- |"]
    for row in WHERE:
        names = [finding.name for finding, reason in explained if reason == row]
        lines.append(f"| {row} | {len(names)} | `{names[0] if names else 'none'}` |")
    TABLE.write_text("\n".join([*lines, ""]), encoding="utf-8")
    print(f"wrote {TABLE.relative_to(ROOT)}\n{len(unexplained)} unintended differences")
    return 1 if unexplained else 0


def _leaves(seen: Any) -> Iterator[Any]:
    if isinstance(seen, dict):
        for value in seen.values():
            yield from _leaves(value)
    else:
        yield seen


if __name__ == "__main__":
    sys.exit(main())
