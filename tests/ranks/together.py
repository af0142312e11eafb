"""Runs scripts of this folder one after the other, in one group of processes: ``together.py FOLDER SCRIPT...``.

Each is as if it were alone: it has the folder as its argument, asserts the number of ranks first, and fails by itself.
"""

import runpy
import sys
from pathlib import Path

import torch

folder, *scripts = sys.argv[1:]
for script in scripts:
    path = Path(__file__).with_name(f"{script}.py")
    (Path(folder) / script).mkdir(exist_ok=True)
    sys.argv = [str(path), str(Path(folder) / script)]
    runpy.run_path(str(path), run_name="__main__")
    print(f"{script} is over")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
