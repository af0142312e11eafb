"""Run the benchmarks: ``python -m benchmarks [CASE ...] [--repeats N] [--quick] [--no-peers] [--output FOLDER]``."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from benchmarks.cases import CASES
from benchmarks.measuring import Result, Setting
from benchmarks.peers import PEERS
from benchmarks.processes import settle
from benchmarks.reference import Reference
from benchmarks.reporting import as_markdown, facts_of_run, write_report
from benchmarks.ways import Way

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = _options()
    # Set before anything looks for a device; child processes inherit it.
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
    options.output.mkdir(parents=True, exist_ok=True)
    peers, left_out = _peers() if options.peers else ([], {})
    for library, reason in left_out.items():
        print(f"Left out: {library} ({reason})", flush=True)
    settle()
    repeats = 1 if options.quick else options.repeats
    setting = Setting(repeats, is_quick=options.quick, peers=peers, folder=options.output)
    facts = facts_of_run(command=_command(options), repeats=repeats, left_out=list(left_out))
    results: dict[str, list[Result]] = {}
    try:
        for case in options.cases or CASES:
            start = time.perf_counter()
            results[case] = CASES[case](setting)
            print("\n\n".join(["", *map(as_markdown, results[case])]))
            print(f"\n({case}: {time.perf_counter() - start:.0f} s)", flush=True)
            write_report(options.output, results, facts)
    finally:
        for peer in peers:
            peer.close()
    print(f"\nWritten to {options.output}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what the library costs.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--repeats", type=int, default=7, help="rounds in which all ways take turns (default: 7)")
    parser.add_argument("--quick", action="store_true", help="one round with small sizes, to check that all runs")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="skip the other libraries")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    unknown = [case for case in options.cases if case not in CASES]
    if unknown or options.repeats < 1:
        parser.error(f"there is no case {unknown[0]!r}" if unknown else "--repeats must be at least 1")
    return options


def _command(options: argparse.Namespace) -> str:
    """The command that repeats this run, without the folder for results."""
    words = [*options.cases, f"--repeats {options.repeats}"]
    words += [flag for flag, is_given in (("--quick", options.quick), ("--no-peers", not options.peers)) if is_given]
    return " ".join(["python -m benchmarks", *words])


def _peers() -> tuple[list[Way], dict[str, str]]:
    """The installed libraries, lean and with their defaults, and why others are missing."""
    peers: list[Way] = []
    left_out = {}
    way_classes: tuple[type[Way], ...] = (Reference, *PEERS)
    for way_class in way_classes:
        try:
            peers += [way_class(), way_class(is_lean=False)]
        except ImportError as error:
            left_out[way_class.library] = str(error)
    return peers, left_out


if __name__ == "__main__":
    main()
