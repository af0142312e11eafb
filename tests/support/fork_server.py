"""Runs scripts in processes forked from this one, in which everything is already imported.

A script: it answers each line of its standard input, a JSON object, with another one. A request has the keys ``script``
(a path), ``args``, ``env`` (the whole environment), ``cwd``, ``world_size`` (null: no ranks), ``launcher`` (the
variables of each rank instead of torchrun's, or null), ``logs`` (a folder, for ``<rank>.out`` and ``<rank>.err``) and
``timeout_seconds``. The answer has ``codes``, by rank (negative if a signal has ended the process), and ``is_late``. As
under torchrun, a rank that fails ends the others.
"""

import gc
import importlib
import json
import os
import random
import re
import runpy
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
import torch._dynamo  # the first optimizer of a process would import it
import torch.distributed.checkpoint
import torch.distributed.fsdp

import pytorch_accelerated.callbacks
import pytorch_accelerated.schedulers
from tests.support.ending import end_without_teardown, kill_with_children

SECONDS_TO_END_BY_THEMSELVES = 30  # as torchrun sets them
PRELOADED = (accelerate, torch, pytorch_accelerated)
SLOW_TO_IMPORT = ("sklearn.datasets", "timm", "torchmetrics", "torchvision", "transformers", "transformers.trainer")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the requested script and wait for its end."""
    source = Path(request["script"]).read_text(encoding="utf-8")
    for name in SLOW_TO_IMPORT:
        if re.search(rf"^\s*(import|from) {name}\b", source, re.MULTILINE):
            importlib.import_module(name)  # for this script and all later ones
    world_size = request["world_size"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running: dict[int, int] = {}
    for rank in range(world_size or 1):
        shared = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": rank}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {name: str(value) for name, value in shared.items()} if world_size else {}
        if request["launcher"] is not None:
            variables = request["launcher"][rank]
        running[_fork(request, rank, variables)] = rank
    codes: dict[int, int] = {}
    deadline = time.monotonic() + request["timeout_seconds"]
    is_late = False
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            code = os.waitstatus_to_exitcode(status)
            codes[running.pop(pid)] = code
            if code and running:
                for other in running:
                    os.kill(other, signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + SECONDS_TO_END_BY_THEMSELVES)
        elif time.monotonic() > deadline:
            is_late = not any(codes.values())
            for other in running:
                kill_with_children(other)
            deadline = float("inf")
        elif not pid:
            time.sleep(0.005)
    return {"codes": [codes[rank] for rank in sorted(codes)], "is_late": is_late}


def _fork(request: dict[str, Any], rank: int, variables: dict[str, str]) -> int:
    """The id of a process that runs the script. In that process, this function does not return."""
    gc.freeze()  # otherwise an ending process would first visit all objects it shares with this one
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    logs = Path(request["logs"])
    for descriptor, path in enumerate((Path(os.devnull), logs / f"{rank}.out", logs / f"{rank}.err")):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update({**request["env"], **variables})
    os.chdir(request["cwd"])
    script = Path(request["script"])
    sys.argv = [str(script), *request["args"]]
    sys.path[0] = str(script.parent)
    # As Python does when it starts.
    for rule in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings._setoption(rule)  # type: ignore[attr-defined]
    # A separate process would have got these from the operating system.
    random.seed()
    np.random.seed()
    runpy.run_path(str(script), run_name="__main__")
    return end_without_teardown()


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
