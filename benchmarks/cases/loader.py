"""The loader alone: samples per second from tensors in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

from benchmarks.data import Batch
from benchmarks.measuring import Result, Setting, Target, take_turns
from benchmarks.ways import RawLoopOnWholeBatches
from benchmarks.work import Job
from pytorch_accelerated.trainer import Trainer


def run(setting: Setting) -> list[Result]:
    job = Job(samples=setting.size(60_000, quick=2_000), batch_size=256, features=64, hidden=(128,), kind="tensors")
    feed = job.feed()
    ours = _loader_of_a_run(job, shuffle=True)
    new_passes: dict[str, Callable[[], Iterable[Batch]]] = {
        "DataLoader": lambda: feed.loader(shuffle=True),
        "one permutation, whole-batch indexing": lambda: RawLoopOnWholeBatches().batches(feed, shuffle=True),
        "ours": lambda: ours,
    }
    _check_equal(feed.loader(shuffle=False), _loader_of_a_run(job, shuffle=False))
    measures = {name: partial(_samples_per_second, new_pass, job) for name, new_pass in new_passes.items()}
    for measure in measures.values():
        measure()
    return [
        Result(
            title=f"The loader alone ({job.samples:,} samples of a TensorDataset, shuffled, batch {job.batch_size})",
            unit="samples/s",
            more_is_better=True,
            rounds=take_turns(measures, setting.repeats),
            baseline="DataLoader",
            targets=[Target("ours", at_least=40)],
        )
    ]


def _loader_of_a_run(job: Job, *, shuffle: bool) -> Iterable[Batch]:
    """The loader that a training run creates for itself."""
    trainer = Trainer(*job.parts(), callbacks=(), seed=0)
    loader_kwargs = {"shuffle": shuffle}
    trainer.train(job.data(), 1, None, job.batch_size, max_num_train_steps=1, train_dataloader_kwargs=loader_kwargs)
    return trainer._train_dataloader


def _check_equal(expected: Iterable[Batch], batches: Iterable[Batch]) -> None:
    for one, other in zip(expected, batches, strict=True):
        for tensors in zip(one, other, strict=True):
            torch.testing.assert_close(*tensors, rtol=0, atol=0)


def _samples_per_second(new_pass: Callable[[], Iterable[Batch]], job: Job) -> float:
    start = time.perf_counter()
    for _ in new_pass():
        pass
    return job.samples / (time.perf_counter() - start)
