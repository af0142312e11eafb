"""An `IterableDataset`, which distributes its rows over the loader processes itself."""

from __future__ import annotations

import dataclasses

from benchmarks.comparing import evaluation_of, training_on
from benchmarks.measuring import Result, Setting
from benchmarks.ways import OursInHuggingFaceShape
from benchmarks.work import ordinary_job


def run(setting: Setting) -> list[Result]:
    # A multiple of both batch sizes times the workers, so that all make the same batches.
    job = dataclasses.replace(ordinary_job(setting.size(20_480, quick=512), workers=0), kind="stream")
    faces = [OursInHuggingFaceShape()]
    return [
        table_of("a stream", dataclasses.replace(job, workers=workers), setting, faces=faces)
        for workers in (0, 2)
        for table_of in (training_on, evaluation_of)
    ]
