"""A checkpoint is loaded completely or not at all, whatever it contains."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.checkpointing.matching import mismatch
from pytorch_accelerated.checkpointing.optimizers import problem_of_entries
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.schedulers import CosineLrScheduler
from tests.checkpointing.same_state import assert_same_state
from tests.support.reference import regression_data, tiny_model

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)],
        [3],
    ),
    "ours": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
}


def trained(seed: int, scheduler: str = "StepLR", model: nn.Module | None = None) -> Trainer:
    model = tiny_model(seed=seed) if model is None else model
    trainer = Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), 0.01), callbacks=(), seed=3)
    trainer.train(regression_data(6), seed, per_device_batch_size=3, create_scheduler_fn=SCHEDULERS[scheduler])
    return trainer


def state_of(trainer: Trainer) -> Any:
    parts = (trainer.model, trainer.optimizer, trainer.scheduler)
    return copy.deepcopy([part.state_dict() for part in parts])


def optimizer_change(**change: Any) -> Callable[[dict[str, Any]], None]:
    """Change the optimizer's entry for its first parameter; None removes an item."""

    def apply(checkpoint: dict[str, Any]) -> None:
        entry = checkpoint["optimizer_state_dict"]["state"][0]
        for name, value in change.items():
            if value is None:
                del entry[name]
            else:
                entry[name] = value

    return apply


def group_change(**change: Any) -> Callable[[dict[str, Any]], None]:
    return lambda checkpoint: checkpoint["optimizer_state_dict"]["param_groups"][0].update(change)


def scheduler_change(**change: Any) -> Callable[[dict[str, Any]], None]:
    return lambda checkpoint: checkpoint["scheduler_state_dict"].update(change)


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda checkpoint: checkpoint.update({name: value})


ODD: dict[str, Callable[[dict[str, Any]], None]] = {
    "an optimizer that is text": put("optimizer_state_dict", "adam"),
    "an optimizer that is a list": put("optimizer_state_dict", []),
    "no groups": put("optimizer_state_dict", {"state": {}, "param_groups": []}),
    "a moment of another shape": optimizer_change(exp_avg=torch.zeros(1)),
    "a moment of another kind": optimizer_change(exp_avg=torch.zeros(4, 3, dtype=torch.int64)),
    "a moment that is a number": optimizer_change(exp_avg=0.5),
    "a moment that is missing": optimizer_change(exp_avg_sq=None),
    "steps that are text": optimizer_change(step="3"),
    "steps that are a vector": optimizer_change(step=torch.ones(3)),
    "an entry that is a list": lambda checkpoint: checkpoint["optimizer_state_dict"]["state"].update({0: [1]}),
    "an entry of nobody": lambda checkpoint: checkpoint["optimizer_state_dict"]["state"].update({99: {}}),
    "a rate that is text": group_change(lr="0.1"),
    "a rate that is None": group_change(lr=None),
    "betas that are a number": group_change(betas=0.9),
    "betas with one number": group_change(betas=(0.9,)),
    "amsgrad that is a list": group_change(amsgrad=[]),
    "more moments than there are": group_change(amsgrad=True),
    "a scheduler that is text": put("scheduler_state_dict", "step"),
    "epochs that are text": scheduler_change(last_epoch="x"),
    "epochs that are a fraction": scheduler_change(last_epoch=2.5),
    "epochs that are None": scheduler_change(last_epoch=None),
    "a factor that is a list": scheduler_change(gamma=[]),
    "a length of steps of zero": scheduler_change(step_size=0),
    "rates of two groups": scheduler_change(_last_lr=[0.1, 0.1], base_lrs=[0.1, 0.1]),
    "a method": scheduler_change(step=3),
    "another kind of scheduler": put("scheduler_state_dict", {"T_max": 3, "last_epoch": 2}),
    "a model that is a list": put("model_state_dict", []),
    "a model with another tensor": lambda checkpoint: checkpoint["model_state_dict"].update(
        {"0.weight": torch.ones(1)}
    ),
    "a model with a number": lambda checkpoint: checkpoint["model_state_dict"].update({"0.weight": 3}),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_checkpoint_changes_nothing(name: str, tmp_path: Path) -> None:
    trained(2).save_checkpoint(tmp_path / "model.pt")
    checkpoint = torch.load(tmp_path / "model.pt", weights_only=True)
    ODD[name](checkpoint)
    torch.save(checkpoint, tmp_path / "model.pt")
    trainer = trained(1)
    before = state_of(trainer)
    with pytest.raises(InvalidCheckpointError):
        trainer.load_checkpoint(tmp_path / "model.pt")
    assert_same_state(state_of(trainer), before)
    trainer.train(regression_data(6), 1)  # nothing is left of the attempt


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_checkpoint_that_fits_is_loaded(scheduler: str, tmp_path: Path) -> None:
    saved = trained(2, scheduler)
    saved.save_checkpoint(tmp_path / "model.pt")
    trainer = trained(1, scheduler)
    trainer.load_checkpoint(tmp_path / "model.pt")
    assert_same_state(state_of(trainer), state_of(saved))


@pytest.mark.parametrize(
    "make",
    [
        lambda some: torch.optim.SGD(some, 0.1),
        lambda some: torch.optim.SGD(some, 0.1, momentum=0.9),
        lambda some: torch.optim.Adam(some, torch.tensor(0.1), amsgrad=True),
        lambda some: torch.optim.AdamW(some, fused=True),
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.LBFGS,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    ],
)
def test_no_optimizer_refuses_its_own_state(make: Any) -> None:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in [(), (3,), (4, 3), (2, 3, 4)]]
    optimizer = make(parameters)
    assert problem_of_entries(optimizer, optimizer.state_dict()) is None

    def compute() -> float:
        optimizer.zero_grad()
        loss = torch.stack([parameter.square().sum() for parameter in parameters]).sum()
        loss.backward()
        return loss.item()

    for _ in range(2):
        optimizer.step(compute)
        assert problem_of_entries(optimizer, optimizer.state_dict()) is None


