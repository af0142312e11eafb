"""The work of each process in the case `ddp`, under torch.distributed.run.

Arguments: the kind of data, or "lanes" for a long step with and without them; samples of the short run, samples of the
long run, rounds, and the file to write.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.data import ReadyBatches
from benchmarks.measuring import measure_steps
from benchmarks.ways import Ours, RawLoop, Way
from benchmarks.work import Feed, Job, Parts
from pytorch_accelerated import Trainer


def batches_of_rank(feed: Feed) -> ReadyBatches:
    """This rank's batches, created beforehand."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, targets = (torch.cat(tensor.split(feed.batch_size)[rank::ranks]) for tensor in feed.data.tensors)
    return ReadyBatches(inputs, targets, feed.batch_size)


class RawDDPLoop(RawLoop):
    """A hand-written loop over `batches_of_rank`."""

    library = "raw DDP loop, ready batches"

    def train(self, parts: Parts, feed: Feed) -> None:
        super().train(parts._replace(model=DistributedDataParallel(parts.model)), feed)

    def batches(self, feed: Feed, *, shuffle: bool) -> Iterable[Any]:
        return batches_of_rank(feed)


class RawDDPLoopWithLoader(RawDDPLoop):
    """A hand-written loop, including the loader."""

    library = "raw DDP loop, DataLoader"

    def batches(self, feed: Feed, *, shuffle: bool) -> Iterable[Any]:
        return DataLoader(feed.data, feed.batch_size, sampler=DistributedSampler(feed.data, shuffle=False))


class AccelerateByHandOnRanks(RawDDPLoop):
    """A hand-written loop over objects prepared by accelerate."""

    library = "accelerate by hand, ready batches"

    def train(self, parts: Parts, feed: Feed) -> None:
        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(parts.model, parts.optimizer)
        for inputs, targets in self.batches(feed, shuffle=False):
            accelerator.backward(parts.loss_func(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


class OursOnReadyBatches(Ours):
    """This library, on `batches_of_rank`."""

    def train(self, parts: Parts, feed: Feed) -> None:
        super().train(parts, dataclasses.replace(feed, data=batches_of_rank(feed)))

    def _loader_kwargs(self, feed: Feed) -> dict[str, Any]:
        return {"is_sharded": True}


class OursInOrder(Ours):
    """This library, which loads; each update has the same samples as in the hand-written loop."""

    library = "ours, with loading"

    def _loader_kwargs(self, feed: Feed) -> dict[str, Any]:
        return {**super()._loader_kwargs(feed), "shuffle": False}


class OursWithLanes(OursInOrder):
    """This library, with a lane for each process: the same samples in each update."""

    library = "ours, lanes"

    def _trainer(self, parts: Parts, feed: Feed) -> Any:
        return Trainer(*parts, callbacks=(), lanes=dist.get_world_size())


def main() -> None:
    kind, short_samples, long_samples, repeats, file = sys.argv[1:]
    dist.init_process_group("gloo")
    shape: dict[str, Any] = {"kind": kind}
    if kind == "lanes":
        shape = {"kind": "rows", "features": 512, "hidden": (768, 768, 768)}  # as in the case `long_step`
    short, long = (Job(samples=int(size), **shape) for size in (short_samples, long_samples))
    ways: list[Way] = [RawDDPLoopWithLoader(), OursInOrder(), OursInOrder(is_lean=False)]
    if kind == "lanes":
        ways[-1] = OursWithLanes()
    if kind == "tensors":
        ways += [RawDDPLoop(), AccelerateByHandOnRanks(), OursOnReadyBatches(), OursOnReadyBatches(is_lean=False)]
    measured = measure_steps(
        ways,
        short,
        long,
        int(repeats),
        units_per_second=1e6 * dist.get_world_size(),  # the ranks divide the steps of a job
        tolerance=1e-4,  # the sums of the ranks' gradients are rounded
    )
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
