"""The documentation is a site: it builds without a warning, and its reference explains each public name."""

import importlib
import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from pytorch_accelerated import Trainer, callbacks, errors, huggingface
from pytorch_accelerated.callbacks import TrainerCallback
from tests.chaos.size import in_release
from tests.support.processes import REPOSITORY, run_forked

DOCS = REPOSITORY / "docs"
# The modules that users import from. Deeper ones are for reading, not for importing.
MODULES = [
    "pytorch_accelerated",
    "pytorch_accelerated.extras.activations",
    "pytorch_accelerated.callbacks",
    "pytorch_accelerated.errors",
    "pytorch_accelerated.finetuning",
    "pytorch_accelerated.huggingface",
    "pytorch_accelerated.extras.looking",
    "pytorch_accelerated.extras.optimizers",
    "pytorch_accelerated.prediction",
    "pytorch_accelerated.extras.proving",
    "pytorch_accelerated.extras.recipes",
    "pytorch_accelerated.run_config",
    "pytorch_accelerated.schedulers",
    "pytorch_accelerated.tracking",
    "pytorch_accelerated.trainer",
    "pytorch_accelerated.utils",
]
# Helpers of `TrainerRunConfig` beside it.
NOT_PUBLIC = {"plain_value"}
BUILD = f"""
import json
from sphinx.application import Sphinx

app = Sphinx({str(DOCS)!r}, {str(DOCS)!r}, "out", "doctrees", "html", status=None, warningiserror=True)
app.build()
assert not app.statuscode
print(json.dumps([sorted(app.env.found_docs), sorted(app.env.domains.python_domain.objects)]))
"""


# What people type, and the page that they look for.
SEARCHES = {
    "coming_from/scikit_learn": "scikit-learn, skorch",
    "gallery": "gallery, examples",
    "how_to/audio": "audio, spectrogram",
    "how_to/best_model": "early stopping, save best model, overfitting",
    "how_to/before_training": "learning rate finder",
    "how_to/callbacks": "custom callback",
    "how_to/checkpoints": "save model, checkpoint every 1000 steps",
    "how_to/compile": "torch.compile",
    "how_to/cross_validation": "k-fold",
    "how_to/data": "streaming, batch size",
    "how_to/debugging": "nan loss, out of memory, cuda out of memory",
    "how_to/ema": "ema",
    "how_to/fine_tuning": "freeze layers, fine tuning, fine-tune",
    "how_to/history": "plot loss",
    "how_to/images": "data augmentation, image classification",
    "how_to/imbalanced": "class weights, imbalanced data",
    "how_to/metrics": "iou, f1 score",
    "how_to/multi_label": "multi-label",
    "how_to/notebooks": "colab",
    "how_to/object_detection": "object detection, bounding boxes",
    "how_to/optimizers": "lbfgs",
    "how_to/output": "progress bar",
    "how_to/own_loss": "custom loss",
    "how_to/precision": "mixed precision, gradient accumulation, gradient clipping",
    "how_to/prove": "reproducibility, seed",
    "how_to/report": "confusion matrix",
    "how_to/resume": "resume training, s3",
    "how_to/schedules": "learning rate scheduler, scheduler, warmup",
    "how_to/segmentation": "segmentation",
    "how_to/serving": "onnx",
    "how_to/several_machines": "slurm",
    "how_to/several_models": "gan",
    "how_to/several_processes": "multi-gpu, ddp",
    "how_to/sharded_models": "fsdp",
    "how_to/sweep": "hyperparameter search",
    "how_to/tabular": "tabular",
    "how_to/time_series": "time series",
    "how_to/tracking": "wandb, tensorboard",
    "how_to/transformers_models": "lora, language model",
}


