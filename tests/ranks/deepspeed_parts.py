"""Runs under torchrun on two ranks: what users do around a run with DeepSpeed, at each stage that is given."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DummyOptim
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import ModelEmaCallback, SaveBestModelCallback, TrainerCallback
from pytorch_accelerated.errors import ConfigurationError
from tests.support.reference import windows_of_epoch
from tests.support.resuming import assert_same
from tests.support.zero import (
    EVAL_ROWS,
    ROWS,
    config,
    data,
    everything,
    make_model,
    make_optimizer,
    make_trainer,
    saver,
    train,
)

deepspeed: Any = importlib.import_module("deepspeed")
folder, stages = Path(sys.argv[1]), map(int, sys.argv[2].split(","))
TOLERANCE = 2e-5


def by_hand() -> dict[str, torch.Tensor]:
    """The weights after one epoch, in float64: one loss per update."""
    model = make_model(dropout=0.0).double()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
    inputs, targets = data()
    for rows in windows_of_epoch(ROWS, 12, seed=3, epoch=0):
        nn.functional.mse_loss(model(inputs[rows].double()), targets[rows].double()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: value.float() for name, value in model.state_dict().items()}


class Statistics(nn.Module):
    """Keeps a moving mean of what passes."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(values.detach().mean(0), 0.1)
        return values


class CountUpdates(TrainerCallback):
    def __init__(self) -> None:
        self.updates: list[int] = []

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.updates.append(trainer.run_state.updates)


class Rates(TrainerCallback):
    def __init__(self) -> None:
        self.of_updates: list[float] = []

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.of_updates.append(trainer.optimizer.param_groups[0]["lr"])


class CountsLate(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output: dict[str, Any] = super().calculate_train_batch_loss(batch)
        return {**output, "num_items_in_batch": len(batch[0])}


def complaint(settings: dict[str, Any], model: nn.Module | None = None, **arguments: Any) -> str:
    """What a run is refused for. The model stays as it is."""
    of_run = {name: arguments.pop(name) for name in list(arguments) if name.startswith("gradient_")}
    trainer = make_trainer(settings, model=model, **arguments)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ConfigurationError) as error:
        train(trainer, **of_run)
    if trainer.run_state.updates == 0 and not hasattr(next(trainer.model.parameters()), "ds_tensor"):
        assert_same(dict(trainer.model.state_dict()), before)
    return str(error.value)


def assert_same_first(run: Trainer, actual: Any, wanted: Any, **options: Any) -> None:
    """What was gathered is on the first rank only."""
    if run._ranks.is_first:
        assert_same(actual, wanted, **options)


