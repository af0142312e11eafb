"""A run that is written as a plain script ends with the same bits, and the script needs nothing of this library."""

from __future__ import annotations

import ast
import random
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.__main__ import main
from pytorch_accelerated.callbacks import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from pytorch_accelerated.data import Mixture
from pytorch_accelerated.errors import ConfigurationError, DataError
from pytorch_accelerated.schedulers import CosineLrScheduler
from tests.chaos.size import some

Run = tuple[
    Callable[[], tuple[nn.Module, nn.Module, torch.optim.Optimizer]], Any, dict[str, Any], list[Any], int | None
]


class Doubled(nn.CrossEntropyLoss):
    """A loss with a forward of its own, so nobody knows what it divides by."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input, target)


class Tied(nn.Module):
    """A weight with two names, and a mask with infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(inputs)))


class Augmented(Dataset[Any]):
    """Rows with noise of all generators."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * torch.randn(4) + 0.1 * random.random() + 0.1 * float(np.random.randn())
        return self.inputs[index] + noise, self.targets[index]


class Drawing(nn.Module):
    """Adds noise of all generators in training."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.1 * float(np.random.rand()) + 0.1 * random.random() if self.training else inputs


def random_run(seed: int) -> Run:
    """A run with a random choice of what can be written as a plain script."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, has_classes = choose.choice([17, 41, 66]), choose.random() < 0.5
    inputs = torch.randn(rows, 4, generator=generator)
    targets = torch.randn(rows, 3, generator=generator)
    weight, ignored = choose.choice([None, torch.tensor([1.0, 2.0, 0.5])]), choose.choice([-100, -100, 1])
    norms, is_tied, kind = (
        choose.random() < 0.3,
        choose.random() < 0.3,
        choose.choice([nn.CrossEntropyLoss] * 3 + [Doubled]),
    )
    if has_classes:
        targets = torch.randint(0, 3, (rows,), generator=generator)
        targets[1::5] = ignored if choose.random() < 0.3 and kind is not Doubled else 0
    rates: Any = choose.choice([partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)])

    def parts() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        between = [nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.2)] if norms else [nn.Tanh(), nn.Dropout(0.2)]
        model = nn.Sequential(nn.Linear(4, 8), *between, *[Tied()] * is_tied, Drawing(), nn.Linear(8, 3))
        loss = kind(weight, ignore_index=ignored) if has_classes else nn.MSELoss()
        return model, loss, rates(model.parameters())

    whole = TensorDataset(inputs, targets)
    data = choose.choice([(inputs, targets), whole, Augmented(inputs, targets), Subset(whole, range(1, rows))])
    arguments: dict[str, Any] = {
        "num_epochs": choose.choice([1, 3]),
        "per_device_batch_size": choose.choice([4, 7, 16]),
        "gradient_accumulation_steps": choose.choice([1, 1, 2, 3]),
    }
    arguments |= choose.choice([{}, {"gradient_clip_norm": 0.5}, {"gradient_clip_value": 0.1}])
    arguments |= choose.choice([{}, {}, {"max_num_train_steps": choose.choice([1, 5, 9])}])
    arguments |= choose.choice(
        [{}, *({"train_dataloader_kwargs": each} for each in ({"drop_last": True}, {"shuffle": False}))]
    )
    has_eval = choose.random() < 0.7
    arguments |= {"eval_dataset": choose.choice([(inputs[:11], targets[:11]), whole])} if has_eval else {}
    per_epoch = {"create_scheduler_fn": partial(ExponentialLR, gamma=0.5), "step_scheduler": "epoch"}
    schedules: list[dict[str, Any]] = [{}, {"create_scheduler_fn": partial(ExponentialLR, gamma=0.9)}, per_epoch]
    plateaus = [
        ReduceLROnPlateau,
        partial(ReduceLROnPlateau, patience=0),
        lambda optimizer: ReduceLROnPlateau(optimizer),
    ]
    schedules += [{"create_scheduler_fn": choose.choice(plateaus)}] * has_eval
    arguments |= choose.choice(schedules)
    metric = "eval_loss_epoch" if has_eval and choose.random() < 0.7 else "train_loss_epoch"
    callbacks: list[Any] = [
        SaveBestModelCallback("best.pt", watch_metric=metric, load_saved_checkpoint=choose.random() < 0.7),
        EarlyStoppingCallback(1, choose.choice([0, 0.01, 0.3]), watch_metric=metric),
        ModelEmaCallback(0.9, evaluate_during_training=False, save_path="average.pt"),
        SaveTrainingStateCallback("states"),
    ]
    return parts, data, arguments, choose.sample(callbacks, choose.randint(0, 3)), choose.choice([None, 0, 7])


def module_of(path: Path) -> types.ModuleType:
    """The ejected script, as if it had been imported; it imports nothing of ours."""
    text = path.read_text(encoding="utf-8")
    imported = {name.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for name in node.names}
    assert imported <= {"copy", "hashlib", "math", "random", "numpy", "torch"}
    module = types.ModuleType(path.stem)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


@pytest.mark.parametrize("seed", some(range(24), range(200)))
def test_a_random_run_and_its_script_end_with_the_same_bits(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ours", "plain"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "ours")
    parts, data, arguments, callbacks, seed_of_run = random_run(seed)
    model, loss_func, optimizer = parts()
    trainer = Trainer(model, loss_func, optimizer, callbacks=callbacks, seed=seed_of_run)
    others = [arguments[name] for name in ("eval_dataset", "create_scheduler_fn") if name in arguments]
    script = trainer.eject(tmp_path / "script.py", data, **arguments)
    try:
        history = trainer.train(data, **arguments)
    except DataError:  # an update without a target that counts
        with pytest.raises(ValueError, match="No target of an update counts"):
            module_of(script).train(*parts(), data, *others)
        return
    drawn = [float(torch.rand(())), random.random(), np.random.rand()]

    monkeypatch.chdir(tmp_path / "plain")
    capsys.readouterr()
    of_script = module_of(script).train(*parts(), data, *others)
    printed = capsys.readouterr().out.splitlines()
    assert [float(torch.rand(())), random.random(), np.random.rand()] == drawn
    assert [each.tolist() for each in of_script.state_dict().values()] == [
        each.tolist() for each in model.state_dict().values()
    ]
    losses = history.get_metric_values("train_loss_epoch")
    assert [line.partition("train_loss ")[2].partition(",")[0] for line in printed] == list(map(repr, losses))
    if "eval_dataset" in arguments:
        losses = history.get_metric_values("eval_loss_epoch")
        assert [line.partition("eval_loss ")[2] for line in printed] == list(map(repr, losses))
    if Path("average.pt").exists():
        average = torch.load(tmp_path / "ours" / "average.pt")["model_state_dict"]
        assert {name: each.tolist() for name, each in torch.load("average.pt").items()} == {
            name: each.tolist() for name, each in average.items()
        }


NUM_EPOCHS: Any = TrainerPlaceholderValues.NUM_EPOCHS
ROWS = (torch.randn(8, 4), torch.randn(8, 1))


def trainer_of(**arguments: Any) -> Trainer:
    model = nn.Linear(4, 1)
    given = {"callbacks": (), **arguments}
    return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), **given)


def replaced() -> Trainer:
    trainer = trainer_of()
    trainer.calculate_train_batch_loss = lambda batch: {}  # type: ignore[method-assign]
    return trainer


def weighing() -> Trainer:
    trainer = trainer_of()
    trainer.loss_func = partial(nn.functional.cross_entropy, weight=torch.ones(3))
    return trainer


class Loud(Trainer):
    """A trainer of the user's own."""


