"""Importing the package changes nothing."""

import json
from pathlib import Path

import pytest

from tests.support.processes import run_script

HARD_DEPENDENCIES = {"accelerate", "numpy", "safetensors", "torch", "tqdm"}

# torch and accelerate come first, so that what they do at their import is in the first picture already.
IMPORT_AND_COMPARE = """
import importlib, json, logging, multiprocessing, os, pkgutil, random, signal, sys, threading, warnings
import accelerate, numpy, torch

def take_picture():
    return {
        "Python's generator": hash(random.getstate()),
        "numpy's generator": repr(numpy.random.get_state(legacy=False)["state"]["key"].tolist()),
        "torch's generator": repr(torch.get_rng_state().tolist()),
        "torch's defaults": [
            str(torch.get_default_dtype()),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
        ],
        "devices": torch.cuda.is_initialized(),
        "process groups": torch.distributed.is_initialized(),
        "root logger": [logging.root.level, logging.root.disabled, repr(logging.root.handlers)],
        "warning filters": repr(warnings.filters),
        "environment": dict(os.environ),
        "files": os.listdir(),
        "threads": repr(threading.enumerate()),
        "child processes": repr(multiprocessing.active_children()),
        "signal handlers": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "hooks": repr([sys.excepthook, sys.displayhook, threading.excepthook]),
    }

import torch.distributed.checkpoint  # imports sympy, which has a warning filter; ours imports it at first use

before, modules_before = take_picture(), set(sys.modules)
import pytorch_accelerated
for module in pkgutil.walk_packages(pytorch_accelerated.__path__, "pytorch_accelerated."):
    importlib.import_module(module.name)
after = take_picture()
print(json.dumps({
    "changes": {name: [before[name], after[name]] for name in before if before[name] != after[name]},
    "new modules": sorted(set(sys.modules) - modules_before),
    "standard library": sorted(sys.stdlib_module_names),
}))
"""


@pytest.mark.processes
def test_importing_all_modules_changes_nothing_and_brings_only_hard_dependencies(tmp_path: Path) -> None:
    output = run_script(IMPORT_AND_COMPARE, cwd=tmp_path)
    found = json.loads(output.stdout)  # which fails if the import printed something
    assert output.stderr == ""
    assert found["changes"] == {}
    packages = {name.partition(".")[0] for name in found["new modules"]}
    assert packages - {*found["standard library"], *HARD_DEPENDENCIES} == {"pytorch_accelerated"}
    assert [name for name in found["new modules"] if name.startswith("torch._dynamo")] == []
