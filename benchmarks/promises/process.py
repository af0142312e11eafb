"""The work of one process: ``python -m benchmarks.promises.process LIBRARY TASK RESULT``.

TASK is a `Task` as JSON. RESULT is the file to write: the final weights, the mean loss of an evaluation, or what became
of damaged checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.promises.libraries import LIBRARIES
from benchmarks.promises.work import Task


def after_flips(task: Task, train: Callable[[Task], dict[str, torch.Tensor]]) -> dict[str, int]:
    """Resume from damaged copies of the checkpoints in `task.folder`, and count what became of it.

    Returns:
        How many were *noticed* (an error, or another checkpoint in its place that leads to the same weights),
        *harmless* (the same weights) and *trained on* (other weights, and not a word).
    """
    assert task.folder is not None
    intact, copy = Path(task.folder), Path(f"{task.folder}-damaged")
    chosen = random.Random(0)
    found = {"noticed": 0, "harmless": 0, "trained on": 0}
    shutil.copytree(intact, copy)
    right = train(dataclasses.replace(task, folder=str(copy), resumes=True))
    for _ in range(task.flips):
        shutil.rmtree(copy)
        shutil.copytree(intact, copy)
        flip_a_bit(copy, chosen)
        try:
            came_out = train(dataclasses.replace(task, folder=str(copy), resumes=True))
        except Exception:
            found["noticed"] += 1
        else:
            is_same = all(torch.equal(value, right[name]) for name, value in came_out.items())
            found["harmless" if is_same else "trained on"] += 1
    return found


def flip_a_bit(folder: Path, chosen: random.Random) -> None:
    """Flip one bit in one of the files below `folder`, every byte being as likely as any other."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    (path,) = chosen.choices(files, [file.stat().st_size for file in files])
    content = bytearray(path.read_bytes())
    content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
    path.write_bytes(content)


def main() -> None:
    name, task_text, result = sys.argv[1:]
    task = Task(**json.loads(task_text))
    library = LIBRARIES[name]()
    found: Any
    if task.what == "evaluate":
        found = library.evaluate(task)
    elif task.what == "flip":
        found = after_flips(task, library.train)
    else:
        found = library.train(task)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(found, result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