class Rows(Dataset[Any]):
    """Rows that are dicts."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.zeros(4)}


@pytest.mark.parametrize(
    ("trainer", "data", "arguments", "reason"),
    [
        (lambda: trainer_of(callbacks=[TrainerCallback()]), ROWS, {}, "TrainerCallback may change the run"),
        (lambda: trainer_of(mixed_precision="bf16"), ROWS, {}, "mixed precision"),
        (trainer_of, DataLoader(TensorDataset(*ROWS)), {}, "the data is a DataLoader"),
        (trainer_of, Rows(), {}, "a row is a dict"),
        (trainer_of, ROWS, {"max_duration": 3}, "`max_duration` is given"),
        (trainer_of, ROWS, {"collate_fn": list}, "`collate_fn` is given"),
        (trainer_of, ROWS, {"train_dataloader_kwargs": {"sampler": range(8)}}, "'sampler'"),
        (
            trainer_of,
            ROWS,
            {"create_scheduler_fn": partial(ExponentialLR, gamma=NUM_EPOCHS)},
            "the schedule needs",
        ),
        (
            trainer_of,
            ROWS,
            {"create_scheduler_fn": lambda optimizer: CosineLrScheduler(optimizer, 3, 1)},
            "the schedule needs this library",
        ),
        (replaced, ROWS, {}, "calculate_train_batch_loss was replaced"),
        (trainer_of, Mixture([TensorDataset(*ROWS)], [1.0]), {}, "an order or batches of its own"),
        (weighing, ROWS, {}, "a function that weighs"),
        (lambda: trainer_of(callbacks=[EarlyStoppingCallback()]), ROWS, {}, "EarlyStoppingCallback watches"),
    ],
)
def test_what_a_script_cannot_do_is_refused_before_anything_is_written(
    trainer: Callable[[], Trainer], data: Any, arguments: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        trainer().eject(tmp_path / "plain.py", data, num_epochs=1, **arguments)
    assert not list(tmp_path.iterdir())


def test_a_subclass_and_a_trainer_that_has_trained_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    own = Loud(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=())
    with pytest.raises(ConfigurationError, match="Loud may override any part"):
        own.eject(tmp_path / "plain.py", ROWS, num_epochs=1)
    trained = trainer_of()
    trained.train(ROWS, 1)
    with pytest.raises(ConfigurationError, match="has trained before"):
        trained.eject(tmp_path / "plain.py", ROWS, num_epochs=1)


SCRIPT = """
import torch
from torch import nn

from pytorch_accelerated import Trainer

def make_run():
    model = nn.Linear(4, 1)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), seed=3)
    return trainer, {"train_dataset": (torch.ones(8, 4), torch.ones(8, 1)), "num_epochs": 2}
"""


def test_the_command_writes_a_file_and_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("making_a_run.py").write_text(SCRIPT, encoding="utf-8")
    assert main(["eject", "--run", "making_a_run.py:make_run", "plain.py"]) == 0
    assert capsys.readouterr().out.startswith("Wrote plain.py: ")
    assert callable(module_of(Path("plain.py")).train)
    assert main(["eject", "--run", "making_a_run.py:make_run", "plain.py"]) == 2
    assert "plain.py exists" in capsys.readouterr().err
