"""Checkpoint folders: what is in them, which stay, which is the best, and that none is ever seen half written."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pytorch_accelerated.errors import CheckpointError, InvalidCheckpointError, NonFiniteLossError
from pytorch_accelerated.huggingface import Trainer, TrainerCallback, TrainingArguments, get_last_checkpoint
from tests.huggingface.runs import Recorder, Regression, StopAt, everything, losses, make_trainer
from tests.support.dispositions import default_signals
from tests.support.resuming import assert_same
from tests.support.states import verify

USUAL_FILES = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} | {
    "trainer_state.json",
    "training_args.bin",
    "training_args.json",
}


def checkpoints(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.glob("checkpoint-*")), key=lambda name: int(name.split("-")[1]))


def test_a_checkpoint_has_the_usual_files_which_load_without_executing_anything_and_a_manifest(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=5, num_train_epochs=1)
    trainer.train()
    folder = tmp_path / "checkpoint-5"
    manifest = verify(folder)
    names = {entry.name for entry in manifest.files}
    assert names >= USUAL_FILES
    assert names | {"manifest.json"} == {path.name for path in folder.iterdir()}
    assert [name for name in names if name.startswith("optimizer")] == ["optimizer.pt"]  # it is saved once
    torch.testing.assert_close(load_file(folder / "model.safetensors"), dict(trainer.model.state_dict()))
    loaded = {
        name: torch.load(folder / name, weights_only=True)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")
    }
    assert loaded["rng_state.pth"].keys() == {"python", "numpy", "cpu"}
    torch.testing.assert_close(loaded["optimizer.pt"]["state"], trainer.optimizer.state_dict()["state"])
    assert loaded["scheduler.pt"] == trainer.lr_scheduler.state_dict()
    assert loaded["training_args.bin"] == trainer.args.to_dict()
    assert json.loads((folder / "training_args.json").read_text()) == trainer.args.to_dict()


def test_an_optimizer_with_a_function_among_its_settings_is_resumed(tmp_path: Path) -> None:
    def parts() -> dict[str, Any]:
        model = Regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.param_groups[0]["shape"] = abs
        return {"model": model, "optimizers": (optimizer, None)}

    arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    whole = make_trainer(tmp_path, parts=parts(), **arguments)
    whole.train()
    resumed = make_trainer(tmp_path, parts=parts(), **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.optimizer.param_groups[0]["shape"] is abs
    assert_same(everything(resumed)["model"], everything(whole)["model"])


def test_only_the_model_may_be_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=5, num_train_epochs=2, save_only_model=True)
    trainer.train()
    folder = tmp_path / "checkpoint-5"
    verify(folder)
    others = {"training_args.bin", "training_args.json", "trainer_state.json", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", *others}
    resumed = make_trainer(tmp_path, num_train_epochs=2)
    with pytest.warns(UserWarning, match="no optimizer.pt and no scheduler.pt: the run resumes with the weights"):
        resumed.train(resume_from_checkpoint=str(folder))
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry][-5:] == [6, 7, 8, 9, 10]


def test_save_model_writes_weights_and_arguments_that_answer_to_attributes(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, learning_rate=0.25, eval_strategy="epoch", local_rank=0)
    trainer.save_model(str(tmp_path / "mine"))
    trainer.save_model()
    for folder, weights_only in ((tmp_path / "mine", True), (tmp_path, False)):
        torch.testing.assert_close(load_file(folder / "model.safetensors"), dict(trainer.model.state_dict()))
        args = torch.load(folder / "training_args.bin", weights_only=weights_only)
        assert args == trainer.args.to_dict()
        assert (args.learning_rate, args.eval_strategy, args.train_batch_size) == (0.25, "epoch", 2)
        assert not args.push_to_hub
        assert TrainingArguments(**args) == trainer.args
    assert get_last_checkpoint(tmp_path) is None


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=5, num_train_epochs=1)
    trainer.train()
    folder = tmp_path / "checkpoint-5"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for index, (name, tensor) in enumerate(weights.items()):
        save_file({name: tensor}, folder / f"model-{index}.safetensors")
    weight_map = {name: f"model-{index}.safetensors" for index, name in enumerate(weights)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    other = make_trainer(tmp_path)
    for use in (other._load_from_checkpoint, other.train):
        with pytest.raises(InvalidCheckpointError, match=r"model\.safetensors"):  # which the manifest lists
            use(str(folder))
    (folder / "manifest.json").unlink()
    other._load_from_checkpoint(str(folder))
    torch.testing.assert_close(other.model.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)


def test_the_loss_of_an_earlier_runs_checkpoints_is_announced(tmp_path: Path) -> None:
    limited: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    make_trainer(tmp_path, save_strategy="steps", save_steps=3, max_steps=6).train()
    with pytest.warns(
        UserWarning, match=r"holds checkpoint-3, checkpoint-6 of an earlier run, and .* is 1: this run wi"
    ):
        make_trainer(tmp_path, **limited, max_steps=8).train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-8"}
    make_trainer(tmp_path, **limited, max_steps=9).train(resume_from_checkpoint=True)  # this is its own run


@pytest.mark.parametrize("loss", ["folder", "weights"])
def test_a_best_checkpoint_that_is_lost_during_the_run_is_reported_at_its_end(loss: str, tmp_path: Path) -> None:
    class Lose(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 10:
                best = Path(state.best_model_checkpoint)
                shutil.rmtree(best) if loss == "folder" else (best / "model.safetensors").unlink()

    arguments: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    whole = make_trainer(tmp_path / "whole", **arguments)
    whole.train()
    trainer = make_trainer(tmp_path / "lost", Lose(), load_best_model_at_end=True, **arguments)
    happened = "its folder is gone" if loss == "folder" else "There is no .*model.safetensors"
    with pytest.raises(InvalidCheckpointError, match=f"best model.*checkpoint-.*{happened}.*save_model.*trainer.state"):
        trainer.train()
    torch.testing.assert_close(trainer.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    trainer.save_model(str(tmp_path / "last"))
    torch.testing.assert_close(load_file(tmp_path / "last" / "model.safetensors"), dict(whole.model.state_dict()))
    assert len(losses(trainer)) == 10


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(Trainer):
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            if self.state.global_step == 4:
                raise CheckpointError("no room")

    trainer = make_trainer(tmp_path, kind=Failing, save_strategy="steps", save_steps=2, max_steps=6)
    with pytest.warns(UserWarning, match="no room.* The run continues, and the next save tries again"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-6"]
    verify(tmp_path / "checkpoint-6")


def test_a_spoilt_model_is_not_saved(tmp_path: Path) -> None:
    class Spoil(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                kwargs["model"].linear.bias.data.fill_(torch.nan)

    trainer = make_trainer(tmp_path, Spoil(), save_strategy="steps", save_steps=2, logging_strategy="no")
    with (
        pytest.warns(UserWarning, match="1 of the last 4 losses were NaN"),
        pytest.raises(NonFiniteLossError, match="linear.bias"),
    ):
        trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_would_replace_a_foreign_checkpoint_is_rejected_before_its_first_step(
    resume: bool, tmp_path: Path
) -> None:
    make_trainer(tmp_path, StopAt(2)).train()
    for step in (1, 2, 4, 10, 11):  # 2 is ours, and the run has 10 steps
        (tmp_path / f"checkpoint-{step}").mkdir(exist_ok=True)
        (tmp_path / f"checkpoint-{step}" / "optimizer.pt").touch()
    trainer = make_trainer(tmp_path, recorder := Recorder(), save_strategy="epoch")
    in_the_way = "checkpoint-4, checkpoint-10" if resume else "checkpoint-1, checkpoint-4, checkpoint-10"
    with pytest.raises(ValueError, match=rf"holds {in_the_way}, which .*another `output_dir`"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resume else None)
    assert recorder.events == ["init_end"]


def test_foreign_checkpoints_do_not_matter_to_a_run_that_does_not_reach_or_save_them(tmp_path: Path) -> None:
    for step in (4, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "optimizer.pt").touch()
    make_trainer(tmp_path, save_strategy="no").train()
    make_trainer(tmp_path, save_strategy="epoch", max_steps=3).train()
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()  # an empty folder takes a checkpoint
    for _ in range(2):  # the second time over our own
        make_trainer(tmp_path, save_strategy="steps", save_steps=4).train()
    assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in (3, 4, 8, 10, 11)]


class CtrlC(TrainerCallback):
    """Presses it within a step, or before the first one."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.step:
            signal.raise_signal(signal.SIGINT)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            signal.raise_signal(signal.SIGINT)


def test_a_run_that_is_interrupted_before_its_first_step_saves_nothing(tmp_path: Path) -> None:
    def interrupt(step: int, resume: bool = False) -> None:
        with default_signals(), pytest.raises(KeyboardInterrupt):
            make_trainer(tmp_path, CtrlC(step), save_strategy="steps").train(resume_from_checkpoint=resume)

    interrupt(step=0)
    assert list(tmp_path.iterdir()) == []
    interrupt(step=3)
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    before = (tmp_path / "checkpoint-3" / "manifest.json").read_bytes()
    interrupt(step=0, resume=True)
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    assert (tmp_path / "checkpoint-3" / "manifest.json").read_bytes() == before
    interrupt(step=4, resume=True)
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def test_a_model_that_is_loaded_from_a_checkpoint_must_fit(tmp_path: Path) -> None:
    make_trainer(tmp_path, save_strategy="epoch").train()
    model = Regression()
    model.linear = torch.nn.Linear(3, 1)
    trainer = make_trainer(tmp_path, parts={"model": model})
    with pytest.raises(CheckpointError, match="linear.weight: saved as a tensor"):
        trainer._load_from_checkpoint(str(tmp_path / "checkpoint-5"))
