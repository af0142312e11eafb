"""The time a new process needs until its first step: ``python -m benchmarks.first_step "ours, no callbacks"``.

Prints a JSON object. Everything is imported in the order in which it is measured.
"""

import time


def main() -> None:
    start = time.perf_counter()

    import json
    import sys

    import accelerate  # noqa: F401

    from benchmarks.peers import PEERS
    from benchmarks.processes import resident_megabytes
    from benchmarks.reference import ReferenceInWorker
    from benchmarks.ways import AccelerateByHand, Ours, RawLoop, Way
    from benchmarks.work import Job

    way_classes: tuple[type[Way], ...] = (RawLoop, AccelerateByHand, Ours, ReferenceInWorker, *PEERS)
    by_name = {way_class.library + way_class.endings[0]: way_class for way_class in way_classes}
    before_seconds, before_megabytes = time.perf_counter(), resident_megabytes()
    way = by_name[sys.argv[1]]()
    after_seconds, after_megabytes = time.perf_counter(), resident_megabytes()
    way.run(Job(samples=32))
    facts = {
        "import_seconds": after_seconds - before_seconds,
        "import_megabytes": after_megabytes - before_megabytes,
        "first_step_seconds": time.perf_counter() - start,
    }
    way.close()
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
