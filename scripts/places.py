"""The same script in many places: on one, two and three processes, sharded, on two hosts, within Ray. ``make places``

Writes to benchmarks/results/places.md what the losses and metrics of each differ by from those of one process, in
float32 and float64, and whether each row was used once an epoch. Two hosts are network namespaces, which need root;
Ray has to be installed. What cannot run here is left out, with the reason.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.processes.test_several_machines import two_hosts
from tests.ranks.places import train
from tests.support.processes import run_on_ranks, run_script

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results" / "places.md"
SCRIPT = ROOT / "tests" / "ranks" / "places.py"
DTYPES = {"float64": 1e-12, "float32": 1e-6}


def on_hosts(path: Path, dtype: str) -> None:
    with two_hosts() as hosts:
        slurm = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "MASTER_ADDR": hosts[0].address}
        slurm |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
        running = [
            host.start(
                SCRIPT, path, "whole", dtype, env={**slurm, "SLURM_PROCID": str(rank)}, log=path.with_suffix(f".{rank}")
            )
            for rank, host in enumerate(hosts)
        ]
        if [process.wait(timeout=300) for process in running] != [0, 0]:
            raise RuntimeError(path.with_suffix(".0").read_text())


def within_ray(path: Path, dtype: str) -> None:
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=4, include_dashboard=False, ignore_reinit_error=True, object_store_memory=100 * 2**20)
    arguments = [str(path), "whole", dtype]
    TorchTrainer(
        lambda config: train(*config["arguments"]),
        train_loop_config={"arguments": arguments},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()


PLACES: dict[str, Callable[[Path, str], Any]] = {
    "one process": lambda path, dtype: run_script(SCRIPT, path, "whole", dtype),
    "two processes": lambda path, dtype: run_on_ranks(SCRIPT, 2, path, "whole", dtype),
    "three processes": lambda path, dtype: run_on_ranks(SCRIPT, 3, path, "whole", dtype),
    "two processes, `fully_shard`": lambda path, dtype: run_on_ranks(SCRIPT, 2, path, "sharded", dtype),
    "two hosts, as Slurm starts them": on_hosts,
    "two workers of Ray Train": within_ray,
}


def main() -> None:
    rows, left_out, has_passed = [], [], True
    with tempfile.TemporaryDirectory() as folder:
        for dtype, limit in DTYPES.items():
            base: dict[str, Any] = {}
            for number, (name, run) in enumerate(PLACES.items()):
                path = Path(folder) / f"{dtype}{number}.json"
                if run is within_ray and importlib.util.find_spec("ray") is None:
                    left_out.append("Ray is not installed.")
                    continue
                try:
                    run(path, dtype)
                except pytest.skip.Exception as error:
                    left_out.append(f"{name}: {error}.")
                    continue
                found = json.loads(path.read_text())
                base = base or found
                furthest = max(
                    abs(one - other) / abs(other)
                    for metric, values in base["values"].items()
                    for one, other in zip(found["values"][metric], values, strict=True)
                )
                is_good = furthest <= limit and found["times_read"] == [2]
                has_passed &= is_good
                cells = [
                    name,
                    dtype,
                    str(found["ranks"]),
                    f"{furthest:.1e}",
                    f"{limit:.0e}",
                    "yes" if is_good else "**no**",
                ]
                rows.append(f"| {' | '.join(cells)} |")
                print(rows[-1], flush=True)
    versions = f"Python {platform.python_version()}, torch {version('torch')}, accelerate {version('accelerate')}"
    text = f"""# The same script in many places

`make places`, with {versions}: two epochs on digits, 48 rows in an update
over all ranks, AdamW, an evaluation after each epoch. The difference is the largest of all losses and metrics to those
of one process, relative; "reached" also says that each row was trained on once in each epoch, over all ranks.

| place | dtype | ranks | difference | at most | reached |
| --- | --- | --- | --- | --- | --- |
"""
    PAGE.write_text(
        text + "\n".join([*rows, *(["", *sorted(set(left_out))] if left_out else []), ""]), encoding="utf-8"
    )
    raise SystemExit(not has_passed)


if __name__ == "__main__":
    main()
