"""Runs the scenarios with ours, and compares with what they showed with the reference."""

import functools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.processes import REPOSITORY, run_forked, run_on_ranks, run_script, run_under_torchrun

VERSION = "0.1.61"
#: Where `make` installs the reference, without its dependencies, so that both packages use the same torch.
REFERENCE = Path(os.environ.get("PYTORCH_ACCELERATED_REFERENCE", Path(sys.prefix) / "reference"))
OBSERVE = Path(__file__).with_name("observe.py")
RECORDED = Path(__file__).with_name("recorded.json")
FILES = Path(__file__).with_name("files")
SCENARIOS = Path(__file__).with_name("scenarios")
ON_RANKS = ("gathering",)
WORLD_SIZE = 2
MODULES = tuple(sorted(path.stem for path in SCENARIOS.glob("*.py") if path.stem not in ("__init__", "common")))


def is_installed() -> bool:
    """Whether the reference is there."""
    return (REFERENCE / "pytorch_accelerated").is_dir()


@functools.cache
def observations() -> tuple[dict[str, Any], dict[str, Any]]:
    """What the scenarios showed with the reference, and what they show with ours."""
    return json.loads(RECORDED.read_text(encoding="utf-8")), _observe(REPOSITORY / "src")


def record() -> None:
    """Run the scenarios with the reference, and keep what they show."""
    seen = _observe(REFERENCE).items()
    lines = [f"{json.dumps(name)}: {json.dumps(_rounded(value))}" for name, value in seen]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    shutil.rmtree(FILES, ignore_errors=True)
    FILES.mkdir()
    run_script(Path(__file__).with_name("write_checkpoints.py"), FILES, env=_environment(REFERENCE))


def _rounded(seen: Any) -> Any:
    """With the digits that are compared, and some."""
    if isinstance(seen, dict):
        return {key: _rounded(value) for key, value in seen.items()}
    if isinstance(seen, list):
        return list(map(_rounded, seen))
    return float(f"{seen:.10g}") if isinstance(seen, float) else seen


def _observe(package: Path) -> dict[str, Any]:
    env = _environment(package)
    # The reference needs processes that have not imported ours.
    alone, together = (run_script, run_under_torchrun) if package == REFERENCE else (run_forked, run_on_ranks)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seen.json"
        alone(OBSERVE, file, *MODULES, env=env, timeout_seconds=1200)
        seen = _read(file)
        together(OBSERVE, WORLD_SIZE, file, *ON_RANKS, env=env, timeout_seconds=1200)
        for rank in range(WORLD_SIZE):
            of_rank = _read(Path(f"{file}.{rank}"))
            seen.update({f"rank {rank} of {WORLD_SIZE}, {name}": value for name, value in of_rank.items()})
    return seen


def _environment(package: Path) -> dict[str, str]:
    paths = [package, REPOSITORY, REPOSITORY / "tests" / "support"]
    # A machine's GPUs are hidden already; without this variable accelerate looks for other devices on some.
    return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "ACCELERATE_USE_CPU": "true"}


def _read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    assert not found["errors"], f"scenarios that ended with an error show nothing: {found['errors']}"
    return found["seen"]  # type: ignore[no-any-return]
