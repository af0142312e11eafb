"""What users are told who train again, resume, or pass data in a way that cannot do what they expect."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.optim import lr_scheduler

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from pytorch_accelerated.errors import ArgumentTypeError, InvalidCheckpointError
from pytorch_accelerated.schedulers import CosineLrScheduler

INPUTS, TARGETS = load_wine(return_X_y=True)
INPUTS = ((INPUTS - INPUTS.mean(0)) / INPUTS.std(0)).astype(np.float32)
DATA = INPUTS, TARGETS


def layers(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(inputs, outputs) for inputs, outputs in zip(widths[:-1], widths[1:], strict=True)))


def trainer_of(model: nn.Module | None = None, *callbacks: Any, lr: float = 0.1, weight_decay: float = 0.0) -> Trainer:
    model = layers(13, 3) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=callbacks, seed=1)


def saved_run(folder: Path, **arguments: Any) -> None:
    trainer_of(layers(13, 4, 3), SaveTrainingStateCallback(folder)).train(DATA, 2, **arguments)


# A run after a run


def with_cosine() -> Trainer:
    trainer = trainer_of()
    trainer.train(DATA, 2, create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=0))
    assert trainer.optimizer.param_groups[0]["lr"] < 1e-4
    return trainer


def test_a_second_run_at_the_rate_where_a_schedule_ended_is_warned_about() -> None:
    trainer = with_cosine()
    with pytest.warns(UserWarning, match=r"learning rate is 1e-06: the schedule of an earlier run .* from 0.1 on"):
        trainer.train(DATA, 1)


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=46)


def test_a_schedule_that_begins_with_the_rate_that_was_left_is_warned_about() -> None:
    trainer = trainer_of()
    trainer.train(DATA, 2, create_scheduler_fn=cosine)
    left = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.warns(UserWarning, match="has left it there, from 0.1 on, and CosineAnnealingLR begins with it"):
        trainer.train(DATA, 1, create_scheduler_fn=cosine)
    assert all(map(torch.equal, left, trainer.model.parameters()))  # it was right


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (partial(lr_scheduler.StepLR, step_size=1), "multiplies the learning rate by 1e-23"),
        (partial(lr_scheduler.ExponentialLR, gamma=0.5), "multiplies the learning rate by 1e-07"),
        (partial(lr_scheduler.PolynomialLR, total_iters=3), "multiplies the learning rate by 0"),
        (partial(lr_scheduler.MultiStepLR, milestones=[1, 2]), "passes all of its milestones"),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=3), "down and up again every 6 updates"),
    ],
    ids=lambda value: value.func.__name__ if isinstance(value, partial) else "",
)
def test_a_schedule_whose_numbers_seem_to_count_epochs_is_warned_about(schedule: Any, said: str) -> None:
    with pytest.warns(UserWarning, match=f"after each of the 23 updates of an epoch, .*{said}.*step_scheduler=.epoch"):
        trainer_of().train(DATA, 3, create_scheduler_fn=schedule)
    trainer_of().train(DATA, 3, create_scheduler_fn=schedule, step_scheduler="epoch")
    trainer_of().train(DATA, 1, create_scheduler_fn=schedule)  # a run of one epoch may use them up

    class StepsAfterEpochs(Trainer):
        def scheduler_step(self) -> None: ...

        def train_epoch_end(self) -> None:
            self.scheduler.step()

    optimizer = torch.optim.SGD((model := layers(13, 3)).parameters(), lr=0.1)
    StepsAfterEpochs(model, nn.CrossEntropyLoss(), optimizer, callbacks=()).train(DATA, 3, create_scheduler_fn=schedule)


def test_a_warmup_from_zero_after_a_schedule_is_not() -> None:
    trainer = trainer_of()
    trainer.train(DATA, 2, create_scheduler_fn=cosine)
    left = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train(
        DATA, 1, create_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 23)
    )
    assert not any(map(torch.equal, left, trainer.model.parameters()))


def test_a_second_run_with_a_schedule_or_a_new_rate_is_not() -> None:
    trainer = with_cosine()
    trainer.train(DATA, 1, create_scheduler_fn=CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=0))
    trainer.optimizer.param_groups[0]["lr"] = 0.01
    trainer.train(DATA, 1)
    assert trainer.run_state.updates == 23


# Resuming


@pytest.mark.parametrize(
    ("limit", "arguments"), [("num_epochs", {}), ("max_num_train_steps", {"max_num_train_steps": 9})]
)
def test_resuming_from_the_end_says_that_nothing_is_left_to_train(
    limit: str, arguments: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_run(tmp_path, **arguments)
    capsys.readouterr()
    trainer = trainer_of(layers(13, 4, 3))
    trainer.train(DATA, 2, resume_from=tmp_path, **arguments)
    said = capsys.readouterr().out
    assert f"Nothing is left to train: {tmp_path / 'final'} is the end of the run, after update " in said
    assert f"Raise `{limit}` to go on" in said
    assert "Resuming" not in said


@pytest.mark.parametrize("widths", [(13, 4, 4, 3), (13, 5, 3), (13, 3)])
def test_resuming_with_another_model_names_its_parameters(widths: tuple[int, ...], tmp_path: Path) -> None:
    saved_run(tmp_path)
    with pytest.raises(
        InvalidCheckpointError, match=r"does not belong to this Sequential; nothing was loaded:\n.*\d\."
    ):
        trainer_of(layers(*widths)).train(DATA, 3, resume_from=tmp_path)


def test_settings_of_the_optimizer_that_the_state_replaces_are_named(tmp_path: Path) -> None:
    saved_run(tmp_path)
    trainer = trainer_of(layers(13, 4, 3), lr=0.01, weight_decay=0.5)
    with pytest.warns(
        UserWarning, match=r"not with the new ones:\n\tlearning_rate: 0.1, not 0.01\n\tweight_decay: 0.0, not"
    ):
        trainer.train(DATA, 3, resume_from=tmp_path)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1


def test_the_rate_of_a_schedule_is_none_of_them(tmp_path: Path) -> None:
    schedule = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=0)
    first = trainer_of(layers(13, 4, 3), SaveTrainingStateCallback(tmp_path))
    first.train(DATA, 3, max_num_train_steps=30, create_scheduler_fn=schedule)
    assert first.optimizer.param_groups[0]["lr"] < 0.1
    trainer_of(layers(13, 4, 3)).train(DATA, 3, create_scheduler_fn=schedule, resume_from=tmp_path)


# Data


TABLE = pd.DataFrame(INPUTS)


@pytest.mark.parametrize(
    "dataset", [TABLE, (TABLE, pd.Series(TARGETS)), (TABLE, TARGETS)], ids=["table", "tables", "table and array"]
)
def test_a_table_says_how_to_pass_its_values(dataset: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"A DataFrame is no dataset.*to_numpy\(\"float32\"\)"):
        trainer_of().train(dataset, 1)
    with pytest.raises(ArgumentTypeError, match="A DataFrame is no dataset"):
        trainer_of().predict(dataset)


def test_what_it_says_works() -> None:
    trainer = trainer_of()
    trainer.train((TABLE.to_numpy("float32"), pd.Series(TARGETS).to_numpy()), 1)
    assert trainer.predict(TABLE.to_numpy("float32")).shape == (178, 3)


def test_inputs_and_targets_as_two_arguments_are_explained() -> None:
    with pytest.raises(ArgumentTypeError, match=r"an object \(ndarray\).* one dataset: `train\(\(inputs, targets\), "):
        trainer_of().train(INPUTS, TARGETS)
