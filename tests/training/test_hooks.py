"""When the methods that users override are looked up: a patch of the class or the trainer is seen from then on."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from tests.support.reference import assert_same_parameters, regression_data, sgd, tiny_model, tiny_trainer

DATA = regression_data(11)
ARGUMENTS: dict[str, Any] = {
    "per_device_batch_size": 2,
    "create_scheduler_fn": partial(torch.optim.lr_scheduler.StepLR, step_size=4),
}


class OwnLoop(Trainer):
    """Calls the parts of a run itself, as subclasses of earlier versions do."""

    def _run_training(self) -> None:
        self.training_run_start()
        self.callback_handler.call_event("on_training_run_start", self)
        for _ in range(self.run_config.num_epochs or 0):
            self._run_train_epoch(self._train_dataloader)
            self._run_eval_epoch(self._eval_dataloader)
            self.run_history._increment_epoch()
        self.callback_handler.call_event("on_training_run_end", self)


class Positions(TrainerCallback):
    """Collects the rows of each pass, and what the trainer knows about its position."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []
        self.epochs: list[tuple[int, bool]] = []

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        assert trainer.run_state.updates_in_epoch == trainer.run_state.samples_in_epoch == 0
        self.rows.append([])
        self.epochs.append((trainer.run_state.epochs, trainer.is_last_epoch))

    def on_train_step_end(self, trainer: Trainer, batch: Any, **kwargs: Any) -> None:
        self.rows[-1].extend(batch[0][:, 0].tolist())


def trained(kind: type[Trainer], num_epochs: int = 3, **kwargs: Any) -> tuple[Trainer, Positions]:
    trainer = tiny_trainer(positions := Positions(), base=kind, seed=3)
    trainer.train(DATA, num_epochs, DATA, **ARGUMENTS, **kwargs)
    return trainer, positions


def assert_same_run(one: Trainer, other: Trainer) -> None:
    assert_same_parameters(one.model, other.model, tolerance=0)
    assert one.run_history.get_metric_names() == other.run_history.get_metric_names()
    for name in one.run_history.get_metric_names():
        assert one.run_history.get_metric_values(name) == other.run_history.get_metric_values(name)
    assert one.scheduler.state_dict() == other.scheduler.state_dict()
    assert one.run_state.updates == other.run_state.updates


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_own_loop_over_the_epochs_trains_as_the_usual_one(accumulation: int):
    usual, expected = trained(Trainer, gradient_accumulation_steps=accumulation)
    own, positions = trained(OwnLoop, gradient_accumulation_steps=accumulation)
    assert_same_run(own, usual)
    assert positions.rows == expected.rows
    assert positions.epochs == expected.epochs == [(0, False), (1, False), (2, True)]
    assert own.run_history.current_epoch == usual.run_history.current_epoch == 4


def test_an_own_loop_saves_between_updates_and_continues_with_what_is_left(tmp_path: Path):
    """Also right after the last update of an epoch: the next pass is that of the next epoch."""

    class Saves(TrainerCallback):
        def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.save_training_state(tmp_path / str(trainer.run_state.updates))

    class Continues(OwnLoop):
        def _run_training(self) -> None:
            for _ in range(self.run_state.epochs, 3):
                self._run_train_epoch(self._train_dataloader)
                self._run_eval_epoch(self._eval_dataloader)
                self.run_history._increment_epoch()

    make = partial(tiny_trainer, base=Continues, seed=3)
    whole = make(Saves())
    whole.train(DATA, 3, DATA, **ARGUMENTS)
    assert {folder.name for folder in tmp_path.iterdir()} == {str(number) for number in range(1, 19)}
    for updates in (1, 6, 7, 12, 17):
        resumed = make()
        resumed.train(DATA, 3, DATA, resume_from=tmp_path / str(updates), **ARGUMENTS)
        assert_same_run(resumed, whole)


HOOKS_OF_UPDATE = [
    *("calculate_train_batch_loss", "backward_step"),
    *("optimizer_step", "scheduler_step", "optimizer_zero_grad"),
]


class OwnOptimizers(Trainer):
    """Has an optimizer for each layer, and gives the trainer none."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, nn.MSELoss(), None, seed=1)
        self.parts = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]

    def optimizer_step(self) -> None:
        for part in self.parts:
            part.step()

    def optimizer_zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_clip_norm": 0.1, "gradient_accumulation_steps": 2},
        {"nonfinite_policy": "skip"},
    ],
)
def test_optimizers_of_a_subclass_need_none_of_the_trainer(arguments: dict[str, Any], tmp_path: Path):
    """With all default callbacks, in a training state, and in a file."""
    data = regression_data(9)
    own = OwnOptimizers(tiny_model())
    own.callback_handler.add_callback(SaveTrainingStateCallback(tmp_path / "states"))
    own.train(data, 2, data, per_device_batch_size=4, **arguments)
    own.save_checkpoint(tmp_path / "model.pt")
    model = tiny_model()
    usual = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=(), seed=1)
    usual.train(data, 2, data, per_device_batch_size=4, **arguments)
    assert_same_parameters(own.model, usual.model, tolerance=0)
    resumed = OwnOptimizers(tiny_model())
    resumed.train(data, 2, data, per_device_batch_size=4, resume_from=tmp_path / "states", **arguments)
    resumed.load_checkpoint(tmp_path / "model.pt")
    assert_same_parameters(resumed.model, usual.model, tolerance=0)


class Patching(TrainerCallback):
    """Patches hooks of the trainer or its class when update 2 begins."""

    def __init__(self, patch: Any) -> None:
        self.patch = patch

    def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates == 2:
            self.patch(trainer)


class Own(Trainer):
    """A class of the test's own, which may be patched."""


