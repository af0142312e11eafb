"""Do the jobs: ``python -m benchmarks.jobs [JOB ...] [--only ours] [--peers FOLDER] [--output FOLDER]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import pages
from benchmarks.jobs.jobs import JOBS, LIBRARIES, scripts_of
from benchmarks.jobs.reporting import versions, write
from benchmarks.jobs.running import Row, run
from benchmarks.reporting import facts_of_run

RESULTS = Path(__file__).parents[1] / "results"
PAGE = pages.DOCS / "coming_from" / "jobs.md"


def main() -> int:
    """Run the scripts; 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs", description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"default: all of {', '.join(JOBS)}")
    parser.add_argument("--only", choices=list(LIBRARIES), help="the scripts of one library")
    parser.add_argument("--peers", type=Path, help="a folder with packages that are not installed, such as fastai")
    parser.add_argument("--output", type=Path, help="folder for the results; default: none, unless everything is run")
    options = parser.parse_args()
    unknown = [name for name in options.jobs if name not in JOBS]
    if unknown:
        parser.error(f"there is no job {unknown[0]!r}")
    rows: dict[str, Row] = {}
    for name in options.jobs or JOBS:
        for script in scripts_of(name):
            if options.only is None or script == f"{name}_{options.only}":
                rows[script] = row = run(script, JOBS[name], options.peers)
                state = "not run here" if row.is_missing else row.complaint or f"{JOBS[name].figure} {row.figure}"
                print(f"{script}: {row.lines} lines, {row.imports} of imports: {state}", flush=True)
    is_whole = not options.jobs and options.only is None
    if options.output or is_whole:
        facts = facts_of_run(command="python -m benchmarks.jobs", repeats=1, left_out=[])
        facts["versions"] += f", {versions(options.peers)}"
        write(options.output or RESULTS, rows, facts)
    if is_whole and options.output is None:
        PAGE.write_text(pages.with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return int(any(row.complaint and not row.is_missing for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