def test_states_whose_next_step_would_fail_are_rejected() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    assert problem_of_entries(optimizer, saved) is None
    assert problem_of_entries(optimizer, {**saved, "state": {0: {}}}) is None
    entries: tuple[Any, ...] = ((), [], None, 0)
    for entry in entries:
        problem = problem_of_entries(optimizer, {**saved, "state": {0: entry}})
        assert problem is not None
        assert "entry for parameter 0" in problem
    for momentum in (1.0, -0.1, float("nan")):
        groups = [{**saved["param_groups"][0], "base_momentum": momentum}]
        assert "base_momentum" in (problem_of_entries(optimizer, {**saved, "param_groups": groups}) or "")


class Stubborn(nn.Linear):
    """Loads its extra state last, and does not like it."""

    likes_it = True

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        if not self.likes_it:
            raise KeyError("b")


def test_the_weights_of_a_model_that_fails_late_are_restored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained(2, model=nn.Sequential(nn.Linear(3, 3), Stubborn(3, 2)).double()).save_checkpoint(tmp_path / "model.pt")
    model = nn.Sequential(nn.Linear(3, 3), Stubborn(3, 2)).double()
    trainer = trained(1, model=model)
    before = state_of(trainer)
    Stubborn.likes_it = False
    try:
        with pytest.raises(InvalidCheckpointError, match=r"cannot load the saved state \(KeyError: 'b'\)"):
            trainer.load_checkpoint(tmp_path / "model.pt")
    finally:
        Stubborn.likes_it = True
    assert_same_state(state_of(trainer), before)


class Counter(TrainerCallback):
    """Has its own state, and loads only a state that it likes."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.likes_it = True

    def on_optimizer_step_end(self, trainer: Any, **kwargs: Any) -> None:
        self.seen.append(trainer.run_state.updates)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.clear()
        self.seen.extend(state["seen"])
        if not self.likes_it:
            raise TypeError("not that")


def test_a_callback_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    def with_counter(epochs: int) -> tuple[Trainer, Counter]:
        model, counter = tiny_model(seed=epochs), Counter()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=[counter], seed=3)
        trainer.train(regression_data(6), epochs, per_device_batch_size=3, create_scheduler_fn=SCHEDULERS["StepLR"])
        return trainer, counter

    with_counter(2)[0].save_training_state(tmp_path / "state")
    trainer, counter = with_counter(1)
    before = [*state_of(trainer), trainer.run_history.state_dict(), trainer.run_state.state_dict(), [*counter.seen]]
    counter.likes_it = False
    with pytest.raises(InvalidCheckpointError, match=r"Counter cannot load its state .*TypeError: not that"):
        trainer.load_training_state(tmp_path / "state")
    after = [*state_of(trainer), trainer.run_history.state_dict(), trainer.run_state.state_dict(), [*counter.seen]]
    assert_same_state(after, before)


@pytest.mark.parametrize(
    ("live", "saved", "fits"),
    [
        (1, 2.5, True),
        (1.0, torch.tensor(2.0), True),
        (1, True, False),
        (True, 1, False),
        ("a", None, False),
        (None, object(), True),
        ([1, 2], (3.0, 4.0, 5.0), True),
        ([1, 2], [3, "x"], False),
        ([], ["x"], True),
        ({"a": 1}, {"b": "x"}, True),
        ({"a": {"b": 1}}, {"a": {"b": "x"}}, False),
        ({1: 2}, {3: 4, 5: 6}, True),
        ({1: 2}, {"x": 4}, False),
        (torch.ones(2), 3, True),
        (torch.ones(2), [1], False),
        (object(), 3, True),
    ],
)
def test_entries_of_another_kind_are_noticed(live: Any, saved: Any, fits: bool) -> None:
    assert (mismatch(live, saved, "it") is None) == fits
