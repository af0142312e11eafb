"""Texts of different lengths, padded by the user's collate function."""

from __future__ import annotations

import dataclasses

from benchmarks.comparing import evaluation_of, training_on
from benchmarks.measuring import Result, Setting
from benchmarks.ways import OursInHuggingFaceShape
from benchmarks.work import ordinary_job


def run(setting: Setting) -> list[Result]:
    job = dataclasses.replace(ordinary_job(setting.size(20_000, quick=320), workers=0), kind="texts")
    what, faces = "texts with a padding collate function", [OursInHuggingFaceShape()]
    return [training_on(what, job, setting, faces=faces), evaluation_of(what, job, setting, faces=faces)]
