"""The pages that are written by a script say what the code says."""

from pathlib import Path

import pytest

from scripts import huggingface_pages as pages


@pytest.mark.parametrize(
    ("page", "text"),
    [(pages.ARGUMENTS_PAGE, pages.arguments_page), (pages.FACTS_PAGE, pages.facts_page)],
    ids=["arguments", "facts"],
)
def test_a_page_is_up_to_date(page: Path, text: object) -> None:
    assert callable(text)
    assert page.read_text(encoding="utf-8") == text(), "run: python scripts/huggingface_pages.py"


def test_every_test_of_the_face_that_is_marked_is_listed() -> None:
    listed = {fact.test for fact in pages.facts(pages.TESTS)}
    assert "test_fields.py::test_defaults_are_those_of_transformers" in listed
    assert len(listed) > 40


@pytest.mark.parametrize(
    "marker", ['@pytest.mark.fact("no section")', "@pytest.mark.fact()", "@pytest.mark.fact(TEXT)"]
)
def test_a_marker_without_a_fact_is_refused(marker: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(f"{marker}\ndef test_something():\n    pass\n")
    with pytest.raises(ValueError, match=r"test_it\.py::test_something is marked with"):
        list(pages.facts(tmp_path))
