"""Every technique beside plain training on the same work.

``python -m benchmarks.techniques --jobs 4`` writes ``techniques.md`` and ``techniques.json`` to ``benchmarks/results``.
It took 26 minutes on two cores that were busy with other work, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.find_lr import RESULTS
from benchmarks.reporting import facts_of_run
from benchmarks.techniques.applied import FINE_TUNING, PLAIN, TECHNIQUES, Technique
from benchmarks.techniques.measuring import measure, measure_checkpointing, measure_pruning
from benchmarks.techniques.reporting import page
from benchmarks.techniques.tasks import TASKS

COMMAND = "python -m benchmarks.techniques"
PACKAGES = ("torch", "accelerate", "numpy", "scikit-learn", "schedulefree", "optuna")
TUNING_SEEDS = (100, 101)


def waited_for(found: Any) -> Any:
    """The results of what other processes compute, in nested dicts."""
    if isinstance(found, dict):
        return {name: waited_for(value) for name, value in found.items()}
    return found.result() if isinstance(found, Future) else found


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Techniques beside plain training.")
    parser.add_argument("--seeds", type=int, default=10, help="at least 2; default: 10")
    parser.add_argument("--only", default="", metavar="TEXT", help="only techniques whose names contain this")
    parser.add_argument("--quick", action="store_true", help="two epochs and seeds, to check that all runs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the folder to write to")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work, of one thread each")
    options = parser.parse_args()
    seeds, tuning, tasks = range(options.seeds), TUNING_SEEDS, {task.name: task for task in TASKS}
    if options.quick:
        seeds, tuning = range(2), TUNING_SEEDS[:1]
        quick = [dataclasses.replace(task, epochs=2, rates=task.rates[1:3]) for task in TASKS]
        tasks = {task.name: task for task in quick}
    torch.set_num_threads(1)
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawning, torch.set_num_threads, (1,)) as pool:

        def measured(techniques: dict[str, Technique], *, few: bool) -> dict[str, Any]:
            names = [name for name in techniques if options.only in name and name != PLAIN]
            of_kind = [task for task in tasks.values() if task.few == few and names]
            plain = {task.name: pool.submit(measure, task, PLAIN, None, seeds, tuning) for task in of_kind}
            found = {
                task.name: {
                    name: pool.submit(measure, task, name, plain[task.name].result()["rate"], seeds, tuning)
                    for name in names
                    if task.name not in techniques[name].leaves_out
                }
                for task in of_kind
            }
            return {name: {PLAIN: plain[name], **of_task} for name, of_task in found.items()}

        def one(name: str, function: Any, task: str) -> Any:
            return pool.submit(function, tasks[task], seeds) if options.only in name else None

        arguments = "".join([" --quick" * options.quick, f" --only {options.only}" * bool(options.only)])
        results = waited_for(
            {
                "run": facts_of_run(command=COMMAND + arguments, repeats=len(seeds), left_out=[], packages=PACKAGES),
                "checkpointing": one("checkpoint_activations", measure_checkpointing, "patches, transformer"),
                "pruning": one("OptunaCallback", measure_pruning, "digits, MLP"),
                "tasks": measured(TECHNIQUES, few=False),
                "fine_tuning": measured(FINE_TUNING, few=True),
            }
        )
    (options.output / "techniques.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.output / "techniques.md").write_text(page(results), encoding="utf-8")
    print(page(results))


if __name__ == "__main__":
    main()
