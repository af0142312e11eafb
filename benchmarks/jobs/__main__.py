"""Do the jobs: ``python -m benchmarks.jobs [JOB ...] [--only ours] [--peers FOLDER] [--output FOLDER]``."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import pages
from benchmarks.jobs.jobs import JOBS, LIBRARIES, scripts_of
from benchmarks.jobs.reporting import stored_rows, versions, write
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
    parser.add_argument("--output", type=Path, help="folder for the results of this call alone")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="how many scripts run at a time")
    options = parser.parse_args()
    unknown = [name for name in options.jobs if name not in JOBS]
    if unknown:
        parser.error(f"there is no job {unknown[0]!r}")
    wanted = {
        script: JOBS[name]
        for name in options.jobs or JOBS
        for script in scripts_of(name)
        if options.only is None or script == f"{name}_{options.only}"
    }
    rows: dict[str, Row] = {}
    with ThreadPoolExecutor(options.at_once) as pool:
        done = pool.map(lambda script: run(script, wanted[script], options.peers), wanted)
        for (script, job), row in zip(wanted.items(), done, strict=True):
            rows[script] = row
            state = "not run here" if row.is_missing else row.complaint or f"{job.figure} {row.figure}"
            print(f"{script}: {row.lines} lines, {row.imports} of imports: {state}", flush=True)
    facts = facts_of_run(command="python -m benchmarks.jobs", repeats=1, left_out=[])
    facts["threads"] = 1  # of each script
    facts["versions"] += f", {versions(options.peers)}"
    if options.output:
        write(options.output, rows, facts)
    elif options.only is None:  # the other rows stay as they are
        write(RESULTS, stored_rows(RESULTS) | rows, facts)
        PAGE.write_text(pages.with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return int(any(row.complaint and not row.is_missing for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
