"""The page of one run, or of several side by side: one HTML file that needs no network.

Styles, script and the library that draws curves are put into it, together with the data as JSON, from which
`reading.py` gets the runs back.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import string
from collections.abc import Sequence

from pytorch_accelerated.report.contents import RunContents

DATA_BEGINS = '<script id="run-data" type="application/json">'
DATA_ENDS = "</script>"


def page_of(runs: Sequence[RunContents], title: str) -> str:
    """The page that shows `runs`: a report of one, or a comparison of several."""
    data = json.dumps({"runs": [run.to_json() for run in runs]}, allow_nan=False, separators=(",", ":"))
    return string.Template(_file("page.html")).substitute(
        title=html.escape(title),
        chart_style=_file("vendored/uplot/uPlot.min.css"),
        style=_file("page.css"),
        data=data.replace("<", "\\u003c"),  # so that no text of a run can end the script or begin another one
        chart_script=_file("vendored/uplot/uPlot.iife.min.js"),
        script=_file("page.js"),
    )


def data_in(page: str) -> str | None:
    """The JSON in a page of `page_of`; None if there is none."""
    begin = page.find(DATA_BEGINS)
    end = page.find(DATA_ENDS, begin)
    return None if begin < 0 or end < 0 else page[begin + len(DATA_BEGINS) : end]


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
