"""The documentation is a site: it builds without a warning, and has a page for each public name."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytorch_accelerated import errors
from tests.support.processes import REPOSITORY
from tests.test_docs_names import MODULES, public_names

DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    built = subprocess.run(
        [*command, "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md") if "_build" not in path.parts}
    made = {path.relative_to(site) for path in site.rglob("*.html")}
    assert pages - {Path("design/README.html")} <= made


@pytest.mark.slow
@pytest.mark.parametrize(("page", "language"), [("start.html", "en"), ("zh/start.html", "zh-CN")])
def test_a_page_names_its_language(site: Path, page: str, language: str) -> None:
    assert f' lang="{language}"' in (site / page).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_reference_has_the_methods_of_the_trainer(site: Path) -> None:
    text = (site / "reference" / "trainer.html").read_text(encoding="utf-8")
    for name in ("train", "evaluate", "predict", "calculate_train_batch_loss", "create_train_dataloader", "preflight"):
        assert f'id="pytorch_accelerated.Trainer.{name}"' in text


def test_the_page_of_errors_has_every_class() -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    explained = {name for title in re.findall(r"^### (.+)$", text, re.MULTILINE) for name in title.split(", ")}
    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, BaseException)
    }
    assert explained == classes


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str, site: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html")]
    documented = {name for page in pages for name in re.findall(r'<dt [^>]*\bid="pytorch_accelerated\.([\w.]+)"', page)}
    missing = {name for name in public_names(module) if not any(entry.split(".")[-1] == name for entry in documented)}
    assert not missing
