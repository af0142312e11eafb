import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from pytorch_accelerated.checkpointing.layout import FileEntry
from pytorch_accelerated.checkpointing.publish import begin
from pytorch_accelerated.checkpointing.state_folder import read_state
from pytorch_accelerated.checkpointing.verify import find_state, list_states
from pytorch_accelerated.errors import CheckpointError
from tests.checkpointing.faulty_disk import FaultyDisk
from tests.checkpointing.same_state import assert_same_state
from tests.checkpointing.writing import write_state

STATE: dict[str, Any] = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "run": {"updates": 3, "best": math.inf}}


def entries_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_state_comes_back_with_its_facts(tmp_path):
    facts = {"updates": 3, "value": math.nan, "shape": (2, 3)}
    write_state(tmp_path / "state", facts, STATE)
    found_facts, found = read_state(tmp_path / "state")
    assert_same_state(found_facts, facts)
    assert_same_state(found, STATE)


def test_only_the_state_is_left_in_the_folder(tmp_path):
    write_state(tmp_path / "deep" / "er" / "state", {}, STATE)
    write_state(tmp_path / "deep" / "er" / "state", {}, STATE)
    assert entries_of(tmp_path / "deep" / "er") == {"state"}
    assert entries_of(tmp_path / "deep" / "er" / "state") == {
        "manifest.json",
        "model.json",
        "model.safetensors",
        "run.json",
        "run.safetensors",
    }


def test_only_the_parts_asked_for_are_read(tmp_path):
    write_state(tmp_path / "state", {}, STATE)
    (tmp_path / "state" / "model.safetensors").write_bytes(b"damaged")
    assert read_state(tmp_path / "state", ["run"])[1] == {"run": STATE["run"]}


def test_a_value_that_cannot_be_stored_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"callbacks\.hook is a builtins\.function"):
        write_state(tmp_path / "new" / "state", {}, {**STATE, "callbacks": {"hook": lambda: None}})
    assert entries_of(tmp_path) == set()


def test_facts_that_a_manifest_cannot_hold_leave_the_previous_state(tmp_path):
    write_state(tmp_path / "state", {"updates": 1}, STATE)
    with pytest.raises(CheckpointError, match="facts"):
        write_state(tmp_path / "state", {"a": {1, 2}}, STATE)
    assert entries_of(tmp_path) == {"state"}
    assert read_state(tmp_path / "state")[0] == {"updates": 1}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", ".a", "-a", "a b", "é", "a\0", "a" * 101, "manifest"])
def test_parts_have_plain_names(name, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be the name"):
        write_state(tmp_path / "state", {}, {name: 1})
    assert entries_of(tmp_path) == set()


@pytest.mark.parametrize("content", ["a file", "a folder of a user"])
def test_a_folder_that_is_not_a_state_is_not_replaced(content, tmp_path):
    target = tmp_path / "target"
    if content == "a file":
        target.write_text("thesis")
    else:
        target.mkdir()
        (target / "thesis.txt").write_text("thesis")
    with pytest.raises(CheckpointError, match="not a training state"):
        write_state(target, {}, STATE)
    assert (target if target.is_file() else target / "thesis.txt").read_text() == "thesis"
    assert entries_of(tmp_path) == {"target"}


def test_the_newest_state_is_the_one_that_was_saved_last(tmp_path):
    """Not the one with most updates: after going back to an older state, the new branch counts."""
    for name, updates in [("step_1", 1), ("step_3", 3), ("step_2", 2)]:
        write_state(tmp_path / name, {"updates": updates}, STATE)
    assert find_state(tmp_path) == tmp_path / "step_2"
    write_state(tmp_path / "step_1", {"updates": 1}, STATE)
    assert find_state(tmp_path) == tmp_path / "step_1"
    assert [folder.name for folder, _ in list_states(tmp_path)] == ["step_3", "step_2", "step_1"]


def test_a_file_that_the_publishing_rank_cannot_see_is_an_error(tmp_path):
    staged = begin(tmp_path / "state")
    files = staged.write_files([("rank_0.json", [b"1"])])
    with pytest.raises(CheckpointError, match=r"cannot see rank_1\.json there.*all machines share"):
        staged.commit({}, [*files, FileEntry("rank_1.json", 1, "0" * 64)])
    staged.abort()
    staged.abort()
    assert entries_of(tmp_path) == set()


def test_files_are_flushed_before_the_manifest_and_the_manifest_before_the_name(tmp_path):
    with FaultyDisk().installed() as recorded:
        write_state(tmp_path / "state", {}, {"a": 1})
    created, flushed = (
        [number for number, name in enumerate(recorded.operations) if name == kind] for kind in ("create_file", "flush")
    )
    assert len(created) == len(flushed) == 3  # the last file is the manifest
    assert flushed[1] < created[2] < flushed[2]
    assert recorded.operations[flushed[2] + 1 :] == ["flush_folder", "move", "flush_folder"]


# Every optimizer and scheduler: train, save, load into a fresh pair, and go on beside the first pair.

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
    "plateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0),
    "multi step": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5, 5]),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.2, total_steps=20),
    "step": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 10),
    "cosine with restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
    "linear": lambda optimizer: schedulers.LinearLR(optimizer),
    "polynomial": lambda optimizer: schedulers.PolynomialLR(optimizer, 10),
    "chained": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], optimizer
    ),
    "sequential": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer), schedulers.MultiStepLR(optimizer, [3, 6])], [3]
    ),
}


class Run:
    """A small training run whose every value is repeatable."""

    def __init__(self, create_optimizer: Any, create_scheduler: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 1))
        self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.batch = torch.randn(4, 2, 3, 3, generator=generator)
        self.optimizer = create_optimizer(self.model.parameters())
        self.scheduler = create_scheduler(self.optimizer)

    def train(self, updates: int) -> None:
        for _ in range(updates):
            loss = self.optimizer.step(self._closure)
            self.scheduler.step(*([loss.item()] if isinstance(self.scheduler, schedulers.ReduceLROnPlateau) else []))

    def _closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(self.batch).square().mean()
        loss.backward()
        return loss

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def assert_goes_on_as_before(create_optimizer: Any, create_scheduler: Any, folder: Path) -> None:
    first = Run(create_optimizer, create_scheduler)
    first.train(4)
    expected = copy.deepcopy(first.state())
    write_state(folder, {}, first.state())
    _, parts = read_state(folder)
    assert_same_state(parts, expected)
    second = Run(create_optimizer, create_scheduler)
    second.load(parts)
    first.train(4)
    second.train(4)
    assert_same_state(second.state(), first.state())


@pytest.mark.parametrize("create_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_restored_optimizer_continues_bit_for_bit(create_optimizer, tmp_path):
    assert_goes_on_as_before(create_optimizer, SCHEDULERS["step"], tmp_path / "state")


@pytest.mark.parametrize("create_scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_restored_scheduler_continues_bit_for_bit(create_scheduler, tmp_path):
    assert_goes_on_as_before(OPTIMIZERS["adamw"], create_scheduler, tmp_path / "state")
