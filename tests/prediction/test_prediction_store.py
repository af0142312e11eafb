"""Collected predictions are complete, in dataset order, each once; in memory and on disk, on any number of ranks."""

import errno
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch

from pytorch_accelerated.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    DataError,
    InvalidCheckpointError,
)
from pytorch_accelerated.prediction.collecting import InMemoryPredictions, PredictionCollector
from pytorch_accelerated.prediction.stored import (
    StoredPredictions,
    StoredPredictionsWriter,
    collect_predictions,
)
from pytorch_accelerated.ranks.accelerators import create_accelerator
from pytorch_accelerated.ranks.ranks import Ranks
from pytorch_accelerated.states import disk
from tests.checkpointing.writing import write_state
from tests.support.processes import run_forked
from tests.support.waiting import no_waiting

ROW_BYTES = 4 * 3 + 8 + 2


class Detections(NamedTuple):
    scores: torch.Tensor
    boxes: torch.Tensor


def predictions_of(first: int, last: int) -> dict[str, Any]:
    """What a hook could return for samples `first` to `last`: every row differs from all others in every tensor."""
    rows = torch.arange(first, last)
    return {
        "scores": rows[:, None].float() + torch.tensor([0.0, 0.25, 0.5]),
        "others": (rows, [torch.stack([rows % 2 == 0, rows % 3 == 0], dim=1)]),
    }


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(create_accelerator())


Collect = Callable[..., PredictionCollector]


@pytest.fixture(params=["in memory", "on disk"])
def collect(request: pytest.FixtureRequest, ranks: Ranks, tmp_path: Path) -> Collect:
    """A function that makes one of the two collectors, with the block size it is given."""

    def make(**block_bytes: Any) -> PredictionCollector:
        if request.param == "in memory":
            return InMemoryPredictions(ranks, **block_bytes)
        return StoredPredictionsWriter(ranks, tmp_path / "predictions", **block_bytes)

    return make


def loaded(result: Any) -> Any:
    return result.load() if isinstance(result, StoredPredictions) else result


def write_predictions(ranks: Ranks, path: Path, *, rows: int = 20, batch_size: int = 4, block_bytes: int = 100) -> Any:
    writer = StoredPredictionsWriter(ranks, path, block_bytes=block_bytes)
    for first in range(0, rows, batch_size):
        writer.add(first, predictions_of(first, min(first + batch_size, rows)))
    return writer.finish()


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def visible_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


# Batches by the position of their first row, and all rows together.
PASSES: dict[str, tuple[dict[int, Any], Any]] = {
    "batches in another order": (
        {first: predictions_of(first, first + 4) for first in (8, 0, 12, 4)},
        predictions_of(0, 16),
    ),
    "a tensor alone": ({0: torch.ones(3, 2)}, torch.ones(3, 2)),
    "batches without rows": (
        {first: predictions_of(first, last) for first, last in ((-1, -1), (0, 3), (3, 3))},
        predictions_of(0, 3),
    ),
    "no batches": ({}, torch.empty(0)),
    "rows without elements": ({0: torch.empty(5, 0), 5: torch.empty(2, 0)}, torch.empty(7, 0)),
    "numpy arrays": (
        {0: (np.arange(6.0).reshape(3, 2)[::-1], read_only(np.arange(3)))},
        (torch.tensor([[4.0, 5.0], [2.0, 3.0], [0.0, 1.0]], dtype=torch.float64), torch.arange(3)),
    ),
    "keys in another order": (
        {0: {"a": torch.zeros(2), "b": torch.ones(2)}, 2: {"b": torch.ones(2), "a": torch.zeros(2)}},
        {"a": torch.zeros(4), "b": torch.ones(4)},
    ),
    "gradients": ({0: torch.ones(2, requires_grad=True) * 2}, torch.full((2,), 2.0)),
}


@pytest.mark.parametrize("kind", PASSES)
def test_rows_are_joined_in_dataset_order(collect: Collect, kind: str) -> None:
    batches, expected = PASSES[kind]
    collector = collect(block_bytes=ROW_BYTES * 3)
    for first, batch in batches.items():
        collector.add(first, batch)
    result = loaded(collector.finish())
    assert_same(result, expected)
    if isinstance(result, torch.Tensor):
        assert not result.requires_grad
        assert result.untyped_storage().nbytes() == result.nbytes


@pytest.mark.parametrize("block_bytes", [1, ROW_BYTES * 3, ROW_BYTES * 8, 2**20])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 40])
def test_collected_batches_equal_one_batch_of_everything(collect: Collect, batch_size: int, block_bytes: int) -> None:
    collector = collect(block_bytes=block_bytes)
    for first in range(0, 21, batch_size):
        collector.add(first, predictions_of(first, min(first + batch_size, 21)))
    assert_same(loaded(collector.finish()), predictions_of(0, 21))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint16, torch.complex64, torch.float8_e5m2],
)
def test_every_dtype_survives(collect: Collect, dtype: torch.dtype) -> None:
    rows = torch.arange(12).reshape(6, 2).to(dtype)
    collector = collect()
    collector.add(0, rows[:4])
    collector.add(4, rows[4:])
    result = loaded(collector.finish())
    assert result.dtype == dtype
    assert_same(result.view(torch.uint8), rows.view(torch.uint8))


