"""The documentation is a site: it builds without a warning, and has a page for each public name."""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated import errors, huggingface
from pytorch_accelerated.__main__ import main
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


@pytest.fixture(scope="module")
def documented(site: Path) -> set[str]:
    """The full names of the entries of the reference, without that of the package."""
    pages = [page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html")]
    return {name for page in pages for name in re.findall(r'<dt [^>]*\bid="pytorch_accelerated\.([\w.]+)"', page)}


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str, documented: set[str]) -> None:
    assert not set(public_names(module)) - {entry.split(".")[-1] for entry in documented}


# Written in annotations, and no class of this package that users hold in their hands.
NOT_IN_THE_REFERENCE = {
    "HasValues",  # a protocol: a GenerationConfig of transformers, for example
}


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_what_users_are_given_is_in_the_reference(module: str, documented: set[str]) -> None:
    """Classes that public methods return, that hooks get, and that attributes of public classes are."""
    own = classes_of_the_package()
    given = {name for value in public_names(module).values() for name in names_in_annotations(value)}
    assert not (given & own) - {entry.split(".")[-1] for entry in documented} - NOT_IN_THE_REFERENCE


def classes_of_the_package() -> set[str]:
    sources = (REPOSITORY / "src").rglob("*.py")
    return {
        name for path in sources for name in re.findall(r"^class ([A-Z]\w+)", path.read_text("utf-8"), re.MULTILINE)
    }


def names_in_annotations(value: Any) -> Iterator[str]:
    names = dir(value) if inspect.isclass(value) else []
    for name, member in [(name, inspect.getattr_static(value, name)) for name in names] or [(value.__name__, value)]:
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and not name.startswith(("_", "internal_")):
            noted = inspect.get_annotations(function)
            yield from words(noted if name.startswith("on_") else {"return": noted.get("return")})
    if inspect.isclass(value):
        yield from words({k: v for k, v in inspect.get_annotations(value).items() if not k.startswith("_")})


def words(annotations: dict[str, Any]) -> set[str]:
    return {word for annotation in annotations.values() for word in re.findall(r"\w+", str(annotation))}


@pytest.mark.slow
def test_the_reference_has_what_the_hugging_face_trainer_inherits(documented: set[str]) -> None:
    methods = {name for name, _ in inspect.getmembers(huggingface.Trainer, inspect.isfunction) if name[0] != "_"}
    assert not {f"huggingface.Trainer.{name}" for name in methods if not name.startswith("internal_")} - documented


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(path.stem for path in (DOCS / "how_to").glob("*.md") if path.stem != "index"))
def test_a_page_links_the_reference_of_the_names_in_its_text(page: str, site: Path) -> None:
    text = (site / "how_to" / f"{page}.html").read_text(encoding="utf-8")
    assert re.search(r'href="\.\./reference/\w+\.html#pytorch_accelerated\.', text)


@pytest.mark.slow
def test_names_on_pages_about_transformers_link_that_api(site: Path) -> None:
    text = (site / "coming_from" / "transformers.html").read_text(encoding="utf-8")
    assert "#pytorch_accelerated.huggingface.TrainingArguments" in text
    assert '#pytorch_accelerated.Trainer"' not in text


@pytest.mark.slow
def test_the_reference_shows_no_private_base_and_no_property_cut_at_a_colon(site: Path) -> None:
    for page in (site / "reference").glob("*.html"):
        text = re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8"))
        assert not re.search(r"Bases: *(_|object|\n)", text), page.name
        assert not re.search(r"^(Type|Variables):$", text, re.MULTILINE), page.name


def test_the_page_of_the_command_line_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "reference" / "command_line.md").read_text(encoding="utf-8")
    shown = [tuple(words.split()) for words in re.findall(r"^```\{command-help\}(.*)$", text, re.MULTILINE)]
    assert shown == list(commands(capsys))


def commands(capsys: pytest.CaptureFixture[str], *above: str) -> Iterator[tuple[str, ...]]:
    """A command and those below it, whose names are in the help, indented by four spaces."""
    yield above
    with pytest.raises(SystemExit):
        main([*above, "--help"])
    for name in re.findall(r"^    (\w+)(?:  |$)", capsys.readouterr().out, re.MULTILINE):
        yield from commands(capsys, *above, name)
