"""Two ranks on one machine or on two, with disks of their own: states at a URL. Arguments: folder, URL, machines."""

import dataclasses
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from pytorch_accelerated.extras.object_storage import Store, default_local_folder
from pytorch_accelerated.states.layout import dump_manifest
from pytorch_accelerated.states.verify import read_manifest
from tests.support.resuming import SaveAndStop, assert_same, everything, run

folder, url, machines = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank = int(os.environ["RANK"])
if machines == 2:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
machine = rank if machines == 2 else 0
done: dict[str, list[str]] = {"get": [], "put": []}
for operation in done:

    def noted(*args: Any, operation: str = operation, work: Any = getattr(Store, operation)) -> None:  # noqa: B008
        done[operation] += [name for name in args if isinstance(name, str)]
        work(*args)

    setattr(Store, operation, noted)


def set_up(attempt: str) -> None:
    """New machines."""
    os.environ["XDG_CACHE_HOME"] = str(folder / f"{attempt} {machine}")


whole = everything(*run(folder))
set_up("saving")
run(folder, SaveTrainingStateCallback(url, save_every_n_steps=2), SaveAndStop(folder / "unused", 3))
assert bool(done["put"]) == (rank == 0)
assert not done["get"]
set_up("resuming")
for has_local in (False, True):  # the second time, all machines have the state
    trainer, ema = run(folder, process_seed=99, resume_from=url)
    assert_same(everything(trainer, ema), whole)
    assert trainer.run_context.asked.resumed_from == default_local_folder(url) / "final"
    is_first_of_machine = machines == 2 or rank == 0
    assert bool(done["get"]) == (is_first_of_machine and not has_local), done
    assert len(done["get"]) == len(set(done["get"]))
    done["get"].clear()
# A newer state, which is not at the URL, counts if all machines have it.
if rank == 0:
    final = default_local_folder(url) / "final"
    newer = Path(shutil.copytree(final, final.with_name("step_5"))) / "manifest.json"
    newer.write_bytes(dump_manifest(dataclasses.replace(read_manifest(final), serial=99)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer, ema = run(folder, process_seed=99, resume_from=url)
name = "final" if machines == 2 else "step_5"
assert trainer.run_context.asked.resumed_from == default_local_folder(url) / name
skipped = [str(warning.message) for warning in caught if "skipped" in str(warning.message)]
assert len(skipped) == (1 if machines == 2 and rank == 0 else 0), skipped
assert all("step_5 is not at" in message for message in skipped)
assert_same(everything(trainer, ema), whole)
torch.distributed.destroy_process_group()
