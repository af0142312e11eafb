"""What commands print for programs is what the page of the command line says."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.extras.proving.factory import make_run
from tests.chaos.size import in_release
from tests.report.test_verdict import write_result, write_runs
from tests.support.processes import REPOSITORY
from tests.support.tool import run_tool

# Objects with keys of their own, or of a class that the reference describes.
FREE = {"facts", "runs[].error", "runs[].branch", "settings", "gradient_norms", "parted[].contents", "changed"}
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
    branched = f"{script}:make_run({str(tmp_path / 'branch')!r}, 0.2)"
    commands["branch"] = [tmp_path / "one", 4, tmp_path / "branch", "--run", again, "--run-b", branched]
    commands["prove"] = ["--run", again, "--updates", 2]
    commands["runs"] = [tmp_path]
    commands["compare"] = [tmp_path / "a", tmp_path / "b", "--seeds", "--output", tmp_path / "page.html"]
    return commands


@pytest.mark.parametrize(
    "command",
    [*(f"checkpoints {name}" for name in STATES), "runs", "compare", "diff", "replay", "branch"]
    + [pytest.param("prove", marks=in_release)],  # which starts processes
)
def test_the_page_has_every_key_that_a_command_prints(command: str, places: Any, capsys: pytest.CaptureFixture[str]):
    assert run_tool(*command.split(), *places[command], "--json") == (command == "diff")
    found = json.loads(capsys.readouterr().out)
    assert (found.pop("format"), found.pop("command")) == (1, command)
    found = keys_of(found)
    listed = documented(command)
    assert found - {key.partition("[]")[0] for key in listed if "[]" in key} == listed


ENDINGS = {
    "raise KeyError('no data')": (3, "KeyError"),
    "raise SystemExit(0)": (3, "SystemExit"),
    "open('gone.csv')": (3, "FileNotFoundError"),
    "import torch; torch.ones(2) @ torch.ones(3)": (3, "RuntimeError"),
    "def (": (3, "SyntaxError"),
    "pass": (2, "ConfigurationError"),  # which returns no trainer
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("is_in_training", [False, True])
def test_an_error_of_the_script_is_an_object_with_an_exit_code_of_its_own(
    ending: str, is_in_training: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, kind = ENDINGS[ending]
    script = tmp_path / "script_that_ends.py"
    script.write_text(f"def make_run():\n    {ending}\n")
    if is_in_training and ending not in ("def (", "pass"):
        own = SCRIPT.replace("Trainer(model", "Own(model")
        script.write_text(
            f"{own}\nclass Own(Trainer):\n    def calculate_train_batch_loss(self, batch):\n        {ending}\n"
        )
    for command in (["prove", "--updates", 2], ["replay", tmp_path, 1], ["diff", tmp_path, tmp_path]):
        if command[0] == "prove" or not is_in_training:
            is_first = command[0] == "diff"  # it looks at the folders before
            assert run_tool(*command, "--run", f"{script}:make_run", "--json") == (2 if is_first else code)
            printed = capsys.readouterr()
            assert json.loads(printed.out)["error"]["type"] == ("ConfigurationError" if is_first else kind)
            assert ("Traceback" in printed.err) == (code == 3 and not is_first)


def test_a_name_that_a_script_lacks_is_answered_with_one_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script = tmp_path / "script_without_the_name.py"
    script.write_text(SCRIPT)
    assert run_tool("replay", tmp_path, 1, "--run", f"{script}:make_rum") == 2
    assert "has no function 'make_rum'. Did you mean 'make_run'?" in capsys.readouterr().err
    script.write_text("from os.path import *\nglobals()['made'] = lambda: 3")
    assert run_tool("replay", tmp_path, 1, "--run", f"{script}:made") == 2
    assert "returned a int" in capsys.readouterr().err


def test_what_a_script_and_its_children_print_stays_off_the_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = tmp_path / "script_with_noise.py"
    noise = "import os, subprocess, sys\nprint(1)\nsubprocess.run(['echo', '2'])\n"
    noise += "os.write(1, b'3')\nsys.__stdout__.write('5')\n"
    script.write_text(f"{noise}subprocess.run(['echo', '4'], stdout=sys.stdout)\n{SCRIPT}")
    run_tool("replay", tmp_path, 1, "--run", f"{script}:make_run", "--json")
    assert sys.__stdout__ is not None
    sys.__stdout__.flush()
    printed = capfd.readouterr()
    assert printed.out.startswith('{"format": 1, "command": "replay", "error": {')
    assert printed.out.count("\n") == 1
    os.write(1, b"again")
    assert capfd.readouterr().out == "again"


def test_json_is_all_that_is_printed(places: Any, capfd: pytest.CaptureFixture[str]):
    run_tool("checkpoints", "list", *places["checkpoints list"], "--json")
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1
    assert printed.out.startswith('{"format": 1, "command": "checkpoints list", ')
