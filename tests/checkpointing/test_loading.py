"""A checkpoint is loaded completely or not at all, whatever it contains."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.schedulers import CosineLrScheduler
from pytorch_accelerated.states.optimizers import problem_of_entries
from tests.checkpointing.same_state import assert_same_state
from tests.support.reference import regression_data, tiny_model

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamw with amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True, maximize=True),
    "adamw capturable": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), foreach=False),
    "adam fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": torch.optim.Adafactor,
}
SCHEDULERS: dict[str, Any] = {
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "multi step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 5]),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "cosine with restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 10),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.MultiStepLR(optimizer, [3, 6])], [3]
    ),
    "ours": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
}


def trained(seed: int, scheduler: str = "step", model: nn.Module | None = None) -> Trainer:
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
    "a moment of another shape": optimizer_change(exp_avg=torch.zeros(1)),
    "a rate that is text": group_change(lr="0.1"),
    "epochs that are text": scheduler_change(last_epoch="x"),
    "another kind of scheduler": put("scheduler_state_dict", {"T_max": 3, "last_epoch": 2}),
    "a model with another tensor": lambda checkpoint: checkpoint["model_state_dict"].update(
        {"0.weight": torch.ones(1)}
    ),
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


@pytest.mark.parametrize("scheduler", ["step", "one cycle", "sequential", "ours"])
def test_a_checkpoint_that_fits_is_loaded(scheduler: str, tmp_path: Path) -> None:
    saved = trained(2, scheduler)
    saved.save_checkpoint(tmp_path / "model.pt")
    trainer = trained(1, scheduler)
    trainer.load_checkpoint(tmp_path / "model.pt")
    assert_same_state(state_of(trainer), state_of(saved))


def run_of(create_optimizer: Any, create_scheduler: Any, *callbacks: Any, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 1))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    trainer = Trainer(model, nn.MSELoss(), create_optimizer(model.parameters()), callbacks=callbacks, seed=3)
    data = torch.randn(8, 2, 3, 3), torch.randn(8, 1)
    arguments |= {"eval_dataset": data, "per_device_batch_size": 4, "create_scheduler_fn": create_scheduler}
    trainer.train(data, 4, **arguments)
    return trainer


PAIRS = {
    **{name: (create, SCHEDULERS["step"]) for name, create in OPTIMIZERS.items()},
    **{name: (OPTIMIZERS["adamw"], create) for name, create in SCHEDULERS.items()},
}


@pytest.mark.parametrize("pair", PAIRS)
def test_every_optimizer_and_scheduler_is_resumed_bit_for_bit(pair: str, tmp_path: Path) -> None:
    whole = run_of(*PAIRS[pair], SaveTrainingStateCallback(tmp_path, save_every_n_epochs=2))
    resumed = run_of(*PAIRS[pair], resume_from=tmp_path / "epoch_2")
    assert_same_state(resumed.model.state_dict(), whole.model.state_dict())
    found, expected = ({**one.optimizer.state_dict()["state"]} for one in (resumed, whole))
    assert_same_state(found, expected)
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [
        group["lr"] for group in whole.optimizer.param_groups
    ]


def test_an_optimizer_with_one_state_for_all_parameters_does_not_refuse_it() -> None:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in [(), (3,), (4, 3)]]
    optimizer = torch.optim.LBFGS(parameters)

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([parameter.square().sum() for parameter in parameters]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(compute)  # type: ignore[arg-type]
    assert problem_of_entries(optimizer, optimizer.state_dict()) is None


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
        with pytest.raises(InvalidCheckpointError, match=r"from the checkpoint \(KeyError: 'b'\)"):
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
        trainer.train(regression_data(6), epochs, per_device_batch_size=3, create_scheduler_fn=SCHEDULERS["step"])
        return trainer, counter

    with_counter(2)[0].save_training_state(tmp_path / "state")
    trainer, counter = with_counter(1)
    before = [*state_of(trainer), trainer.run_history.records, trainer.run_state.state_dict(), [*counter.seen]]
    counter.likes_it = False
    with pytest.raises(InvalidCheckpointError, match=r"Counter cannot load its state .*TypeError: not that"):
        trainer.load_training_state(tmp_path / "state")
    after = [*state_of(trainer), trainer.run_history.records, trainer.run_state.state_dict(), [*counter.seen]]
    assert_same_state(after, before)


class Held(Trainer):
    """Keeps things as people do."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(model := tiny_model(), nn.MSELoss(), torch.optim.AdamW(model.parameters()), callbacks=())
        vars(self).update(parts)


def new_parts(scale: float) -> dict[str, Any]:
    head = nn.Linear(1, 1)
    nn.init.constant_(head.weight, scale)
    own = nn.Parameter(torch.full((3,), scale))
    return {"teacher": nn.Linear(2, 2), "parts": [{"head": head}], "own": own}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda parts: parts.pop("teacher"), r"had teacher, which this trainer and its loss function do not have"),
        (lambda parts: parts["parts"].clear(), r"had parts\[0\]\['head'\], which"),
        (lambda parts: parts.update(own=nn.Parameter(torch.zeros(2))), r"(?s)own: .*saved as a tensor \(3,\), the"),
        (lambda parts: parts.update(teacher=nn.Linear(3, 2)), r"(?s)teacher: .*weight: saved as a tensor \(2, 2\)"),
    ],
)
def test_what_is_held_must_fit_before_anything_changes(change: Any, told: str, tmp_path: Path) -> None:
    Held(**new_parts(1.0)).save_training_state(tmp_path / "state")
    change(parts := new_parts(2.0))
    trainer = Held(**parts)

    def values() -> list[Any]:
        modules = [trainer.model, parts.get("teacher"), *(each["head"] for each in parts["parts"])]
        states = [module.state_dict() for module in modules if module is not None]
        return copy.deepcopy([*states, parts["own"].detach()])

    before = values()
    with pytest.raises(InvalidCheckpointError, match=told):
        trainer.load_training_state(tmp_path / "state")
    assert_same_state(values(), before)


def test_states_without_what_is_held_leave_it_as_it_is_and_say_so(tmp_path: Path) -> None:
    Held().save_training_state(tmp_path / "older")
    assert not (tmp_path / "older" / "held.json").exists()
    trainer = Held(**new_parts(2.0))
    with pytest.warns(UserWarning, match=r"no values of teacher, parts\[0\]\['head'\], own: they stay"):
        trainer.load_training_state(tmp_path / "older")
    assert trainer.own.tolist() == [2.0, 2.0, 2.0]  # type: ignore[attr-defined]


def test_what_cannot_be_stored_is_left_out_with_a_warning(tmp_path: Path) -> None:
    teacher = nn.Linear(2, 2)
    teacher.weight = nn.Parameter(teacher.weight.detach().to_sparse(), requires_grad=False)
    with pytest.warns(
        UserWarning, match=r"leave out what the trainer holds at teacher.weight is a tensor with torch.sp"
    ):
        Held(teacher=teacher, own=nn.Parameter(torch.ones(3))).save_training_state(tmp_path / "state")
    trainer = Held(own=nn.Parameter(torch.zeros(3)))
    trainer.load_training_state(tmp_path / "state")
    assert trainer.own.tolist() == [1.0, 1.0, 1.0]  # type: ignore[attr-defined]
