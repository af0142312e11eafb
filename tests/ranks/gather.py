"""Runs under torchrun: ranks gather values completely and in order, or all of them get an error."""

import os
from collections import namedtuple

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ArgumentTypeError
from tests.data.test_arrays import TORCH_DTYPES

trainer = Trainer(nn.Linear(1, 1), None, None, callbacks=())
ranks = trainer._ranks
RANK, WORLD = ranks.index, ranks.count
assert WORLD == int(os.environ["WORLD_SIZE"]) > 1


def rows_of(rank: int, count: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rows that differ from rank to rank."""
    numbers = torch.arange(count * torch.Size(shape).numel()).view(count, *shape) + 10 * rank
    return (numbers % 2 == 0) if dtype is torch.bool else numbers.to(dtype)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape, (found.shape, expected.shape)
    # As bytes, because not every dtype can be compared.
    found, expected = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (found, expected))
    assert torch.equal(found, expected)


def expect(counts: list[int], *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    parts = [rows_of(rank, count, *shape, dtype=dtype) for rank, count in enumerate(counts)]
    octets = [part.flatten().view(torch.uint8) for part in parts]
    return torch.cat(octets).view(dtype).view(sum(counts), *shape)


# ------------------------------------------------------------------------------------- rows of every dtype and number

for dtype in TORCH_DTYPES:
    for shape in [(), (3,), (2, 1, 2)]:
        for counts in [[2] * WORLD, [rank + 1 for rank in range(WORLD)], [0] * (WORLD - 1) + [2]]:
            mine = rows_of(RANK, counts[RANK], *shape, dtype=dtype)
            assert_equal(trainer.gather(mine), expect(counts, *shape, dtype=dtype))
            assert_equal(mine, rows_of(RANK, counts[RANK], *shape, dtype=dtype))  # left as it was

assert_equal(trainer.gather(torch.tensor(float(RANK))), torch.arange(float(WORLD)))
assert_equal(trainer.gather(torch.tensor(RANK == 0)), torch.arange(WORLD) == 0)
assert_equal(trainer.gather(torch.tensor(RANK == 0)[None, None]), (torch.arange(WORLD) == 0)[:, None])

weights = nn.Parameter(torch.full((1, 2), float(RANK)))
gathered = trainer.gather(weights * 2)
assert not gathered.requires_grad
assert_equal(gathered, torch.arange(0.0, 2 * WORLD, 2)[:, None].expand(-1, 2).contiguous())

# Memory that is not in order, or not there several times.
assert_equal(trainer.gather(rows_of(RANK, 3, 2).T), torch.cat([rows_of(rank, 3, 2).T for rank in range(WORLD)]))
assert_equal(
    trainer.gather(torch.tensor([[RANK]]).expand(2, 3)), torch.arange(WORLD).repeat_interleave(2)[:, None].repeat(1, 3)
)

# ------------------------------------------------------------------------------------------------- ranks without rows

# A rank that has nothing often cannot know what it would have been.
for nothing in (torch.tensor([]), torch.empty(0, 7, 7, dtype=torch.bool), torch.empty(0, 5)):
    for owner in range(WORLD):
        mine = torch.tensor([[1, 2], [3, 4]]) if owner == RANK else nothing
        assert_equal(trainer.gather(mine), torch.tensor([[1, 2], [3, 4]]))
assert_equal(trainer.gather(torch.empty(0, 4)), torch.empty(0, 4))
assert trainer.gather(torch.empty(0, 4) if RANK else torch.empty(0, dtype=torch.int64)).numel() == 0
assert_equal(trainer.gather(torch.empty(RANK, 0)), torch.empty(sum(range(WORLD)), 0))

# --------------------------------------------------------------------------------------------------------- structures

Output = namedtuple("Output", ["scores", "labels"])
nested = {
    "pair": (rows_of(RANK, 1 + RANK, 2), [rows_of(RANK, 3, dtype=torch.int64)]),
    "named": Output(torch.tensor(RANK), rows_of(RANK, 1, dtype=torch.bool)),
    "nothing": (),
}
found = trainer.gather(nested)
assert list(found) == list(nested)
assert type(found["pair"]) is tuple
assert type(found["pair"][1]) is list
assert type(found["named"]) is Output
assert found["nothing"] == ()
assert_equal(found["pair"][0], expect([rank + 1 for rank in range(WORLD)], 2))
assert_equal(found["pair"][1][0], expect([3] * WORLD, dtype=torch.int64))
assert_equal(found["named"].scores, torch.arange(WORLD))
assert_equal(found["named"].labels, expect([1] * WORLD, dtype=torch.bool))

# ------------------------------------------------------------------------------------------------------------ padding

wide = torch.full((1, RANK + 1), float(RANK))
padded = trainer.gather(wide, padding_value=-7)
assert padded.shape == (WORLD, WORLD)
for rank in range(WORLD):
    assert padded[rank].tolist() == [float(rank)] * (rank + 1) + [-7.0] * (WORLD - 1 - rank)
# Rows that are nothing else are left out, whoever made them and whatever their shape.
for rows in (torch.full((RANK + 1, RANK + 1), -7), torch.full((RANK,), -7.0), torch.tensor(-7)):
    assert len(trainer.gather(rows, padding_value=-7)) == 0
found = trainer.gather([torch.tensor([-7, RANK]), {"box": torch.tensor([[-7, -7], [-7, RANK]])}], padding_value=-7)
assert found[0].tolist() == list(range(WORLD))
assert found[1]["box"].tolist() == [[-7, rank] for rank in range(WORLD)]
missing = trainer.gather(torch.full((1, RANK + 1), float("nan") if RANK == 1 else 1.0), padding_value=float("nan"))
assert missing.shape == (WORLD - 1, WORLD)
# A rank that has nothing adds nothing.
of_others = trainer.gather(torch.full((1, 2), RANK) if RANK else torch.tensor([]), padding_value=-7)
assert of_others.tolist() == [[rank, rank] for rank in range(1, WORLD)]
# Where nothing needs it, it changes nothing.
assert_equal(trainer.gather(rows_of(RANK, RANK, 2), padding_value=-1), expect(list(range(WORLD)), 2))

# ------------------------------------------------------------- what cannot work is an error on all ranks, every time

for _ in range(2):
    with pytest.raises(ArgumentTypeError, match=r"by rank\) 1-dim torch.int64, 1-dim torch.float32"):
        trainer.gather(torch.ones(2, dtype=torch.int64 if RANK == 0 else torch.float32))
    with pytest.raises(ArgumentTypeError, match=r"by rank\) 2-dim torch.float32, 1-dim torch.float32"):
        trainer.gather(torch.ones(2, 2) if RANK == 0 else torch.ones(2))
    with pytest.raises(ArgumentTypeError, match=r"\[3\], \[2\].*`padding_value`"):
        trainer.gather(torch.ones(2, 3) if RANK == 0 else torch.ones(2, 2))
    with pytest.raises(ArgumentTypeError, match=r"\{'a': None, 'b': None\}, \{'b': None, 'a': None\}"):
        trainer.gather(dict.fromkeys("ab" if RANK == 0 else "ba", torch.ones(1)))
    with pytest.raises(ArgumentTypeError, match=r"\(None, None\), \(None,\)"):
        trainer.gather((torch.ones(1),) * (2 if RANK == 0 else 1))
    with pytest.raises(ArgumentTypeError, match="A str is among the data"):
        trainer.gather({"a": torch.ones(1), "b": "text"})
    # One rank gathers while the others are somewhere else.
    for elsewhere in (
        ranks.wait,
        lambda: ranks.exchange("anything"),
        lambda: ranks.exchange_numbers([1, 2, 3]),
    ):
        with pytest.raises(ArgumentTypeError, match="not on rank 1.*call it equally often"):
            trainer.gather(torch.ones(2)) if RANK != 1 else elsewhere()
    assert_equal(trainer.gather(torch.tensor(RANK)), torch.arange(WORLD))  # all is well again

# ---------------------------------------------------------------------------------------------------- small agreements

assert ranks.exchange_numbers([-RANK]) == [[-rank] for rank in range(WORLD)]
assert ranks.exchange_numbers([2**60 * RANK])[-1] == [2**60 * (WORLD - 1)]
assert ranks.any(RANK == 1)
assert not ranks.any(False)
assert ranks.exchange({"rank": RANK}) == [{"rank": rank} for rank in range(WORLD)]
assert ranks.exchange_numbers([RANK, -1]) == [[rank, -1] for rank in range(WORLD)]
assert ranks.exchange_numbers(range(RANK)) == [list(range(rank)) for rank in range(WORLD)]
assert ranks.exchange_numbers([RANK] * 300) == [[rank] * 300 for rank in range(WORLD)]
assert ranks.from_first(f"rank {RANK}") == "rank 0"
assert ranks.sum([0.1, 2.0**60 + RANK, float("inf")]) == [sum([0.1] * WORLD), WORLD * 2.0**60, float("inf")]
assert ranks.sum([]) == []

# ----------------------------------------------------------------------------------------------------- copies of rank 0

for dtype in TORCH_DTYPES:
    tensor = rows_of(RANK, 3, 2, dtype=dtype)
    ranks.copy_from_first([tensor])
    assert_equal(tensor, rows_of(0, 3, 2, dtype=dtype))
single, empty = torch.tensor(RANK), torch.empty(0, 3)
transposed = rows_of(RANK, 3, 2).T
channels_last = rows_of(RANK, 2, 3, 2, 2).to(memory_format=torch.channels_last)
whole = rows_of(RANK, 4, 4)
column, diagonal = whole[:, 1], whole[:, 2:].T
expanded = torch.tensor([[float(RANK), 1.0]]).expand(3, 2)
parameter = nn.Parameter(torch.full((2, 2), float(RANK)))
ranks.copy_from_first([single, empty, transposed, channels_last, column, diagonal, expanded, parameter.data])
assert_equal(single, torch.tensor(0))
assert_equal(transposed, rows_of(0, 3, 2).T)
assert_equal(channels_last, rows_of(0, 2, 3, 2, 2))
assert channels_last.is_contiguous(memory_format=torch.channels_last)
assert_equal(whole[:, 1:], rows_of(0, 4, 4)[:, 1:])
assert_equal(whole[:, 0], rows_of(RANK, 4, 4)[:, 0])  # beside what was copied
assert_equal(expanded, torch.tensor([[0.0, 1.0]]).repeat(3, 1))
assert_equal(parameter.data, torch.zeros(2, 2))

print(f"rank {RANK} is done")
