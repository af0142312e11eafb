"""Files of pytorch-accelerated 0.1: portable checkpoints load, folders of training states are refused."""

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.schedulers import CosineLrScheduler, WSDLrScheduler
from tests.support.reference import regression_data, tiny_model

DATA = regression_data(16)
# What 0.1.61 wrote after 24 updates, without the settings that are the same by default.
COSINE: dict[str, Any] = {
    "total_iterations": 40,
    "lr_min": 1e-06,
    "warmup_iterations": 6,
    "warmup_lr_init": 1e-06,
    "k_decay": 1.0,
    "num_updates": 23,
}
WSD: dict[str, Any] = {"base_lr_values": [0.1], "total_steps": 40, "decay_phase_ratio": 0.25, "checkpoint_steps": [40]}


class Rates(TrainerCallback):
    def __init__(self, load: Path | None = None) -> None:
        self.load, self.used = load, []  # type: ignore[var-annotated]

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if self.load is not None:
            trainer.load_checkpoint(self.load)

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.used.append(trainer.optimizer.param_groups[0]["lr"])


def a_trainer(*callbacks: Any, seed: int = 0) -> Trainer:
    model = tiny_model(seed=seed)
    return Trainer(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), lr=0.1), callbacks=callbacks)


CREATE = functools.partial(CosineLrScheduler, total_num_epochs=10, num_update_steps_per_epoch=4, num_warmup_epochs=1.5)


def test_a_checkpoint_loads_with_its_scheduler_while_a_run_starts(tmp_path: Path) -> None:
    """As `save_checkpoint` of 0.1 writes it after 24 updates of a cosine schedule."""
    whole = a_trainer(rates := Rates())
    whole.train(DATA, 10, per_device_batch_size=4, create_scheduler_fn=CREATE)
    source = a_trainer()
    source.train(DATA, 6, per_device_batch_size=4, create_scheduler_fn=CREATE)
    checkpoint = {
        "model_state_dict": source.model.state_dict(),
        "optimizer_state_dict": source.optimizer.state_dict(),
        "scheduler_state_dict": COSINE,
        "loss": 0.36,
    }
    torch.save(checkpoint, tmp_path / "model.pt")
    trainer = a_trainer(loaded := Rates(tmp_path / "model.pt"), seed=1)
    trainer.train(DATA, 4, per_device_batch_size=4, create_scheduler_fn=CREATE)
    assert loaded.used == pytest.approx(rates.used[24:], rel=1e-12)
    assert trainer.scheduler.last_update == 39


def test_a_checkpoint_of_a_scheduler_without_a_counter_loads_with_a_warning(tmp_path: Path) -> None:
    create = functools.partial(WSDLrScheduler, total_steps=40, decay_phase_ratio=0.25)
    source = a_trainer()
    source.train(DATA, 6, per_device_batch_size=4, create_scheduler_fn=create)
    states = {"model_state_dict": source.model.state_dict(), "optimizer_state_dict": source.optimizer.state_dict()}
    torch.save({**states, "scheduler_state_dict": WSD}, tmp_path / "model.pt")
    trainer = a_trainer(Rates(tmp_path / "model.pt"), seed=1)
    with pytest.warns(UserWarning, match="WSDLrScheduler: The state does not include the number of finished updates"):
        trainer.train(DATA, 1, per_device_batch_size=4, create_scheduler_fn=create)
    assert trainer.scheduler.get_current_step() == 4


def test_a_state_that_makes_no_sense_changes_nothing(tmp_path: Path) -> None:
    trainer = a_trainer()
    trainer.train(DATA, 2, per_device_batch_size=4, create_scheduler_fn=CREATE)
    broken = {"model_state_dict": trainer.model.state_dict(), "scheduler_state_dict": {**COSINE, "num_updates": "x"}}
    torch.save(broken, tmp_path / "model.pt")
    before = copy.deepcopy(trainer.scheduler.state_dict())
    with pytest.raises(InvalidCheckpointError, match="cannot load its state .*Nothing was changed"):
        trainer.load_checkpoint(tmp_path / "model.pt")
    assert trainer.scheduler.state_dict() == before


def write_state(folder: Path, *names: str) -> None:
    """Files by the names of accelerate's `save_state`."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(pickle.dumps({}))


OF_ACCELERATE = ("random_states_0.pkl", "optimizer.bin", "custom_checkpoint_0.pkl", "trainer_metadata.pt")


def test_a_folder_of_accelerate_is_refused_with_what_to_do(tmp_path: Path) -> None:
    write_state(tmp_path / "states" / "epoch_2", "model.safetensors", *OF_ACCELERATE)
    trainer = a_trainer()
    with pytest.raises(InvalidCheckpointError, match="epoch_2 is a training state of accelerate.*save_checkpoint"):
        trainer.train(DATA, 2, per_device_batch_size=4, resume_from=tmp_path / "states")
    assert trainer.run_state.updates == 0


def test_our_states_beside_them_are_found(tmp_path: Path) -> None:
    write_state(tmp_path / "epoch_9", "pytorch_model.bin", *OF_ACCELERATE)
    a_trainer(SaveTrainingStateCallback(tmp_path)).train(DATA, 1, per_device_batch_size=4)
    trainer = a_trainer()
    trainer.train(DATA, 2, per_device_batch_size=4, resume_from=tmp_path)
    assert trainer.run_state.epochs == 2
    assert trainer.run_state.updates == 8
