"""A run that was interrupted and resumed equals the run that was never interrupted, to the bit."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import InvalidCheckpointError
from tests.support.processes import Output, run_forked, run_on_ranks
from tests.support.reference import regression_data, sgd, tiny_model
from tests.support.resuming import SaveAndStop, SaveAtEpochEnd, assert_same, everything, run

RANKS = Path(__file__).parents[1] / "ranks"
# An interrupted run ends before its first evaluation, so it has no best model to load.
pytestmark = pytest.mark.filterwarnings("ignore:The model has the weights of the last update")


@pytest.mark.parametrize("seed", [11, None])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_resumed_at_an_epoch_border_equals_the_uninterrupted_run(
    epochs: int, seed: int | None, tmp_path: Path
) -> None:
    whole = everything(*run(tmp_path, seed=seed))
    run(tmp_path, SaveAtEpochEnd(tmp_path / "states" / "s", epochs), seed=seed)
    resumed = everything(*run(tmp_path, seed=seed, process_seed=99, resume_from=tmp_path / "states"))
    assert_same(resumed, whole)


@pytest.mark.parametrize(("updates", "num_workers"), [(1, 0), (3, 1), (4, 0), (5, 2), (7, 0), (12, 0)])
def test_a_run_resumed_after_any_update_equals_the_uninterrupted_run(
    updates: int, num_workers: int, tmp_path: Path
) -> None:
    whole = everything(*run(tmp_path))
    run(tmp_path, SaveAndStop(tmp_path / "state", updates))
    resumed = everything(*run(tmp_path, process_seed=99, resume_from=tmp_path / "state", num_workers=num_workers))
    assert_same(resumed, whole)


@pytest.mark.processes
def test_a_run_resumed_on_two_ranks_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    run_on_ranks(RANKS / "resuming.py", 2, tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_resumed_with_another_number_of_ranks_reports_whole_epochs(
    before: int, after: int, tmp_path: Path
) -> None:
    script = RANKS / "other_world_size.py"

    def start(ranks: int, mode: str) -> Output:
        return run_forked(script, tmp_path, mode) if ranks == 1 else run_on_ranks(script, ranks, tmp_path, mode)

    start(before, "save")
    resuming = start(after, "resume")
    assert resuming.stderr.count(f"saved by {before} processes and resumes with {after}. Each sample is still") == 1
    assert "only if nothing (dropout, augmentation) draws random numbers" in resuming.stderr
    resumed, whole = (json.loads(output.stdout.splitlines()[-1]) for output in (resuming, start(1, "whole")))
    for name, value in whole.items():
        torch.testing.assert_close(torch.tensor(resumed[name]), torch.tensor(value), rtol=1e-12, atol=1e-12)


def test_resuming_a_complete_run_changes_nothing(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path)
    trainer.save_training_state(tmp_path / "final")
    again, _ = run(tmp_path, process_seed=99, resume_from=tmp_path / "final")
    assert_same(again.model.state_dict(), trainer.model.state_dict())
    assert again.run_state == trainer.run_state


def test_a_folder_without_states_means_a_fresh_start_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = everything(*run(tmp_path))
    assert_same(everything(*run(tmp_path, resume_from=tmp_path / "nothing")), fresh)
    assert f"No training state in {tmp_path / 'nothing'}: starting afresh" in capsys.readouterr().out


def test_a_resumed_run_says_where_it_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, SaveAndStop(tmp_path / "state", updates=6))
    run(tmp_path, resume_from=tmp_path / "state")
    place = "epoch 2, after update 6, with 12 samples of this epoch used"
    assert f"Resuming from {tmp_path / 'state'}: {place}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other", [torch.optim.SGD, functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.LBFGS]
)
def test_the_state_of_another_optimizer_is_refused_before_anything_changes(other: Any, tmp_path: Path) -> None:
    def trainer_with(optimizer: Any) -> Trainer:
        return Trainer(model := nn.Linear(3, 2).double(), nn.MSELoss(), optimizer(model.parameters()), callbacks=())

    adam = trainer_with(torch.optim.AdamW)
    adam.train(regression_data(6), 1)
    adam.save_checkpoint(tmp_path / "adam.pt")
    adam.save_training_state(tmp_path / "state")
    trainer = trainer_with(functools.partial(other, lr=0.1))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for load in (
        lambda: trainer.load_checkpoint(tmp_path / "adam.pt"),
        lambda: trainer.load_training_state(tmp_path / "state"),
    ):
        with pytest.raises(InvalidCheckpointError, match=r"another kind of optimizer: it has 'amsgrad', 'betas'"):
            load()
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    trainer.load_checkpoint(tmp_path / "adam.pt", load_optimizer=False)
    trainer_with(torch.optim.Adam).load_checkpoint(tmp_path / "adam.pt")


def test_the_state_of_an_optimizer_with_other_groups_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).double()
    Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters()), callbacks=()).save_checkpoint(tmp_path / "one.pt")
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(groups), callbacks=())
    with pytest.raises(InvalidCheckpointError, match=r"\[2\] parameters in its groups, but this SGD has \[1, 1\]"):
        trainer.load_checkpoint(tmp_path / "one.pt")


def test_a_damaged_state_is_an_error_before_training(tmp_path: Path) -> None:
    run(tmp_path, SaveAndStop(tmp_path / "state", 2))
    weights = tmp_path / "state" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(InvalidCheckpointError, match="model.safetensors"):
        run(tmp_path, process_seed=99, resume_from=tmp_path / "state")


def test_load_training_state_returns_what_was_saved_beside(tmp_path: Path) -> None:
    trainer = Trainer(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=())
    trainer.train(regression_data(8), 2)
    trainer.save_training_state(tmp_path / "state", {"note": "mine"})
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = trainer.load_training_state(tmp_path / "state")
    assert loaded["note"] == "mine"
    assert loaded["current_epoch"] == 3
    assert_same(model.state_dict(), expected)
