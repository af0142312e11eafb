"""What is built from the repository is complete, and works with nothing but the hard dependencies."""

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pytorch_accelerated
from tests.chaos.size import in_release
from tests.support.processes import REPOSITORY, run_script

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


PACKAGE = "pytorch_accelerated"

TRAIN = """
import json, torch
import pytorch_accelerated
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import ReportCallback, SaveTrainingStateCallback
from pytorch_accelerated.errors import MissingDependencyError

torch.manual_seed(0)
x = torch.randn(67, 4)
data = (x, x.sum(dim=1, keepdim=True))
model = torch.nn.Linear(4, 1)
callbacks = [ReportCallback("run.html"), SaveTrainingStateCallback("states")]
trainer = Trainer(model, torch.nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=0.1), callbacks=callbacks)
trainer.train(data, num_epochs=3, eval_dataset=data, per_device_batch_size=16)
assert trainer.predict(data).shape == (67, 1)
trainer.save_checkpoint("model.pt")
trainer.load_checkpoint("model.pt")
losses = trainer.run_history.get_metric_values("eval_loss_epoch")
assert losses[-1] < losses[0]

messages = []
for ask in (trainer.run_history.plot, trainer.run_history.to_dataframe):
    try:
        ask()
    except MissingDependencyError as error:
        messages.append(str(error))
print(json.dumps([pytorch_accelerated.__file__, pytorch_accelerated.__version__, messages]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=REPOSITORY, check=True)
    return folder


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_every_file_of_the_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    source = REPOSITORY / "src"
    wanted = {path.relative_to(source).as_posix() for path in (source / PACKAGE).rglob("*") if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    found = set(contents(wheel))
    assert {f"{PACKAGE}/py.typed", f"{PACKAGE}/extras/report/page.js"} <= wanted
    assert {name for name in found if ".dist-info/" not in name} == wanted
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in found)


def test_the_description_has_no_relative_link(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (described,) = [text for name, text in contents(wheel).items() if name.endswith(".dist-info/METADATA")]
    headers, text = described.decode("utf-8").split("\n\n", 1)
    assert "Description-Content-Type: text/markdown" in headers
    assert text.startswith("# pytorch-accelerated\n")
    assert text.count("```") == (REPOSITORY / "README.md").read_text(encoding="utf-8").count("```")
    targets = re.findall(r"\]\(([^)\s]*)\)|(?:src|srcset|href)=\"([^\"]*)\"", re.sub(r"(?s)```.*?```", "", text))
    assert all(target.startswith(("https://", "#")) for pair in targets for target in pair if target)


def test_the_source_distribution_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (source,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=folder, check=True)
    assert contents(tmp_path / wheel.name) == contents(wheel)


@in_release
@pytest.mark.processes
def test_a_new_environment_with_the_hard_dependencies_alone_trains_and_names_missing_packages(
    built: Path, tmp_path: Path
) -> None:
    python = environment_with_hard_dependencies(tmp_path / "environment")
    (wheel,) = built.glob("*.whl")
    install = ["-m", "pip", "-q", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, *install], check=True)

    printed = run(python, "-c", TRAIN, folder=tmp_path).splitlines()[-1]
    file, version, messages = json.loads(printed)
    assert Path(file).is_relative_to(tmp_path / "environment")
    assert version == pytorch_accelerated.__version__
    assert [message.partition("pip install ")[2] for message in messages] == ["matplotlib", "pandas"]
    assert "<html" in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "compare" in run(python, "-m", PACKAGE, "--help", folder=tmp_path)


def test_nothing_tells_to_install_this_package_by_a_name_that_is_not_its_own() -> None:
    """An index knows another package by it: what installs this one is a clone or a wheel."""
    folders = [REPOSITORY / name for name in ("docs", "examples", "src")]
    files = [path for folder in folders for kind in ("ipynb", "md", "py") for path in folder.rglob(f"*.{kind}")]
    told = re.compile(r"pip install.*\bpytorch[-_]accelerated\b(?!-\d)")
    found = [str(path) for path in [*files, *REPOSITORY.glob("*.md")] if told.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_the_changelog_begins_with_this_version() -> None:
    newest = re.search(r"^## \[(.*)\] - ", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == pytorch_accelerated.__version__.partition(".dev")[0]


def environment_with_hard_dependencies(folder: Path) -> Path:
    """A new environment with links to the hard dependencies and what they need. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    waiting = set(HARD_DEPENDENCIES)
    done: set[str] = set()
    while waiting:
        name = waiting.pop()
        done.add(name)
        distribution = metadata.distribution(name)
        for file in distribution.files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).is_symlink():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting |= {requirement.name} - done
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [python, "-P", *arguments], cwd=folder, env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
