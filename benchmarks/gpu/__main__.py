"""The cost of the loop on a GPU beside others: ``python -m benchmarks.gpu [--quick] [--output FOLDER]``.

Compares eager, compiled and CUDA-graph steps with the raw loop, eager ones with other libraries as well, saves with
torch.save, peak memory, and the bits after a resume. Takes less than ten minutes on one GPU. ``--quick`` needs none: it
only checks that everything runs. ``make gpu`` runs the tests that need a GPU first.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.states import resumed_bits, saves
from benchmarks.gpu.ways import COMPILING, OURS, PEERS, WAYS, Train
from benchmarks.gpu.work import QUICK_WORKLOADS, WORKLOADS, Stopwatch, Workload
from benchmarks.measuring import Result, Setting, Target, take_turns
from benchmarks.reporting import as_markdown, facts_of_run, write_report
from tests.support import torchvision_on_cpu


def compare(workload: Workload, mode: str, device: torch.device, repeats: int) -> list[Result]:
    """All loops in turn, after checking that the weights of two are the same and that ours does not wait."""
    weights, peaks = {}, {}
    for name, train in WAYS.items():
        stopwatch = Stopwatch(workload, device, forbids_waiting=True)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        weights[name] = [
            parameter.detach().cpu() for parameter in train(workload, mode, device, stopwatch).parameters()
        ]
        peaks[name] = [torch.cuda.max_memory_allocated() / 2**20] if device.type == "cuda" else [0.0]
    pairs = list(zip(*weights.values(), strict=True))
    is_equal = all(torch.equal(raw, ours) for raw, ours in pairs)
    furthest = max((raw - ours).abs().max().item() for raw, ours in pairs)
    del weights, pairs
    ways: dict[str, Train] = {**WAYS, **(PEERS if mode == "eager" else {})}
    rounds = take_turns(
        {name: partial(_microseconds, train, workload, mode, device) for name, train in ways.items()}, repeats
    )
    steps = Result(
        title=f"{workload.name}, {mode}",
        unit="µs per step",
        rounds=rounds,
        baseline="raw loop",
        targets=[Target(OURS, at_most=workload.at_most)],
        note=f"Final weights: {'equal to the bit' if is_equal else f'differ by {furthest:.2g} at the most'}.",
        is_pictured=True,
    )
    memory = Result(title=f"{workload.name}, {mode}: peak memory", unit="MiB", rounds=peaks, baseline="raw loop")
    return [steps, memory]


def _microseconds(train: Train, workload: Workload, mode: str, device: torch.device) -> float:
    stopwatch = Stopwatch(workload, device)
    train(workload, mode, device, stopwatch)
    return stopwatch.seconds / workload.timed_steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results" / "gpu")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.quick:
        parser.error("there is no CUDA device; --quick runs the script without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torchvision_on_cpu.install()  # Lightning and transformers import torchvision
    torch.backends.cudnn.deterministic = True  # otherwise even the weights of two raw loops would differ
    options.output.mkdir(parents=True, exist_ok=True)
    setting = Setting(options.repeats, is_quick=options.quick, peers=(), folder=options.output)
    repeats = setting.size(options.repeats, quick=1)
    facts: dict[str, Any] = facts_of_run(
        command=shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]), repeats=repeats, left_out=()
    )
    facts["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    results: dict[str, list[Result]] = {}

    def note(name: str, tables: list[Result]) -> None:
        results.setdefault(name, []).extend(tables)
        for table in tables:
            print("\n" + as_markdown(table), flush=True)
        write_report(options.output, results, facts)

    for precision in ("no", "bf16"):
        facts[f"resume, {precision}"] = resumed_bits(device, precision)
        print(facts[f"resume, {precision}"], flush=True)
    workloads = QUICK_WORKLOADS if options.quick else WORKLOADS
    for workload in workloads:
        note(workload.name, compare(workload, "eager", device, repeats))
    for megabytes in (1,) if options.quick else (100, 500):
        note("saves", [saves(device, megabytes, repeats)])
    if device.type == "cuda":
        for workload in workloads[:2]:
            for mode in list(COMPILING)[1:]:
                note(workload.name, compare(workload, mode, device, repeats))
    print(f"\nWritten to {options.output}")


if __name__ == "__main__":
    main()
