"""Runs on any number of ranks: collected predictions are complete and in order, or there is an error on all."""

import itertools
import os
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from pytorch_accelerated.data.sampling import evaluation_rounds
from pytorch_accelerated.errors import CheckpointError, ConfigurationError, DataError
from pytorch_accelerated.prediction.collecting import InMemoryPredictions
from pytorch_accelerated.prediction.stored import StoredPredictions, StoredPredictionsWriter
from pytorch_accelerated.ranks.accelerators import create_accelerator
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.states import disk
from tests.chaos.size import some
from tests.prediction.test_prediction_store import ROW_BYTES, assert_same, predictions_of

folder = Path(sys.argv[1])
ranks = Ranks(create_accelerator())
WORLD = ranks.count
assert int(os.environ["WORLD_SIZE"]) == WORLD > 1
numbers = itertools.count()
Local = namedtuple("Local", ["rows"])


def collectors(block_bytes):
    yield InMemoryPredictions(ranks, block_bytes=block_bytes)
    yield StoredPredictionsWriter(ranks, folder / f"predictions {next(numbers)}", block_bytes=block_bytes)


def collected(collector, cells, hook=predictions_of):
    for start, stop in cells:
        collector.add(start, hook(start, stop))
    result = collector.finish()
    return result.load() if isinstance(result, StoredPredictions) else result


# Every size, cut as the loader cuts it.
for batch_size in (1, 2, 3):
    for size in some((0, 1, WORLD, 2 * WORLD + 1, 4 * WORLD + 3), range(4 * WORLD + 4)):
        windows = evaluation_rounds(size, batch_size=batch_size, ranks=WORLD)
        mine = (window.rounds[0][ranks.index] for window in windows)
        cells = [(cell.start, cell.start + cell.size) for cell in mine if cell.size]
        for collector in collectors(ROW_BYTES * 2 * WORLD):
            assert_same(collected(collector, cells), predictions_of(0, size) if size else torch.empty(0))

# Shares as uneven as can be: everything on one rank, or the last rank has the first rows.
for owner in range(WORLD):
    for collector in collectors(ROW_BYTES * WORLD):
        assert_same(collected(collector, [(0, 4), (4, 11)] if ranks.index == owner else []), predictions_of(0, 11))
backwards = [(10 * (WORLD - 1 - ranks.index) + first, 10 * (WORLD - 1 - ranks.index) + first + 5) for first in (0, 5)]
for collector in collectors(2**20):
    assert_same(collected(collector, backwards), predictions_of(0, 10 * WORLD))
stored = StoredPredictions(folder / f"predictions {next(numbers) - 1}")
assert [len(block["scores"]) for block in stored.blocks(block_bytes=7 * ROW_BYTES)] == [7] * 4 + [2]

# Dtypes that the ranks' backend may not know, rows without elements, and a class that only ranks with rows know.
for dtype in (torch.bool, torch.bfloat16, torch.uint16, torch.float8_e4m3fn):
    for collector in collectors(7):
        cells = [(3 * ranks.index, 3 * ranks.index + 3)]
        found = collected(collector, cells, lambda *rows, dtype=dtype: torch.arange(*rows).to(dtype))
        assert found.dtype == dtype
        assert_same(found.view(torch.uint8), torch.arange(3 * WORLD).to(dtype).view(torch.uint8))
for collector in collectors(7):
    assert collected(collector, [(ranks.index, ranks.index + 1)], lambda *_: torch.empty(1, 0)).shape == (WORLD, 0)
for collector in collectors(2**20):
    found = collected(collector, [(0, 2)] if ranks.is_first else [], lambda *rows: Local(torch.arange(*rows)))
    assert_same(found.rows, torch.arange(2))

# Failures of one rank are errors of all.
for collector in collectors(2**20):
    rows = torch.zeros(1, min(3 + ranks.index, 4))
    with pytest.raises(DataError, match="predictions of rank 1 cannot be joined with those of rank 0"):
        collected(collector, [(ranks.index, ranks.index + 1)], lambda *_, rows=rows: rows)
with pytest.raises(ConfigurationError, match="exists already"):
    StoredPredictionsWriter(ranks, folder / "predictions 1")


def fail(*_):
    raise OSError(28, "No space left on device")


for broken in range(WORLD):
    path = folder / f"broken {broken}"
    writer = StoredPredictionsWriter(ranks, path)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.index == broken:
            patch.setattr(disk, "write", fail)
        with pytest.raises(CheckpointError, match="No space left on device"):
            collected(writer, [(ranks.index, ranks.index + 1)])
    assert not path.exists()

ranks.wait()
assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
