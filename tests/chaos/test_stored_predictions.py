"""Stored predictions that were changed by accident or on purpose: typed errors, and no memory but for real rows."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.prediction.stored import StoredPredictions, StoredPredictionsWriter
from pytorch_accelerated.processes.accelerators import create_accelerator
from pytorch_accelerated.processes.ranks import Ranks
from tests.chaos.record import record
from tests.chaos.saved_runs import sign
from tests.chaos.size import IS_RELEASE, size

ORDER = "order.safetensors"
BLOCK = "rank00000-00000.safetensors"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five rows in three blocks."""
    folder = tmp_path_factory.mktemp("stored") / "predictions"
    writer = StoredPredictionsWriter(Ranks(create_accelerator()), folder, block_bytes=40)
    for first in (0, 2, 4):
        rows = torch.arange(first, min(first + 2, 5))
        writer.add(first, {"scores": rows[:, None] + torch.zeros(1, 2), "number": (rows,)})
    writer.finish()
    return folder


def read(folder: Path) -> Any:
    """All that there is, in both ways."""
    found = StoredPredictions(folder)
    return found.load(), list(found.blocks(block_bytes=40))


def test_no_flipped_bit_is_accepted(stored: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stored, tmp_path / "predictions")
    files = sorted(folder.iterdir())
    bits = [(file, bit) for file in files for bit in range(8 * file.stat().st_size)]
    chosen = bits if IS_RELEASE else random.Random(3).sample(bits, size(small=1_000, release=0))
    for file, bit in chosen:
        content = file.read_bytes()
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(changed)
        with pytest.raises(InvalidCheckpointError):
            read(folder)
        file.write_bytes(content)
    assert len(read(folder)[1]) > 1
    record("flipped bits of stored predictions", {"flips": len(chosen), "stores accepted": 0})


def change_facts(folder: Path, **changes: Any) -> None:
    facts = json.loads((folder / "manifest.json").read_bytes())["facts"]
    sign(folder, facts={name: value for name, value in {**facts, **changes}.items() if value is not None})


def change_order(folder: Path, order: torch.Tensor, name: str = "pieces") -> None:
    (folder / ORDER).write_bytes(safetensors.torch.save({name: order}))
    sign(folder)


def change_block(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = safetensors.torch.load_file(folder / BLOCK)
    change(tensors)
    (folder / BLOCK).write_bytes(safetensors.torch.save(tensors))
    sign(folder)


def replace_block(folder: Path, content: bytes) -> None:
    (folder / BLOCK).write_bytes(content)
    sign(folder)


def kind(dtype: str, shape: list[int]) -> dict[str, Any]:
    return {"$": "tuple", "items": [{"$": "dtype", "name": dtype}, {"$": "tuple", "items": shape}]}


def first_of(tensors: dict[str, torch.Tensor]) -> str:
    return sorted(tensors)[0]


PIECES = torch.tensor([[0, 0, 0, 2], [0, 1, 0, 2], [0, 2, 0, 1]])
FORGED: dict[str, Callable[[Path], Any]] = {
    "a row more": lambda folder: change_facts(folder, rows=6),
    "a row less": lambda folder: change_facts(folder, rows=4),
    "a billion rows": lambda folder: change_facts(folder, rows=10**9),
    "rows below zero": lambda folder: change_facts(folder, rows=-1),
    "rows that are text": lambda folder: change_facts(folder, rows="5"),
    "rows that are true": lambda folder: change_facts(folder, rows=True),
    "no rows": lambda folder: change_facts(folder, rows=None),
    "no structure": lambda folder: change_facts(folder, structure=None),
    "no tensors": lambda folder: change_facts(folder, tensors=None),
    "a structure with another place": lambda folder: change_facts(folder, structure="predictions['none']"),
    "a structure with a list as a place": lambda folder: change_facts(folder, structure=[[3]]),
    "a structure whose fields are words of Python": lambda folder: change_facts(
        folder, structure={"$": "ordered dict", "items": [["class", "predictions['scores']"]]}
    ),
    "tensors that are a list": lambda folder: change_facts(folder, tensors=[]),
    "rows of terabytes": lambda folder: change_facts(
        folder, structure="a", tensors={"a": kind("float32", [2**40, 2**10])}
    ),
    "rows of a negative size": lambda folder: change_facts(folder, structure="a", tensors={"a": kind("float32", [-1])}),
    "rows of another dtype": lambda folder: change_facts(
        folder, structure="predictions['scores']", tensors={"predictions['scores']": kind("float64", [1])}
    ),
    "no order": lambda folder: change_order(folder, PIECES, "others"),
    "an order of numbers": lambda folder: change_order(folder, PIECES.flatten()),
    "an order of fractions": lambda folder: change_order(folder, PIECES.double()),
    "an order with three columns": lambda folder: change_order(folder, PIECES[:, :3].contiguous()),
    "pieces below zero": lambda folder: change_order(folder, torch.tensor([[0, 0, 0, 7], [0, 0, 0, -2]])),
    "a piece of a rank that was not there": lambda folder: change_order(folder, torch.tensor([[3, 0, 0, 5]])),
    "a piece that is longer than its block": lambda folder: change_order(folder, torch.tensor([[0, 0, 0, 5]])),
    "a piece behind its block": lambda folder: change_order(folder, torch.tensor([[0, 0, 9, 5]])),
    "pieces that overflow": lambda folder: change_order(folder, torch.tensor([[0, 0, 0, 2**62]] * 4 + [[0, 0, 0, 5]])),
    "a block without a tensor": lambda folder: change_block(folder, lambda tensors: tensors.pop(first_of(tensors))),
    "a block with fewer rows": lambda folder: change_block(
        folder, lambda tensors: tensors.update({first_of(tensors): tensors[first_of(tensors)][:1].clone()})
    ),
    "a block with wider rows": lambda folder: change_block(
        folder, lambda tensors: tensors.update({first_of(tensors): torch.zeros(2, 9)})
    ),
    "a block of another dtype": lambda folder: change_block(
        folder, lambda tensors: tensors.update({first_of(tensors): tensors[first_of(tensors)].to(torch.int8)})
    ),
    "a block that is no such file": lambda folder: replace_block(folder, b"x" * 9),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_stores_are_refused(name: str, stored: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stored, tmp_path / "predictions")
    FORGED[name](folder)
    with pytest.raises(InvalidCheckpointError):
        read(folder)
    with pytest.raises(InvalidCheckpointError):
        list(StoredPredictions(folder).blocks())


def test_a_store_that_is_only_signed_again_is_read(stored: Path, tmp_path: Path) -> None:
    """Without this the tests above would say nothing."""
    folder = shutil.copytree(stored, tmp_path / "predictions")
    change_order(folder, PIECES)
    everything, blocks = read(folder)
    assert everything["number"][0].tolist() == list(range(5))
    assert len(blocks) > 1
