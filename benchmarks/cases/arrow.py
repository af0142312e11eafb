"""A `datasets.Dataset`: its rows as dicts of lists, which the user collates, and as dicts of tensors."""

from __future__ import annotations

import dataclasses

from benchmarks.comparing import evaluation_of, training_on
from benchmarks.measuring import Result, Setting
from benchmarks.ways import OursInHuggingFaceShape
from benchmarks.work import ordinary_job

KINDS = {"arrow": "a datasets.Dataset, without a format", "arrow of tensors": 'a datasets.Dataset, format "torch"'}


def run(setting: Setting) -> list[Result]:
    job, faces = ordinary_job(setting.size(10_000, quick=320), workers=0), [OursInHuggingFaceShape()]
    return [
        table_of(what, dataclasses.replace(job, kind=kind), setting, faces=faces)
        for kind, what in KINDS.items()
        for table_of in (training_on, evaluation_of)
    ]
