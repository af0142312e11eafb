"""Our reader of ``torch.save`` files returns the same as ``torch.load``."""

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated.checkpointing.portable import load_portable
from pytorch_accelerated.errors import InvalidCheckpointError
from tests.checkpointing.same_state import assert_same_state

base = torch.arange(24.0)
model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.LSTM(3, 4))
tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
tied[1].weight = tied[0].weight


def after_some_steps(make: Any) -> Any:
    parameters = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))]
    optimizer = make(parameters)
    for _ in range(2):
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
        optimizer.step()
    return optimizer


adam = after_some_steps(lambda parameters: torch.optim.AdamW(parameters, amsgrad=True))
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]
NEWER = DTYPES[-5:]
VALUES: dict[str, Any] = {
    **{str(dtype): torch.arange(3).to(dtype) for dtype in DTYPES},
    "a model": model.state_dict(),
    "a model of torch.float16 in channels_last": model.half().to(memory_format=torch.channels_last).state_dict(),  # type: ignore[call-overload]
    "an optimizer": adam.state_dict(),
    "momentum": after_some_steps(lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9)).state_dict(),
    "a schedule": torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, 10).state_dict(),
    "milestones": torch.optim.lr_scheduler.MultiStepLR(adam, [3, 5]).state_dict(),
    "a plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(adam).state_dict(),
    "lambdas": torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0).state_dict(),
    "views": [base[3:9], base[::2], base.view(4, 6).t(), base[:0], base[0], base[:1].expand(5)],
    "no elements": [torch.empty(0), torch.empty(3, 0, 2), torch.tensor(2.5)],
    "parameters": [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1, dtype=torch.int8), requires_grad=False)],
    "a gradient": torch.ones(2, requires_grad=True),
    "numbers": [0, -1, 255, 256, 65536, -(2**31), 2**31, 2**63, -(2**63), 10**50, 1.5, float("inf"), -0.0, 2 + 3j],
    "texts": ["", "é", "x" * 300, b"\x00\xff", b"x" * 300, bytearray(b"ab")],
    "containers": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}, set(), {1, "a"}, [[[[[]]]]]],
    "keys": {1: 0, "a": 1, (1, "b"): 2, None: 3, 2.5: 4, False: 5, b"x": 6, torch.float16: 7},
    "kinds": [torch.Size([2, 3]), torch.device("cpu"), torch.device("cuda", 1), torch.int64, torch.strided],
    "many": list(range(3000)),
    "one thing twice": [base, base, (shared := [1]), shared],
    "counters": [collections.Counter({30: 1}), collections.OrderedDict(a=1)],
}


@pytest.mark.parametrize(
    ("name", "is_archive"),
    [
        pytest.param(name, is_archive, id=f"{name}, {'archive' if is_archive else 'in a row'}")
        for name, value in VALUES.items()
        for is_archive in (True, False)
        if is_archive or getattr(value, "dtype", None) not in NEWER  # which torch cannot write in a row
    ],
)
def test_files_saved_by_torch_are_read_as_torch_reads_them(name: str, is_archive: bool, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"value": VALUES[name]}, path, _use_new_zipfile_serialization=is_archive)
    found, expected = load_portable(path), torch.load(path, weights_only=True)
    assert_same_state(found, expected)
    assert repr(found) == repr(expected)  # the kinds of containers, and whether gradients are wanted


def test_tied_weights_stay_tied_and_versions_of_modules_come_back(tmp_path: Path) -> None:
    torch.save(tied.state_dict(), tmp_path / "file.pt")
    state = load_portable(tmp_path / "file.pt")
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    torch.save(model.state_dict(), tmp_path / "file.pt")
    assert load_portable(tmp_path / "file.pt")._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_are_read(tmp_path: Path) -> None:
    for sparse in (
        torch.eye(3).to_sparse(),
        torch.sparse_coo_tensor(torch.zeros(1, 2, dtype=torch.int64), torch.ones(2), (2,)),
    ):
        torch.save({"a": sparse}, tmp_path / "file.pt")
        found = load_portable(tmp_path / "file.pt")["a"]
        assert found.is_coalesced() == sparse.is_coalesced()
        assert_same_state(found.to_dense(), sparse.to_dense())


def test_records_beyond_four_gigabytes_are_found(tmp_path: Path) -> None:
    """Their sizes stand elsewhere. Here nothing of the file is on the disk, so its checksums cannot fit."""
    large = torch.empty(2**32 + 8, dtype=torch.uint8, device="meta")
    with torch.serialization.skip_data():
        torch.save({"small": torch.ones(1), "large": large.new_empty(large.shape, device="cpu")}, tmp_path / "file.pt")
    from pytorch_accelerated.checkpointing.archive import Archive

    with open(tmp_path / "file.pt", "rb", buffering=0) as file:
        archive = Archive(file)
        assert archive.size_of("data/0") == 4
        assert archive.size_of("data/1") == 2**32 + 8
        assert archive.read("version")


def test_errors_name_the_rejected_value(tmp_path: Path) -> None:
    for value, told in {
        torch.ones(2, device="meta"): "_rebuild_meta_tensor",
        torch.Generator(): "torch._C.Generator",
    }.items():
        torch.save({"a": value}, tmp_path / "file.pt")
        with pytest.raises(InvalidCheckpointError, match=f"{told}.*could run code"):
            load_portable(tmp_path / "file.pt")
