"""The benchmark cases, one per file. Each has a function `run` that returns its tables."""

from collections.abc import Callable

from benchmarks.cases import (
    arrow,
    bert,
    beside,
    checkpoint,
    data_wait,
    ddp,
    epoch,
    evaluation,
    face,
    idle,
    loader,
    long_step,
    memory,
    ordinary,
    prediction,
    start,
    step,
    stream,
    text,
    watched,
)
from benchmarks.measuring import Result, Setting

CASES: dict[str, Callable[[Setting], list[Result]]] = {
    "step": step.run,
    "idle": idle.run,
    "watched": watched.run,
    "epoch": epoch.run,
    "ordinary": ordinary.run,
    "face": face.run,
    "bert": bert.run,
    "text": text.run,
    "arrow": arrow.run,
    "stream": stream.run,
    "loader": loader.run,
    "evaluation": evaluation.run,
    "prediction": prediction.run,
    "long_step": long_step.run,
    "start": start.run,
    "memory": memory.run,
    "data_wait": data_wait.run,
    "ddp": ddp.run,
    "checkpoint": checkpoint.run,
    "beside": beside.run,
}
