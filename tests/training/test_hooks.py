"""When the methods that users override are looked up: a patch of the class or the trainer is seen from then on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from tests.support.reference import assert_same_parameters, regression_data, tiny_model

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
        {"nonfinite_policy": "skip", "split_on_oom": True},
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


def trainer_of(kind: type[Trainer] = Trainer, callbacks: Any = ()) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return kind(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=callbacks)


def train(trainer: Trainer, **arguments: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(20, 2), torch.randn(20, 1))
    trainer.train(data, 1, per_device_batch_size=4, **arguments)


def counting(holder: Any, hook: str, calls: list[str]) -> None:
    """Replace `hook` of a trainer or class by one that also notes its name."""
    original = getattr(holder, hook)

    def noted(*args: Any) -> Any:
        calls.append(hook)
        return original(*args)

    setattr(holder, hook, noted)


def scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 10)


@pytest.mark.parametrize("of_class", [False, True])
def test_hooks_of_an_update_may_be_patched_within_a_run(of_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for hook in HOOKS_OF_UPDATE:
        monkeypatch.setattr(Own, hook, getattr(Own, hook))  # taken back after the test
    calls: list[str] = []

    def patch(trainer: Trainer) -> None:
        for hook in HOOKS_OF_UPDATE:
            counting(Own if of_class else trainer, hook, calls)

    train(trainer_of(Own, [Patching(patch)]), create_scheduler_fn=scheduler)
    assert calls == 3 * HOOKS_OF_UPDATE


def test_hooks_patched_on_the_trainer_before_a_run_count_as_overridden() -> None:
    calls: list[str] = []
    trainer = trainer_of()
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
    trainer = trainer_of(callbacks=[Sets(lambda optimizer: schedulers.StepLR(optimizer, step_size=1, gamma=0.5))])
    train(trainer)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**5

    trainer = trainer_of(callbacks=[Sets(lambda optimizer: schedulers.ReduceLROnPlateau(optimizer))])
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
