"""Runs are made anew from scripts, with what scripts have: classes, neighbours, arguments."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.proving.factory import make_run

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import Dataset

from neighbour_of_script import FACTOR
from pytorch_accelerated import Trainer


class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((2,), index / 12), torch.full((1,), index * FACTOR)


def make_run(seed=0, sizes=(4,), workers=0, states="states"):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=(), seed=seed)
    loader = {"num_workers": workers, "multiprocessing_context": "spawn" if workers else None}
    arguments = {"train_dataset": Numbers(), "num_epochs": 1, "per_device_batch_size": sizes[0]}
    return trainer, {**arguments, "train_dataloader_kwargs": loader, "resume_from": states}


def make_nothing():
    return [1, 2]


def make_error():
    raise KeyError("of the user's own")


constant = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write(tmp_path, "0.5")


@pytest.fixture(autouse=True)
def _imports_are_as_before() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if name in ("script_of_run", "neighbour_of_script", "broken_script"):
            del sys.modules[name]


def write(folder: Path, factor: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "neighbour_of_script.py").write_text(f"FACTOR = {factor}\n")
    (folder / "script_of_run.py").write_text(SCRIPT)
    return folder / "script_of_run.py"


def test_a_script_makes_a_run_with_literals_as_arguments(script: Path) -> None:
    trainer, arguments = make_run(f"{script}:make_run(seed=7, sizes=[3])", without=["resume_from"])
    assert arguments.keys() == {"train_dataset", "num_epochs", "per_device_batch_size", "train_dataloader_kwargs"}
    trainer.train(**arguments)
    assert (trainer.run_state.updates, trainer.run_config.seed) == (4, 7)
    assert make_run(f"{script}:make_run(7)")[1]["resume_from"] == "states"
    assert make_run(f"{script}:make_run(states='s3://bucket/states')")[1]["resume_from"] == "s3://bucket/states"


@pytest.mark.processes
def test_workers_find_the_classes_of_a_script(script: Path) -> None:
    losses = []
    for workers in (0, 1):
        trainer, arguments = make_run(f"{script}:make_run(seed=7, workers={workers})", without=["resume_from"])
        losses.append(trainer.train(**arguments).get_metric_values("train_loss_epoch"))
    assert losses[0] == losses[1]


def test_each_script_has_its_own_neighbours(tmp_path: Path) -> None:
    places = [write(tmp_path / name, factor) for name, factor in (("a", "1.0"), ("b", "2.0"))]
    factors = [make_run(f"{place}:make_run")[1]["train_dataset"][1][1].item() for place in [*places, places[0]]]
    assert factors == [1.0, 2.0, 1.0]


def test_a_module_on_the_path_makes_a_run(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(script.parent)
    assert make_run("script_of_run:make_run")[1]["per_device_batch_size"] == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("", "names no function"),
        (":make_run(seed=torch.tensor(1))", "names no function"),
        (":make_run(", "names no function"),
        (":nothing_of_that_name", "has no function 'nothing_of_that_name'"),
        (":constant", "has no function 'constant'"),
        (":make_nothing", "returned a list, not a trainer and a dict"),
    ],
)
def test_a_place_that_makes_no_run_is_explained(call: str, words: str, script: Path) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_run(f"{script}{call}")


def test_errors_of_scripts_are_their_own(script: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="of the user's own"):
        make_run(f"{script}:make_error")
    with pytest.raises(ConfigurationError, match="There is no script .*gone.py"):
        make_run(f"{tmp_path / 'gone.py'}:make_run")
    broken = tmp_path / "broken_script.py"
    broken.write_text("def make_run(:\n")
    with pytest.raises(SyntaxError):
        make_run(f"{broken}:make_run")
    with pytest.raises(ModuleNotFoundError):
        make_run("no_module_of_that_name:make_run")