def test_a_hook_may_reuse_its_output_memory(collect: Collect) -> None:
    output = torch.empty(2)
    collector = collect()
    for first in (0, 2, 4):
        collector.add(first, output.fill_(first))
    output.fill_(-1)
    assert_same(loaded(collector.finish()), torch.tensor([0.0, 0, 2, 2, 4, 4]))


def test_predictions_made_in_inference_mode_can_be_used_outside(collect: Collect) -> None:
    collector = collect()
    with torch.inference_mode():
        collector.add(0, torch.ones(2, 3))
        collector.add(2, torch.ones(1, 3))
        result = loaded(collector.finish())
    weight = torch.ones(3, requires_grad=True)
    (result @ weight).sum().backward()
    assert_same(weight.grad, torch.full((3,), 3.0))


def test_a_named_tuple_keeps_its_fields_and_in_memory_its_class(collect: Collect) -> None:
    collector = collect()
    collector.add(0, [Detections(torch.tensor([1.0, 3.0]), torch.zeros(2, 4))])
    (result,) = loaded(collector.finish())
    assert (type(result) is Detections) == isinstance(collector, InMemoryPredictions)
    assert result._fields == Detections._fields
    assert_same(tuple(result), (torch.tensor([1.0, 3.0]), torch.zeros(2, 4)))


# Predictions of the batch at row 8, after those of the batch before it, if there is one.
REFUSED: list[tuple[list[Any], type[Exception], str]] = [
    ([{"a": (torch.zeros(2), 0.5)}], ArgumentTypeError, r"row 8 .*predictions\['a'\]\[1\] is .*float \(0\.5\)"),
    (["cat"], ArgumentTypeError, r"str \('cat'\)"),
    ([None], ArgumentTypeError, "None"),
    ([np.array(["cat", "dog"])], ArgumentTypeError, "array of <U3"),
    ([torch.eye(2).to_sparse()], ArgumentTypeError, "sparse"),
    ([{"a": torch.zeros(2), "loss": torch.tensor(1.0)}], DataError, r"row 8 .*predictions\['loss'\] has no rows"),
    ([{"a": torch.zeros(2), "b": torch.zeros(3, 2)}], DataError, r"predictions\['a'\] has 2, predictions\['b'\] has 3"),
    ([{"a": []}], DataError, "there is no tensor"),
    ([torch.zeros(2, 5), torch.zeros(2, 7)], DataError, r"row 8 cannot be joined with .*\(7,\) instead of .*\(5,\)"),
    ([torch.zeros(2, 5), torch.zeros(2, 5).half()], DataError, r"torch.float16 with rows"),
    (
        [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}],
        DataError,
        r"predictions\['a'\] is missing instead .* predictions\['b'\] is .* instead of missing",
    ),
]


@pytest.mark.parametrize(("batches", "error", "named"), REFUSED, ids=[named for *_, named in REFUSED])
def test_what_cannot_be_rows_beside_those_before_is_refused_by_name(
    collect: Collect, batches: list[Any], error: type[Exception], named: str
) -> None:
    collector = collect()
    for start, batch in enumerate(batches[:-1]):
        collector.add(start, batch)
    with pytest.raises(error, match=named):
        collector.add(8, batches[-1])
    collector.abort()


def test_a_dtype_that_files_cannot_hold_is_refused_at_the_first_batch(ranks: Ranks, tmp_path: Path) -> None:
    collector = collect_predictions(ranks, tmp_path / "predictions")
    with pytest.raises(ArgumentTypeError, match=r"predictions\['a'\] is torch.complex128.*leave out `output_path`"):
        collector.add(0, {"a": torch.zeros(2, dtype=torch.complex128)})
    collector.abort()
    in_memory = collect_predictions(ranks)
    in_memory.add(0, torch.ones(2, dtype=torch.complex128))
    assert_same(in_memory.finish(), torch.ones(2, dtype=torch.complex128))