class Site(NamedTuple):
    """Its folder, and the names of its pages and of the entries of its reference."""

    folder: Path
    pages: set[str]
    entries: set[str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    built = run_forked(BUILD, cwd=(folder := tmp_path_factory.mktemp("site")))
    pages, entries = json.loads(built.stdout.splitlines()[-1])
    return Site(folder / "out", set(pages), set(entries))


@in_release  # `make docs`, which CI runs, too, builds all of it
def test_the_site_is_built_without_a_warning(site: Site) -> None:
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert {page for page in pages if not page.startswith("_build")} - {"design/README"} <= site.pages


@in_release
@pytest.mark.skipif(shutil.which("node") is None, reason="the search runs in a browser, or in Node.js")
def test_a_search_finds_the_page_first(site: Site) -> None:
    looked_for = {words: page for page, several in SEARCHES.items() for words in several.split(", ")}
    command = ["node", str(REPOSITORY / "tests" / "support" / "search.js"), str(site.folder)]
    found = subprocess.run(command, input="\n".join(looked_for), capture_output=True, text=True, check=True).stdout
    first = [results.split(" ")[0] for results in found.splitlines()]
    assert dict(zip(looked_for, first, strict=True)) == looked_for


def test_pages_are_also_there_as_markdown_with_a_list_of_them(tmp_path: Path) -> None:
    pages = ["index", "how_to/metrics", "zh/index"]
    env = SimpleNamespace(
        found_docs=pages,
        doc2path=lambda name: DOCS / f"{name}.md",
        titles={name: SimpleNamespace(astext=lambda name=name: f"Title of {name}") for name in pages},
    )
    app = SimpleNamespace(builder=SimpleNamespace(name="html"), outdir=tmp_path, env=env)
    runpy.run_path(str(DOCS / "conf.py"))["write_markdown"](app, None)
    assert (tmp_path / "how_to" / "metrics.md").read_bytes() == (DOCS / "how_to" / "metrics.md").read_bytes()
    listed = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert listed.startswith((REPOSITORY / "src" / "pytorch_accelerated" / "guide.md").read_text(encoding="utf-8"))
    assert listed.endswith("- [Title of index](index.md)\n- [Title of how_to/metrics](how_to/metrics.md)\n")


def test_every_file_that_a_page_links_to_exists() -> None:
    """Also where no site is built from a page."""
    for page in [*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md")]:
        text = "" if "_build" in page.parts else page.read_text(encoding="utf-8")
        targets = re.findall(r"\]\(([^)#\s]+)", re.sub(r"(?s)```.*?```", "", text))
        local = [target for target in targets if not target.startswith(("http:", "https:"))]
        assert [target for target in local if not (page.parent / target).exists()] == [], page


def test_the_page_of_errors_has_every_class() -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    explained = {name for title in re.findall(r"^### (.+)$", text, re.MULTILINE) for name in title.split(", ")}
    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, BaseException)
    }
    assert explained == classes


def test_the_table_of_callbacks_has_every_one() -> None:
    text = (DOCS / "reference" / "callbacks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| \S+`~pytorch_accelerated\.callbacks\.(\w+)` \| .+ \|$", text, re.MULTILINE)
    named = {name: getattr(callbacks, name) for name in callbacks.__all__}
    public = [name for name, value in named.items() if inspect.isclass(value) and issubclass(value, TrainerCallback)]
    assert sorted(rows) == sorted(public)
    assert [name for name in public if not re.search("::\\n|>>> ", named[name].__doc__)] == []  # each has an example


def public_names(module: str) -> dict[str, Any]:
    """The classes and functions of a module that users import from it."""
    found = importlib.import_module(module)
    own = [name for name, value in vars(found).items() if getattr(value, "__module__", None) == module]
    names = [name for name in getattr(found, "__all__", own) if not name.startswith("_") and name not in NOT_PUBLIC]
    values = {name: getattr(found, name) for name in names}
    return {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)}


@in_release
@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str, site: Site) -> None:
    assert not set(public_names(module)) - {entry.split(".")[-1] for entry in site.entries}


@in_release
@pytest.mark.parametrize("kind", [Trainer, huggingface.Trainer])
def test_the_reference_has_every_method_of_the_trainers(kind: type, site: Site) -> None:
    prefix = "pytorch_accelerated" if kind is Trainer else "pytorch_accelerated.huggingface"
    methods = {name for name, _ in inspect.getmembers(kind, inspect.isfunction)}
    public = {name for name in methods if not name.startswith(("_", "internal_"))}
    assert not {f"{prefix}.Trainer.{name}" for name in public} - site.entries


def test_the_page_of_the_command_line_has_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "reference" / "command_line.md").read_text(encoding="utf-8")
    shown = [tuple(words.split()) for words in re.findall(r"^```\{command-help\}(.*)$", text, re.MULTILINE)]
    assert shown == list(commands(capsys, monkeypatch))


def commands(capsys: Any, monkeypatch: pytest.MonkeyPatch, *above: str) -> Iterator[tuple[str, ...]]:
    """A command and those below it, whose names are in the help, indented by four spaces."""
    yield above
    monkeypatch.setattr(sys, "argv", ["pytorch_accelerated", *above, "--help"])
    monkeypatch.delitem(sys.modules, "pytorch_accelerated.__main__", raising=False)  # runpy warns about a second one
    with pytest.raises(SystemExit):
        runpy.run_module("pytorch_accelerated", run_name="__main__", alter_sys=False)
    for name in re.findall(r"^    (\w+)(?:  |$)", capsys.readouterr().out, re.MULTILINE):
        yield from commands(capsys, monkeypatch, *above, name)
