"""Run scenarios with whichever package is on the path, and write down what they saw.

python -m tests.differential.observe OUTPUT.json MODULE...

Under a launcher each rank writes ``OUTPUT.json.RANK``.
"""

import contextlib
import importlib
import inspect
import json
import os
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.differential.scenarios import common


def main(output: str, modules: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = Path(output + ("." + os.environ["RANK"] if "RANK" in os.environ else "")).resolve()
    seen: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name in modules:
        module = importlib.import_module(f"tests.differential.scenarios.{name}")
        for scenario, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ != module.__name__ or scenario.startswith("_"):
                continue
            try:
                seen[f"{name}.{scenario}"] = common.plain(_observe(function))
            except Exception as error:
                errors[f"{name}.{scenario}"] = f"{type(error).__name__}: {error}"
    path.write_text(json.dumps({"seen": seen, "errors": errors}), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _observe(scenario: Any) -> Any:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        os.chdir(folder)
        try:
            quiet = contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere)
            with quiet[0], quiet[1]:
                return scenario()
        finally:
            os.chdir(before)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