def test_an_existing_output_path_is_rejected_and_left_alone(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    write_predictions(ranks, tmp_path / "predictions")
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "folder", "predictions"):
        with pytest.raises(ConfigurationError, match=rf"{name} exists already.*Choose a new `output_path`"):
            collect_predictions(ranks, tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "mine"


def test_files_created_at_the_output_path_in_the_meantime_are_left_alone(ranks: Ranks, tmp_path: Path) -> None:
    writer = StoredPredictionsWriter(ranks, tmp_path / "predictions")
    writer.add(0, torch.zeros(2))
    (tmp_path / "predictions").mkdir()
    (tmp_path / "predictions" / "file").write_text("mine")
    with pytest.raises(ConfigurationError, match="exists already"):
        writer.finish()
    assert [path.name for path in tmp_path.rglob("*")] == ["predictions", "file"]


@pytest.mark.parametrize("rows_per_block", [1, 3, 7, 20, 100])
def test_blocks_are_bounded_and_put_together_are_the_whole(ranks: Ranks, tmp_path: Path, rows_per_block: int) -> None:
    stored = write_predictions(ranks, tmp_path / "predictions")
    first = 0
    for block in stored.blocks(block_bytes=ROW_BYTES * rows_per_block):
        last = first + len(block["scores"])
        assert last == min(first + rows_per_block, 20)
        assert_same(block, predictions_of(first, last))
        first = last
    assert first == 20


def test_rows_go_to_disk_while_they_come_in_files_of_bounded_size(ranks: Ranks, tmp_path: Path) -> None:
    block_bytes = ROW_BYTES * 50
    writer = StoredPredictionsWriter(ranks, tmp_path / "predictions", block_bytes=block_bytes)
    (staging,) = tmp_path.iterdir()
    for first in range(0, 250, 25):
        writer.add(first, predictions_of(first, first + 25))
        assert len(list(staging.iterdir())) == (first + 25) // 50  # only rows that do not fill a file are kept back
    stored = writer.finish()
    sizes = [len(safetensors.torch.load_file(file)["predictions['scores']"]) for file in stored.path.glob("rank*")]
    assert sizes == [50] * 5


def test_files_are_plain_safetensors_and_json(ranks: Ranks, tmp_path: Path) -> None:
    stored = write_predictions(ranks, tmp_path / "predictions", rows=4, block_bytes=2**20)
    assert visible_names(stored.path) == ["manifest.json", "order.safetensors", "rank00000-00000.safetensors"]
    expected = predictions_of(0, 4)
    assert_same(
        safetensors.torch.load_file(stored.path / "rank00000-00000.safetensors"),
        {
            "predictions['scores']": expected["scores"],
            "predictions['others'][0]": expected["others"][0],
            "predictions['others'][1][0]": expected["others"][1][0],
        },
    )
    order = safetensors.torch.load_file(stored.path / "order.safetensors")
    assert_same(order, {"pieces": torch.tensor([[0, 0, 0, 4]])})


@pytest.mark.parametrize("operation", ["write", "flush", "move"])
def test_a_failing_disk_is_reported_and_leaves_nothing(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = StoredPredictionsWriter(ranks, tmp_path / "predictions")
    writer.add(0, predictions_of(0, 5))
    monkeypatch.setattr(disk, operation, fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_pass_leaves_nothing_visible_and_the_next_one_cleans_up(ranks: Ranks, tmp_path: Path) -> None:
    script = """
        import os, sys, torch
        from pathlib import Path
        from pytorch_accelerated.ranks.accelerators import create_accelerator
        from pytorch_accelerated.ranks.ranks import Ranks
        from pytorch_accelerated.prediction.stored import StoredPredictionsWriter

        writer = StoredPredictionsWriter(Ranks(create_accelerator()), sys.argv[1], block_bytes=1)
        writer.add(0, torch.zeros(5))
        print(len(list(Path(sys.argv[1]).parent.rglob("*.safetensors"))), flush=True)
        os._exit(0)
    """
    path = tmp_path / "predictions"
    assert run_forked(dedent(script), path).stdout == "1\n"
    assert visible_names(tmp_path) == []
    assert list(tmp_path.iterdir())
    assert_same(write_predictions(ranks, path).load(), predictions_of(0, 20))
    assert list(tmp_path.iterdir()) == [path]


def test_folders_of_other_things_and_of_later_formats_are_not_opened(tmp_path: Path) -> None:
    write_state(tmp_path / "state", {}, {"model": {"weight": torch.zeros(2)}})
    write_state(tmp_path / "later", {"predictions_format": 2}, {})
    for folder in ("state", "later"):
        with pytest.raises(InvalidCheckpointError, match="no predictions of format 1"):
            StoredPredictions(tmp_path / folder)
    for folder in ("", "missing"):
        with pytest.raises(InvalidCheckpointError, match="manifest.json"):
            StoredPredictions(tmp_path / folder)


@pytest.mark.gpu
def test_rows_from_the_device_arrive_without_waiting_for_it(tmp_path: Path) -> None:
    ranks = Ranks(create_accelerator())
    weight = torch.rand(64, 64, device="cuda")
    for collector in (InMemoryPredictions(ranks), StoredPredictionsWriter(ranks, tmp_path / "predictions")):
        expected = []
        for batch in range(20):
            output = torch.full((32, 64), float(batch), device="cuda") @ weight
            on_host = torch.full((32,), batch)
            expected.append(output.cpu())
            with no_waiting():
                collector.add(32 * batch, (output, on_host))
            output.zero_()  # queued behind the copy
            on_host.zero_()
        rows, batches = loaded(collector.finish())
        assert_same(rows, torch.cat(expected))
        assert_same(batches, torch.arange(20).repeat_interleave(32))