expected = by_hand()
for stage in stages:
    settings = config(stage)

    # Updates are those of a loop by hand, and each of them is one event.
    counting = CountUpdates()
    run = make_trainer(settings, counting, model=make_model(dropout=0.0))
    train(run, epochs=1)
    results = everything(run)
    assert_same_first(run, results["model"], expected, tolerance=TOLERANCE)
    assert counting.updates == list(range(1, 21))

    # A file of whole weights under plain names, which anything can read.
    run.save_checkpoint(folder / f"{stage}.pt")
    run._ranks.wait()
    file = torch.load(folder / f"{stage}.pt", weights_only=True)
    model = make_model(dropout=0.0)
    model.load_state_dict(file["model_state_dict"])
    assert_same_first(run, dict(model.state_dict()), results["model"])
    assert file["optimizer_state_dict"]["state"][0]["exp_avg"].shape == (5, 3)
    optimizer = make_optimizer(model)
    optimizer.load_state_dict(file["optimizer_state_dict"])

    # Another run of the same trainer goes on with the optimizer's state, as one of a plain trainer that loads the file.
    plain = make_trainer(None, model=make_model(dropout=0.0))
    plain.load_checkpoint(folder / f"{stage}.pt")
    train(run, epochs=1, create_scheduler_fn=None)
    loaded = everything(train(plain, epochs=1, create_scheduler_fn=None))
    assert_same_first(run, everything(run)["model"], loaded["model"], tolerance=TOLERANCE)
    print("stage", stage, "goes on", flush=True)

    # The best model, and an average.
    best = SaveBestModelCallback(folder / f"best_{stage}.pt")
    averaging = ModelEmaCallback(decay=0.9, save_path=folder / f"ema_{stage}.pt", evaluate_during_training=False)
    if stage < 3:
        train(make_trainer(settings, best, averaging, model=make_model(dropout=0.0)))
        plain_average = ModelEmaCallback(decay=0.9, save_path=folder / "ema.pt", evaluate_during_training=False)
        train(make_trainer(None, plain_average, model=make_model(dropout=0.0)))
        states = [dict(each.ema_model.module.state_dict()) for each in (averaging, plain_average)]
        assert_same(states[0], states[1], tolerance=TOLERANCE)
    else:
        train(make_trainer(settings, best, model=make_model(dropout=0.0)))
        with pytest.raises(ConfigurationError, match="ZeRO 3"):
            train(make_trainer(settings, averaging))
    make_model().load_state_dict(torch.load(folder / f"best_{stage}.pt", weights_only=True)["model_state_dict"])

    # A model that is cut up as it is made.
    if stage == 3:
        with deepspeed.zero.Init(config_dict_or_path={**settings, "train_micro_batch_size_per_gpu": 3}):
            cut = make_model(dropout=0.0)
        assert all(hasattr(each, "ds_tensor") for each in cut.parameters())
        evaluated = make_trainer(settings, model=cut)
        evaluated.evaluate(data(EVAL_ROWS), per_device_batch_size=3)
        evaluated.load_checkpoint(folder / "3.pt", load_optimizer=False)
        assert_same_first(evaluated, everything(evaluated)["model"], results["model"])
        with deepspeed.zero.Init(config_dict_or_path={**settings, "train_micro_batch_size_per_gpu": 3}):
            cut = make_model(dropout=0.0)
        trained = train(make_trainer(settings, model=cut), epochs=1)
        assert_same(everything(trained), results, tolerance=TOLERANCE)

    # Statistics are those of the first rank, and of a run that was resumed.
    of_plain, of_run, of_resumed = (make_model(dropout=0.0).append(Statistics()) for _ in range(3))
    train(make_trainer(None, model=of_plain))
    saving = saver(folder / f"statistics_{stage}")
    train(make_trainer(settings, saving, model=of_run))
    train(make_trainer(settings, model=of_resumed), resume_from=folder / f"statistics_{stage}" / "step_36")
    assert_same(dict(of_resumed.named_buffers()), dict(of_run.named_buffers()))
    assert_same(dict(of_run.named_buffers()), dict(of_plain.named_buffers()), tolerance=TOLERANCE)

    # What cannot work.
    model = make_model()
    body, head = list(model.parameters())[:2], list(model.parameters())[2:]
    several = {"body": torch.optim.SGD(body, lr=0.1), "head": torch.optim.SGD(head, lr=0.1)}
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": "auto", "warmup_num_steps": 4, "total_num_steps": "auto"}
    scheduled = {**settings, "scheduler": {"type": "WarmupDecayLR", "params": {**warmup, "warmup_type": "linear"}}}
    assert "create_scheduler_fn" in complaint(scheduled)
    rates = Rates()
    train(make_trainer(scheduled, rates), epochs=1, create_scheduler_fn=None)
    given: dict[str, Any] = {**warmup, "warmup_type": "linear", "warmup_max_lr": 0.02, "total_num_steps": 20}
    alone = torch.optim.SGD([torch.zeros(1)], lr=0.02)
    schedule = importlib.import_module("deepspeed.runtime.lr_schedules").WarmupDecayLR(alone, **given)
    for rate in rates.of_updates:
        assert rate == alone.param_groups[0]["lr"]
        schedule.step()
    assert len(set(rates.of_updates)) > 10
    adam = {"type": "AdamW", "params": {"lr": 0.02}}
    assert "DummyOptim" in complaint({**settings, "optimizer": adam})
    assert "DummyOptim" in complaint(settings, optimizer=DummyOptim(list(make_model().parameters())))
    assert "several optimizers" in complaint(settings, model, optimizer=several)
    extra = nn.Parameter(torch.ones(1))
    model = make_model()
    outside = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    assert "not the model's" in complaint(settings, model, optimizer=outside)
    clipped = complaint({**settings, "gradient_clipping": 3.0})
    assert "config has gradient_clipping: 3.0, but `train(gradient_clip_norm=...)` is 0.5: give the same" in clipped
    assert "or write 'gradient_clipping'" in complaint({**settings, "gradient_cliping": 3.0})
    assert "train_micro_batch_size_per_gpu: 8" in complaint({**settings, "train_micro_batch_size_per_gpu": 8})
    assert "gradient_accumulation_steps: 4" in complaint({**settings, "gradient_accumulation_steps": 4})
    assert "nvme" in complaint(config(stage, zero_optimization={"offload_optimizer": {"device": "nvme"}}))
    assert "float64" in complaint(settings, make_model().double())
    if stage > 0:
        assert "count_batch_items" in complaint(settings, base=CountsLate)
        assert "gradient_clip_norm" in complaint(settings, gradient_clip_value=0.1, gradient_clip_norm=None)
print("all is well", flush=True)
