"""What commands print for programs is what the page of the command line says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.extras.proving.factory import make_run
from tests.chaos.size import in_release
from tests.report.test_verdict import write_result, write_runs
from tests.support.processes import REPOSITORY
from tests.support.tool import run_tool

# Objects with keys of their own, or of a class that the reference describes.
FREE = {"facts", "runs[].error", "settings", "gradient_norms"}
SCRIPT = """
import torch
from torch import nn
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback

def make_run(folder=None, rate=0.1):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    model = nn.Linear(3, 1)
    saving = [] if folder is None else [SaveTrainingStateCallback(folder, save_every_n_steps=2)]
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), rate), callbacks=saving, seed=1)
    return trainer, {"train_dataset": data, "num_epochs": 1, "per_device_batch_size": 4}
"""
STATES = ("list", "verify", "show", "prune", "average")


def keys_of(value: Any, above: str = "") -> set[str]:
    """The keys of an object and of what is in it, as the tables have them."""
    if isinstance(value, list):
        return set().union({above}, *(keys_of(each, f"{above}[]") for each in value)) - {f"{above}[]"}
    if not isinstance(value, dict) or above in FREE:
        return {above}
    inner = (keys_of(each, f"{above}.{key}".lstrip(".")) for key, each in value.items())
    return set().union({above} if above else set(), *inner)


def documented(command: str) -> set[str]:
    """The keys in the tables below the title of a command."""
    page = (REPOSITORY / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    section = re.split(rf"^##+ {command}$", page, flags=re.MULTILINE)[1]
    section = re.split(r"^##", section, flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`(.+?)`", cell)}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, list[object]]:
    """The arguments of each command."""
    from tests.checkpointing.test_tool import save

    for number in (1, 2, 3):
        save(tmp_path / "states" / f"step_{number}", 10 * number, 0.5)
    for name, shift in (("a", 0.0), ("b", 0.1)):
        write_runs(tmp_path / name, {seed: seed / 10 + shift for seed in (1, 2, 3)})
    write_result(tmp_path / "failed", status="failed", error={"type": "ValueError", "message": "", "notes": []})
    commands: dict[str, list[object]] = {f"checkpoints {name}": [tmp_path / "states"] for name in STATES}
    commands["checkpoints average"] += ["--output", tmp_path / "mean.pt"]
    commands["checkpoints prune"] += ["--keep-last", 2, "--yes"]
    script = tmp_path / "script_of_commands.py"
    script.write_text(SCRIPT)
    for folder, rate in (("one", 0.1), ("other", 0.2)):
        trainer, arguments = make_run(f"{script}:make_run({str(tmp_path / folder)!r}, {rate})")
        trainer.train(**arguments)
    again, again_b = f"{script}:make_run(rate=0.1)", f"{script}:make_run(rate=0.2)"
    commands["diff"] = [tmp_path / "one", tmp_path / "other", "--run", again, "--run-b", again_b]
    commands["replay"] = [tmp_path / "one", 4, "--run", again]
    commands["prove"] = ["--run", again, "--updates", 2]
    commands["runs"] = [tmp_path]
    commands["compare"] = [tmp_path / "a", tmp_path / "b", "--seeds", "--output", tmp_path / "page.html"]
    return commands


@pytest.mark.parametrize(
    "command",
    [*(f"checkpoints {name}" for name in STATES), "runs", "compare", "diff", "replay"]
    + [pytest.param("prove", marks=in_release)],  # which starts processes
)
def test_the_page_has_every_key_that_a_command_prints(command: str, places: Any, capsys: pytest.CaptureFixture[str]):
    assert run_tool(*command.split(), *places[command], "--json") == (command == "diff")
    found = json.loads(capsys.readouterr().out)
    assert (found.pop("format"), found.pop("command")) == (1, command)
    found = keys_of(found)
    listed = documented(command)
    assert found - {key.partition("[]")[0] for key in listed if "[]" in key} == listed


def test_json_is_all_that_is_printed(places: Any, capfd: pytest.CaptureFixture[str]):
    run_tool("checkpoints", "list", *places["checkpoints list"], "--json")
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1
    assert printed.out.startswith('{"format": 1, "command": "checkpoints list", ')
