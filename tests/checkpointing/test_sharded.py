"""Models of which each rank has a part: trained, evaluated, saved and resumed as if one process had them whole."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.states.codec import chunks
from pytorch_accelerated.states.publish import begin
from pytorch_accelerated.states.state_folder import read_state
from pytorch_accelerated.states.verify import find_state, read_manifest, verify
from tests.chaos.record import record
from tests.chaos.size import IS_RELEASE
from tests.checkpointing import independent_reader
from tests.support.processes import run_on_ranks
from tests.support.reference import TOLERANCE
from tests.support.resuming import assert_same
from tests.support.sharding import everything, make_trainer, saver, train

RANKS = Path(__file__).parents[1] / "ranks"
DYING = RANKS / "dying_in_save.py"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have worked, who check alone what they can."""
    folder = tmp_path_factory.mktemp("sharded")
    saving = make_trainer(shards=False, callbacks=[saver(folder / "one_process")])
    train(saving, ranks=1, max_num_train_steps=3)
    shutil.copytree(folder / "one_process" / "step_3", folder / "of_one_process")
    output = run_on_ranks(RANKS / "sharding.py", 2, folder, cwd=REPOSITORY)
    assert output.stdout.count("all is well") == 2
    return folder


assert_close = functools.partial(assert_same, tolerance=TOLERANCE)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same run, by one process with the whole model."""
    return everything(train(make_trainer(shards=False), ranks=1))


@pytest.mark.processes
def test_two_ranks_with_half_of_a_model_each_do_what_one_process_does(folder: Path, alone: dict[str, Any]):
    assert_close(torch.load(folder / "two_ranks.pt"), alone)


@pytest.mark.processes
def test_a_run_of_one_process_resumes_on_two_with_a_sharded_model(folder: Path, alone: dict[str, Any]):
    assert_close(torch.load(folder / "one_then_two.pt"), alone)


@pytest.mark.processes
def test_a_run_of_two_ranks_with_a_sharded_model_resumes_on_one_process(folder: Path, alone: dict[str, Any]):
    resumed = make_trainer(shards=False)
    with pytest.warns(UserWarning, match="saved by 2 processes and resumes with 1"):
        train(resumed, ranks=1, resume_from=folder / "for_one_process")
    assert_close(everything(resumed), alone)


@pytest.mark.processes
def test_one_process_loads_the_file_that_two_ranks_have_written(folder: Path, alone: dict[str, Any]):
    trainer = make_trainer(shards=False)
    trainer.load_checkpoint(folder / "portable.pt")
    assert_close(dict(trainer.model.state_dict()), alone["model"])
    assert_close(trainer.optimizer.state_dict(), alone["optimizer"])


@pytest.mark.processes
def test_every_rank_writes_a_file_and_each_tensor_is_stored_once(folder: Path):
    state = folder / "states" / "step_1"
    verify(state)
    layout = json.loads((state / "shards.json").read_text())
    _, parts = read_state(state)
    written = [load_file(file) for file in sorted(state.glob("shards_*.safetensors"))]
    assert len(written) == 2
    assert all(written)
    stored = sum(piece.numel() for pieces in written for piece in pieces.values())
    # The model, and two moments of Adam.
    assert stored == 3 * sum(tensor.numel() for tensor in parts["model"].values())
    assert len(layout) == 3 * len(parts["model"])


@pytest.mark.processes
def test_the_reader_made_from_the_document_finds_the_same(folder: Path):
    state = folder / "states" / "step_1"
    _, parts = read_state(state)
    _, found = independent_reader.read_state(state)
    for part in ("model", "optimizer"):
        assert found[part] == as_lists(parts[part])


def as_lists(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return [as_lists(item) for item in value] if type(value) is list else value


Pieces = dict[str, dict[str, torch.Tensor]]


def republished(state: Path, target: Path, change: Callable[[Any, Pieces], Any]) -> Path:
    """A copy of a state with another list of sharded tensors, or other pieces, and a manifest that fits it."""
    manifest = read_manifest(state)
    layout = json.loads((state / "shards.json").read_text())
    pieces = {entry.name: load_file(state / entry.name) for entry in manifest.files if entry.name.startswith("shards_")}
    change(layout, pieces)
    changed = {"shards.json": [json.dumps(layout).encode()], **{name: chunks(some) for name, some in pieces.items()}}
    staged = begin(target)
    kept = [entry.name for entry in manifest.files if not entry.name.startswith("shards")]
    files = {**{name: [(state / name).read_bytes()] for name in kept}, **changed}
    entries = staged.write_files(files.items())
    staged.commit(manifest.facts, entries)
    return target


WEIGHT, SECOND = "model/0.weight", "model/0.weight[3:5,0:3]"
FILE = "shards_1.safetensors"
CHANGES: dict[str, Callable[[Any, Pieces], Any]] = {
    "a piece is missing": lambda layout, pieces: pieces[FILE].pop(SECOND),
    "a missing tensor": lambda layout, pieces: layout.pop(WEIGHT),
}


@pytest.mark.processes
@pytest.mark.parametrize("change", CHANGES)
def test_a_list_of_pieces_that_makes_no_sense_is_refused(folder: Path, tmp_path: Path, change: str):
    state = republished(folder / "states" / "step_1", tmp_path / "state", CHANGES[change])
    verify(state)
    with pytest.raises(InvalidCheckpointError):
        read_state(state)


@pytest.mark.processes
def test_a_copy_of_a_state_with_its_own_list_is_read(folder: Path, tmp_path: Path):
    original = folder / "states" / "step_1"
    _, copy = read_state(republished(original, tmp_path / "state", lambda layout, pieces: None))
    assert_close(dict(copy["model"]), dict(read_state(original)[1]["model"]))


@pytest.mark.processes
def test_a_damaged_piece_sends_a_run_back_to_the_state_before(folder: Path, tmp_path: Path):
    for name in ("step_1", "step_2"):
        shutil.copytree(folder / "states" / name, tmp_path / name)
    file = tmp_path / "step_2" / "shards_0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="shards_0"):
        assert find_state(tmp_path) == tmp_path / "step_1"


@pytest.mark.processes
def test_a_rank_that_dies_while_it_saves_its_part_leaves_the_state_before(tmp_path: Path):
    output = run_on_ranks(DYING, 2, tmp_path / "whole", -1, 0, cwd=REPOSITORY)
    operations = [int(text) for text in output.stdout_of_ranks]
    _, expected = read_state(tmp_path / "whole" / "first")
    assert find_state(tmp_path / "whole") == tmp_path / "whole" / "second"
    deaths = [(rank, number) for rank in (0, 1) for number in range(operations[rank])]
    if not IS_RELEASE:
        deaths = [(1, operations[1] - 1), (0, operations[0] // 2)]
    for rank, number in deaths:
        folder = tmp_path / f"{rank}_{number}"
        with pytest.raises(AssertionError, match="SIGKILL"):
            run_on_ranks(DYING, 2, folder, rank, number, cwd=REPOSITORY)
        state = find_state(folder)
        assert state is not None
        assert_same(dict(read_state(state)[1]["model"]), dict(expected["model"]), str(folder))
        begin(folder / "third").abort()  # cleans up after the dead
        assert {path.name for path in folder.iterdir()} <= {"first", "second"}
        shutil.rmtree(folder)
    record("rank killed while it saves a part of a model", {"deaths": len(deaths), "states lost": 0})


@pytest.mark.processes
def test_several_optimizers_of_a_sharded_model_do_what_they_do_with_the_whole_one(folder: Path):
    assert_close(
        torch.load(folder / "several.pt"),
        everything(train(make_trainer(shards=False, several_optimizers=True), ranks=1)),
    )
