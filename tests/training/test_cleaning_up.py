"""Whatever goes wrong while a run is cleaned up, the rest of it is cleaned up all the same."""

import gc
import multiprocessing
import weakref
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.ranks.preparation import PreparedModel
from pytorch_accelerated.states.run_folder import FolderLock
from pytorch_accelerated.states.state_folder import BackgroundWriter
from tests.support.processes import run_forked
from tests.support.reference import regression_data, tiny_trainer

WORKERS = {"num_workers": 2}


class Failing(TrainerCallback):
    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("kind", "step"), [(BackgroundWriter, "close"), (FolderLock, "release"), (PreparedModel, "release")]
)
def test_an_interruption_of_one_step_keeps_no_other_from_being_done(
    kind: type[Any], step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    genuine = getattr(kind, step)

    def interrupted(*args: Any) -> None:
        genuine(*args)
        raise KeyboardInterrupt

    def make_trainer(*callbacks: Any) -> Trainer:
        saver = SaveTrainingStateCallback(tmp_path / "states", background=True)
        return tiny_trainer(saver, *callbacks, seed=3)

    trainer = make_trainer(Failing)
    monkeypatch.setattr(kind, step, interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train(regression_data(24), 2, per_device_batch_size=2, train_dataloader_kwargs=WORKERS)
    monkeypatch.undo()
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert multiprocessing.active_children() == []
    make_trainer().train(regression_data(24), 1)  # in the same folder
    trainer.callback_handler.clear_callbacks()
    trainer.train(regression_data(24), 1)
    assert trainer.run_state.epochs == 1


TRAIN_IN_A_THREAD = """
import threading, time
import torch
from torch import nn
from torch.utils.data import Dataset
from pytorch_accelerated import Trainer

class Slow(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(2), torch.ones(1)

class Noticing(Trainer):
    def calculate_train_batch_loss(self, batch):
        has_begun.set()
        return super().calculate_train_batch_loss(batch)

has_begun = threading.Event()
model = nn.Linear(2, 1)
trainer = Noticing(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
training = threading.Thread(target=trainer.train, args=(Slow(), 1), daemon=True, kwargs={
    "per_device_batch_size": 2, "train_dataloader_kwargs": {"num_workers": 2},
})
training.start()
assert has_begun.wait(600)
print("the program ends")
"""


@pytest.mark.processes
def test_a_program_that_ends_in_the_middle_of_a_run_is_not_kept_waiting_by_its_loader_processes():
    assert run_forked(TRAIN_IN_A_THREAD).stdout == "the program ends\n"


@pytest.mark.parametrize("arguments", [{}, {"nonfinite_policy": "skip"}])
def test_the_last_batch_is_not_kept_after_a_run(arguments: dict[str, Any]) -> None:
    kept: list[weakref.ref[Any]] = []

    class Remember(TrainerCallback):
        def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
            kept[:] = [weakref.ref(kwargs["batch"][0])]

    trainer = tiny_trainer(Remember())
    trainer.train(regression_data(12), 1, per_device_batch_size=4, **arguments)
    gc.collect()
    assert kept[0]() is None
