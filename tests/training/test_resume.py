"""A run that was interrupted and resumed equals the run that was never interrupted, to the bit."""

import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import MetricsCallback, SaveTrainingStateCallback
from pytorch_accelerated.errors import ConfigurationError, InvalidCheckpointError, MissingCheckpointError
from tests.huggingface.runs import OwnParts, make_trainer
from tests.support import held
from tests.support.processes import Output, run_forked, run_on_ranks
from tests.support.reference import regression_data, tiny_model, tiny_trainer
from tests.support.resuming import SaveAndStop, SaveAtEpochEnd, assert_same, everything, run
from tests.support.states import read_metric_records

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


# Schedules that step when an epoch ends.
AFTER_EPOCHS: dict[str, dict[str, Any]] = {
    "per update": {},
    "per epoch": {
        "create_scheduler_fn": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        "step_scheduler": "epoch",
    },
    "plateau": {
        "create_scheduler_fn": functools.partial(
            torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=10.0
        ),
    },
}


@pytest.mark.parametrize(("cut", "schedule"), [(2, "per update"), (6, "per epoch"), (7, "plateau"), (8, "plateau")])
def test_a_run_that_a_limit_has_cut_within_an_epoch_and_that_goes_on_equals_the_uninterrupted_run(
    cut: int, schedule: str, tmp_path: Path
) -> None:
    """Four updates are an epoch. The evaluation at the cut leaves no trace in the run that goes on."""

    states = tmp_path / "states"

    def part(limit: int, **arguments: Any) -> dict[str, Any]:
        saver = SaveTrainingStateCallback(states, save_every_n_epochs=1, keep_best=9)
        callbacks = saver, MetricsCallback({"error": MeanSquaredError(num_outputs=2)})
        arguments.update(AFTER_EPOCHS[schedule])
        return everything(*run(tmp_path, *callbacks, max_num_train_steps=limit, **arguments))

    whole = part(10)
    shutil.rmtree(states)
    first = part(cut)
    evaluations = [record for record in read_metric_records(states / "final") if record.name == "eval_loss_epoch"]
    assert len(evaluations) == math.ceil(cut / 4)  # what was measured at the cut is in the state all the same
    again = part(cut, process_seed=5, resume_from=states / "final")
    assert_same({**again, "ema": None}, {**first, "ema": None})
    assert_same(part(10, process_seed=99, resume_from=states / "final"), whole)


@pytest.mark.processes
def test_what_a_trainer_holds_is_trained_by_two_ranks_as_by_one_process_and_comes_back(tmp_path: Path) -> None:
    arguments: dict[str, Any]
    alone = {}
    for name in held.TRAINERS:
        accumulation, rows = (1, 12) if name == "a critic" else (2, held.ROWS)
        arguments = {"gradient_accumulation_steps": accumulation, "rows": rows, "gradient_clip_norm": 0.5}
        trainer = held.train(name, per_device_batch_size=4, **arguments)
        alone[name, accumulation, rows] = held.tensors_of(trainer)
    torch.save(alone, tmp_path / "alone.pt")
    faces = {}
    for accumulation in (1, 2):
        arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation}
        face = make_trainer(tmp_path / "run", kind=OwnParts, **arguments)
        face.train()
        assert isinstance(face, OwnParts)
        faces[accumulation] = face.own_values()
    torch.save(faces, tmp_path / "huggingface.pt")
    run_on_ranks(RANKS / "held.py", 2, tmp_path)


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
    assert resuming.stderr.count(f"saved by {before} processes and resumes with {after}.") == 1
    assert "only if nothing (dropout, augmentation) draws random numbers" in resuming.stderr
    resumed, whole = (json.loads(output.stdout.splitlines()[-1]) for output in (resuming, start(1, "whole")))
    for name, value in whole.items():
        torch.testing.assert_close(torch.tensor(resumed[name]), torch.tensor(value), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("name", held.TRAINERS)
def test_what_a_trainer_and_its_loss_function_hold_comes_back_to_the_bit(
    name: str, updates: int, tmp_path: Path
) -> None:
    whole = held.train(name, gradient_accumulation_steps=2)
    held.train(name, SaveAndStop(tmp_path / "state", updates), gradient_accumulation_steps=2)
    resumed = held.train(name, gradient_accumulation_steps=2, resume_from=tmp_path / "state")
    assert_same(held.tensors_of(resumed), held.tensors_of(whole))


@pytest.mark.parametrize("name", ["final", "epoch_3", "step_20"])
def test_a_path_that_names_a_state_which_is_not_there_is_an_error_and_not_a_fresh_start(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = tiny_trainer()
    for load in (
        lambda: trainer.train(regression_data(4), 1, resume_from=tmp_path / "typo" / name),
        lambda: trainer.load_training_state(tmp_path / "typo" / name),
    ):
        with pytest.raises(MissingCheckpointError, match=f"no training state .*typo/{name}.*give the folder of the"):
            load()
    assert trainer.run_state.updates == 0
    trainer.train(regression_data(4), 1, resume_from=tmp_path / "typo")
    assert capsys.readouterr().out == f"No training state in {tmp_path / 'typo'}: starting from scratch\n"
    with pytest.raises(InvalidCheckpointError, match="There is no training state in .*typo"):
        trainer.train(regression_data(8), 1, resume_from=tmp_path / "typo", must_resume=True)
    with pytest.raises(ConfigurationError, match="no `resume_from`"):
        trainer.train(regression_data(8), 1, must_resume=True)


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


# What is said to users who resume


def trained(folder: Path, model: nn.Module, num_epochs: int, *, lr: float = 0.1, **arguments: Any) -> Trainer:
    trainer = Trainer(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=lr), callbacks=(SaveTrainingStateCallback(folder),)
    )
    trainer.train(regression_data(16), num_epochs, **arguments)
    return trainer


@pytest.mark.parametrize(
    ("limit", "arguments"), [("num_epochs", {}), ("max_num_train_steps", {"max_num_train_steps": 2})]
)
def test_resuming_from_the_end_says_that_nothing_is_left_to_train(
    limit: str, arguments: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, tiny_model(), 2, **arguments)
    trained(tmp_path, tiny_model(), 2, resume_from=tmp_path, **arguments)
    said = capsys.readouterr().out
    assert f"Nothing is left to train: {tmp_path / 'final'} is the end of the run, after update " in said
    assert f"Raise `{limit}`" in said


def test_settings_of_the_optimizer_that_the_state_replaces_are_named(tmp_path: Path) -> None:
    trained(tmp_path, tiny_model(), 1)
    with pytest.warns(UserWarning, match=r"not with the new ones:\n\tlearning_rate: 0.1, not 0.01"):
        trainer = trained(tmp_path, tiny_model(), 2, lr=0.01, resume_from=tmp_path)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1