def train(trainer: Trainer, **arguments: Any) -> None:
    trainer.train(regression_data(20), 1, per_device_batch_size=4, **arguments)


def counting(holder: Any, hook: str, calls: list[str]) -> None:
    """Replace `hook` of a trainer or class by one that also notes its name."""
    original = getattr(holder, hook)

    def noted(*args: Any) -> Any:
        calls.append(hook)
        return original(*args)

    setattr(holder, hook, noted)


@pytest.mark.parametrize("of_class", [False, True])
def test_hooks_of_an_update_may_be_patched_within_a_run(of_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for hook in HOOKS_OF_UPDATE:
        monkeypatch.setattr(Own, hook, getattr(Own, hook))  # taken back after the test
    calls: list[str] = []

    def patch(trainer: Trainer) -> None:
        for hook in HOOKS_OF_UPDATE:
            counting(Own if of_class else trainer, hook, calls)

    train(tiny_trainer(Patching(patch), base=Own), create_scheduler_fn=ARGUMENTS["create_scheduler_fn"])
    assert calls == 3 * HOOKS_OF_UPDATE


def test_hooks_patched_on_the_trainer_before_a_run_count_as_overridden() -> None:
    calls: list[str] = []
    trainer = tiny_trainer()
    for hook in ("scheduler_step", "count_batch_items"):
        counting(trainer, hook, calls)
    train(trainer)
    assert sorted(calls) == 5 * ["count_batch_items"] + 5 * ["scheduler_step"]


def test_a_scheduler_that_a_callback_sets_is_stepped() -> None:
    class Sets(TrainerCallback):
        def __init__(self, create: Any) -> None:
            self.create = create

        def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.scheduler = self.create(trainer.optimizer)

    schedulers = torch.optim.lr_scheduler
    trainer = tiny_trainer(Sets(lambda optimizer: schedulers.StepLR(optimizer, step_size=1, gamma=0.5)))
    train(trainer)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**5

    trainer = tiny_trainer(Sets(lambda optimizer: schedulers.ReduceLROnPlateau(optimizer)))
    train(trainer, scheduler_metric="train_loss_epoch")
    assert trainer.scheduler.last_epoch == 1, "after the epoch, with the metric"


class SilentStarts(Trainer):
    """Overrides the starts of epochs without calling the base, and sees in which mode a model computes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.modes: list[tuple[str, bool, bool]] = []
        self.frozen: nn.Module | None = None

    def train_epoch_start(self) -> None:
        if self.frozen is not None:
            self.frozen.eval()

    def eval_epoch_start(self) -> None: ...

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.modes.append(("train", self.model.training, self.model[0].training))
        return super().calculate_train_batch_loss(batch)

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        self.modes.append(("eval", self.model.training, self.model[0].training))
        return super().calculate_eval_batch_loss(batch)


def test_the_loop_sets_the_mode_before_a_hook_that_forgets_to_and_a_hook_may_set_another() -> None:
    data = regression_data(4)
    model = tiny_model().eval()
    trainer = SilentStarts(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    trainer.train(data, 2, data, per_device_batch_size=4)
    assert trainer.modes == 2 * [("train", True, True), ("eval", False, False)]
    trainer.modes.clear()
    model.train()
    trainer.evaluate(data)
    assert trainer.modes == [("eval", False, False)]
    trainer.modes.clear()
    trainer.frozen = trainer.model[0]
    trainer.train(data, 1, per_device_batch_size=4)
    assert trainer.modes == [("train", True, False)]


class Batches(nn.Module):
    """Notes the modes of its parts in each batch of training."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.free = nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
        self.modes: list[tuple[bool, ...]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.modes.append((self.training, self.frozen.training, self.free.training, self.free[1].training))
        return self.free(self.frozen(inputs))  # type: ignore[no-any-return]


class Evaluates(TrainerCallback):
    """Evaluates by itself within the epoch, and forgets `train()`."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.get_model().frozen.eval()

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates in (1, 3):
            if self.how == "request":
                trainer.request_evaluation()
            elif self.how == "by itself":
                model = trainer.get_model().eval()
                with torch.no_grad():
                    model(torch.ones(4, 3).double())


@pytest.mark.parametrize("how", ["not at all", "request", "by itself"])
def test_a_callback_that_forgets_train_leaves_the_next_update_as_it_was_and_frozen_modules_frozen(how: str) -> None:
    data, model = regression_data(8), Batches().double()
    trainer = Trainer(model, nn.MSELoss(), sgd(model), callbacks=[Evaluates(how)], seed=2)
    said = "has left the model in evaluation mode"
    with pytest.warns(UserWarning, match=said) if how == "by itself" else contextlib.nullcontext():
        trainer.train(data, 2, data, per_device_batch_size=2)
    assert model.modes == [(True, False, True, True)] * 8
    model.modes.clear()
    own = Trainer(model, nn.MSELoss(), sgd(model), callbacks=[InEvaluationMode()])
    own.train(data, 1, per_device_batch_size=2)
    assert model.modes == [(False, False, False, False)] * 4, "a user may train in evaluation mode"


class InEvaluationMode(TrainerCallback):
    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.get_model().eval()
