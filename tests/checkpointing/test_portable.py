import enum
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError
from pytorch_accelerated.states.portable import load_portable, save_portable
from tests.checkpointing.faulty_disk import FaultyDisk
from tests.checkpointing.same_state import assert_same_state

CONTENTS = {
    "model_state_dict": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict(),
    "plain": [None, True, 3, 2.5, 1j, "é", b"x", (1, (2,)), {1: {"a"}}, 10**400],
    "kinds": [torch.Size([2]), torch.float16, torch.device("cpu"), nn.Parameter(torch.ones(1)), OrderedDict(a=1)],
    "milestones": Counter({30: 1}),
}


def test_contents_come_back_and_plain_torch_reads_them_too(tmp_path):
    save_portable(tmp_path / "new" / "folder" / "model.pt", CONTENTS)
    assert_same_state(load_portable(tmp_path / "new" / "folder" / "model.pt"), CONTENTS)
    assert_same_state(torch.load(tmp_path / "new" / "folder" / "model.pt", weights_only=True), CONTENTS)
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["model.pt"]


def test_the_file_is_flushed_before_it_gets_its_name(tmp_path):
    with FaultyDisk().installed() as recorded:
        save_portable(tmp_path / "model.pt", {"a": 1})
    in_order = [name for name in recorded.operations if name != "write"]
    assert in_order == ["create_file", "flush", "move", "flush_folder"]


class Colour(enum.Enum):
    RED = 1


holds_itself: list[Any] = []
holds_itself.append(holds_itself)
REFUSED: dict[str, Any] = {
    "numpy scalar": np.float64(1),
    "numpy array": np.arange(3),
    "enum": Colour.RED,
    "function": len,
    "module": nn.Linear(1, 1),
    "itself": holds_itself,
    "subclass of dict": type("MyDict", (dict,), {})(),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_values_that_would_not_load_are_rejected_by_key_before_anything_is_written(value, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        save_portable(tmp_path / "model.pt", {"good": 1, "extra": [0, {"deep": value}]})
    assert "extra[1]['deep']" in str(caught.value)
    assert "good" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [torch.eye(2).to_sparse(), bytearray(b"x"), torch.strided])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:Validating sparse:UserWarning")  # torch 2.15
def test_unusual_values_that_do_load_are_accepted(value, tmp_path):
    save_portable(tmp_path / "model.pt", {"value": value})
    found = load_portable(tmp_path / "model.pt")["value"]
    assert repr(found) == repr(value)


def test_a_folder_of_the_name_is_not_replaced(tmp_path):
    (tmp_path / "model.pt").mkdir()
    with pytest.raises(CheckpointError, match="is a folder"):
        save_portable(tmp_path / "model.pt", {})
    with pytest.raises(CheckpointError, match="is a folder.*load_training_state"):
        load_portable(tmp_path / "model.pt")


@pytest.mark.parametrize("caught_as", [CheckpointError, FileNotFoundError])
def test_the_error_for_a_missing_file_names_what_exists(tmp_path, caught_as):
    """Scripts catch FileNotFoundError to start without a checkpoint."""
    save_portable(tmp_path / "last.pt", {})
    with pytest.raises(caught_as, match=r"no file .*best\.pt.*: last\.pt\."):
        load_portable(tmp_path / "best.pt")


def test_the_error_for_a_file_with_more_than_values_and_tensors_names_the_class(tmp_path):
    torch.save({"a": torch.Generator()}, tmp_path / "model.pt")
    with pytest.raises(InvalidCheckpointError, match=r"GLOBAL torch\._C\.Generator was not an allowed.*could run code"):
        load_portable(tmp_path / "model.pt")


def test_files_of_torch_before_archives_are_read(tmp_path):
    torch.save(CONTENTS["model_state_dict"], tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    assert_same_state(load_portable(tmp_path / "model.pt"), CONTENTS["model_state_dict"])


def test_checksums_are_written_even_where_they_are_switched_off(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save_portable(tmp_path / "model.pt", {"a": torch.arange(9)})
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_portable(tmp_path / "model.pt")["a"].tolist() == list(range(9))
