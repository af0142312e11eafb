"""What users' own methods write into a checkpoint is its model, with transformers and here; a resume stays exact."""

# mypy: disable-error-code="misc, has-type, operator"
# For each class is made twice, of another base.

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pytorch_accelerated.huggingface import Trainer, TrainerCallback
from tests.huggingface.runs import Rows, everything
from tests.huggingface.test_against_transformers import TRAINED, assert_same_history, run
from tests.support.reference import assert_same_numbers
from tests.support.resuming import assert_same
from tests.support.states import verify

transformers = pytest.importorskip("transformers")

STATE_FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin")


class Config(transformers.PretrainedConfig):  # type: ignore[name-defined]
    model_type = "line"


class Policy(transformers.PreTrainedModel):  # type: ignore[name-defined]
    """A model that can save itself; two of its weights are one."""

    config_class = Config
    _tied_weights_keys = {"tied.weight": "linear.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear, self.tied = nn.Linear(2, 1), nn.Linear(2, 1)
        self.post_init()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.linear(x) + self.tied(x)
        return (outputs,) if labels is None else ((outputs - labels).square().mean(), outputs)


class WithCritic(nn.Module):
    """A policy within another model, which has a loss of its own."""

    _keys_to_ignore_on_save = None  # transformers asks for it

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.policy, self.critic = Policy(Config()), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.policy(x)[0]
        loss = None if labels is None else (outputs - labels + self.critic(x)).square().mean()
        return (outputs,) if loss is None else (loss, outputs)


def saves_a_part(base: Any) -> Any:
    class SavesAPart(base):
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            whole = self.model
            self.model = self.model.policy
            super().save_model(output_dir, _internal_call)
            self.model = whole

    return SavesAPart


def the_whole_by_torch(base: Any) -> Any:
    class TheWholeByTorch(base):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), Path(output_dir, "pytorch_model.bin"))

    return TheWholeByTorch


def in_half_precision(base: Any) -> Any:
    class InHalfPrecision(base):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            halves = {name: value.half().clone() for name, value in self.model.state_dict().items()}
            super()._save(output_dir, state_dict=halves)

    return InHalfPrecision


def averages(base: Any) -> Any:
    class Averages(base):
        """Saves, and takes for the best model, averaged weights."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.average = copy.deepcopy(self.model)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.3)
            return super().training_step(*args, **kwargs)

        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            trained, self.model = self.model, self.average
            super().save_model(output_dir, _internal_call)
            self.model = trained

    return Averages


def nothing(base: Any) -> Any:
    class Nothing(base):
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)

    return Nothing


def first_by_itself(base: Any) -> Any:
    class FirstByItself(base):
        """Makes the folder of the checkpoint, before and while the trainer does."""

        def folder(self) -> Path:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            return folder

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            torch.save(self.model.critic.state_dict(), self.folder() / "critic.pt")
            super()._save_checkpoint(model, trial)

        def _save(self, *args: Any, **kwargs: Any) -> None:
            super()._save(*args, **kwargs)
            self.model.policy.save_pretrained(self.folder() / "policy")

    return FirstByItself


def without_the_optimizer(base: Any) -> Any:
    class WithoutTheOptimizer(base):
        def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
            Path(output_dir, "spared.txt").write_text("mine")

    return WithoutTheOptimizer


class InOnSave(TrainerCallback):
    """Writes into the checkpoint when it is there: a model over the other or beside it, or as scripts for adapters."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / "README.md").write_text("mine")
        if self.where == "deleted":
            torch.save({}, folder / "pytorch_model.bin")
            (folder / "training_args.bin").unlink()
        else:
            kwargs["model"].policy.save_pretrained(folder / self.where)


def usual(base: Any) -> Any:
    return base


CASES: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    **{
        make.__name__: (make, None)
        for make in (
            saves_a_part,
            the_whole_by_torch,
            in_half_precision,
            averages,
            nothing,
            first_by_itself,
            without_the_optimizer,
        )
    },
    "on_save, over the model": (usual, "."),
    "on_save, beside it": (usual, "policy"),
    "on_save, over a part": (saves_a_part, "."),
    "on_save, other files": (usual, "deleted"),
}


SAVES_THE_WHOLE = ("the_whole_by_torch", "in_half_precision", "averages")


def trained(library: str, case: str, folder: Path, **arguments: Any) -> Any:
    """A run of two epochs, five steps each, with three checkpoints, the best of which is loaded."""
    make, where = CASES[case]
    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    given.update(load_best_model_at_end=True, learning_rate=0.05, **arguments)
    parts = {"model": WithCritic(), "train_dataset": Rows(10)}
    callbacks = [] if where is None else [InOnSave(where)]
    kind = make(transformers.Trainer if library == "theirs" else Trainer)
    return run(library, folder, *callbacks, parts=parts, kind=kind, **given)


def own_files(folder: Path) -> dict[str, Any]:
    """What is in a checkpoint besides the states that a resume needs, by name: tensors, or text."""
    readers = {".safetensors": load_file, ".bin": torch.load, ".pt": torch.load}
    return {
        path.relative_to(folder).as_posix(): readers.get(path.suffix, Path.read_text)(path)
        for path in folder.rglob("*")
        if path.is_file() and path.name not in STATE_FILES
    }


@pytest.mark.parametrize("case", CASES)
def test_what_own_methods_write_is_the_model_of_a_checkpoint_and_a_resume_is_exact(case: str, tmp_path: Path) -> None:
    ours, theirs = (trained(library, case, tmp_path / library) for library in ("ours", "theirs"))
    assert_same_history(ours.state.log_history, theirs.state.log_history, tolerance=TRAINED)
    assert [Path(each.state.best_model_checkpoint).name for each in (ours, theirs)] == ["checkpoint-4"] * 2
    loaded = theirs if case in SAVES_THE_WHOLE else trained("ours", "on_save, other files", tmp_path / "usual")
    for name, value in loaded.model.state_dict().items():
        assert_same_numbers(ours.model.state_dict()[name], value, tolerance=TRAINED)
    for step in (4, 8, 10):
        folder = tmp_path / "ours" / f"checkpoint-{step}"
        verify(folder)
        found, expected = own_files(folder), own_files(tmp_path / "theirs" / folder.name)
        assert expected.keys() <= found.keys()
        for name in expected:
            if isinstance(expected[name], str):
                assert found[name] == expected[name], name
                continue
            assert found[name].keys() == expected[name].keys(), name
            for weight, value in expected[name].items():
                assert_same_numbers(found[name][weight], value, tolerance=TRAINED)

    shutil.copytree(tmp_path / "ours" / "checkpoint-8", tmp_path / "parts" / "checkpoint-8")
    resumed = trained("ours", case, tmp_path / "parts", resume=True)
    assert_same(everything(resumed)["optimizer"], everything(ours)["optimizer"])
    for name in ("checkpoint-10/model.safetensors", "checkpoint-10/training_weights.safetensors"):
        if (tmp_path / "ours" / name).exists():
            assert_same(load_file(tmp_path / "parts" / name), load_file(tmp_path / "ours" / name))
