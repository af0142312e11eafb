"""Checkpoint files that somebody made to do harm: typed errors, little memory, no crash, and nothing run."""

import random
import warnings
from pathlib import Path

import pytest
import torch

from pytorch_accelerated.checkpointing.portable import load_portable, save_portable
from pytorch_accelerated.errors import InvalidCheckpointError
from tests.chaos.hostile_files import write_all
from tests.chaos.record import record
from tests.chaos.size import IS_RELEASE, size
from tests.support.processes import REPOSITORY, run_script

FLIPS = size(small=1_500, release=10_000)


@pytest.mark.processes
def test_hostile_files_are_refused_within_little_memory(tmp_path: Path) -> None:
    count = write_all(tmp_path)
    assert count > 40
    output = run_script(REPOSITORY / "tests" / "chaos" / "hostile_files.py", tmp_path)
    *names, last = output.stdout.splitlines()
    assert (len(names), last) == (count, "all refused")
    record("hostile files", {"files": count, "files accepted": 0, "crashes": 0})


@pytest.mark.parametrize("writer", ["ours", "torch's"])
def test_no_flipped_bit_of_a_file_is_accepted(writer: str, tmp_path: Path) -> None:
    """Neither in the data, which checksums cover, nor in what describes them."""
    path = tmp_path / "model.pt"
    contents = {"weight": torch.arange(4.0), "half": torch.ones(3, dtype=torch.float16), "epoch": 7}
    save_portable(path, contents) if writer == "ours" else torch.save(contents, path)
    data = path.read_bytes()
    directory = range(8 * data.index(b"PK\x01\x02"), 8 * len(data))
    chance = random.Random(FLIPS)
    everywhere = range(8 * len(data))
    bits = everywhere if IS_RELEASE else [*chance.sample(directory, FLIPS // 2), *chance.sample(everywhere, FLIPS // 2)]
    accepted = []
    with open(path, "r+b", buffering=0) as file:
        for bit in bits:
            changed = data[bit // 8] ^ 1 << (bit % 8)
            file.seek(bit // 8)
            file.write(bytes([changed]))
            try:
                load_portable(path)
                accepted.append(bit)
            except InvalidCheckpointError:
                pass
            file.seek(bit // 8)
            file.write(data[bit // 8 : bit // 8 + 1])
    assert not accepted
    torch.testing.assert_close(load_portable(path), contents, rtol=0, atol=0)
    record(f"flipped bits of a file of {writer}", {"flips": len(bits), "files accepted": 0})


@pytest.mark.parametrize("kind", ["archive", "in a row"])
def test_random_changes_are_rejected_or_change_only_values(kind: str, tmp_path: Path) -> None:
    """Files of the old kind have no checksums, so values may differ; that is all that may happen."""
    path = tmp_path / "model.pt"
    contents = {"weight": torch.arange(4.0), "nested": [1, (2.5, "text"), {"a": torch.ones(2, 2).t()}]}
    torch.save(contents, path, _use_new_zipfile_serialization=kind == "archive")
    data = path.read_bytes()
    chance = random.Random(7)
    refused = 0
    for _ in range(size(small=500, release=20_000)):
        changed = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            start = chance.randrange(len(changed))  # an earlier change may have made it shorter
            kind_of_change = chance.randrange(3)
            if kind_of_change == 0:
                changed[start] = chance.randrange(256)
            elif kind_of_change == 1:
                del changed[start : start + chance.randrange(1, 9)]
            else:
                other = chance.randrange(len(data))
                changed[start : start + 8] = data[other : other + 8]
        path.write_bytes(changed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                load_portable(path)
        except InvalidCheckpointError:
            refused += 1
    assert refused > 100
