"""The tables of results on pages in docs/ are those of the committed results."""

import pytest
from benchmarks import pages

PAGES = pages.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_results(page):
    assert pages.with_tables(PAGES[page]) == PAGES[page], "write them anew: python -m benchmarks.pages"


def test_a_figure_that_was_changed_is_noticed():
    text = "<!-- table: kills -->\n\n| a run killed once | 1,000,000 |\n\n<!-- end of table -->"
    assert "| states lost: 0 |" not in text
    assert "states lost: 0" in pages.with_tables(text)
