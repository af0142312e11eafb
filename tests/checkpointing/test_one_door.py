"""Whatever a trainer saves passes one door, once: there somebody could listen to all saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import (
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    WSDCheckpointCallback,
)
from pytorch_accelerated.huggingface import Trainer as Face
from pytorch_accelerated.huggingface import TrainingArguments
from pytorch_accelerated.loop.states import Saves
from pytorch_accelerated.schedulers import WSDLrScheduler


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was saved, each noted while nothing of it is on the disk."""
    names: list[str] = []
    saving = Saves.saving

    def noting(self: Saves, path: Any, **kwargs: Any) -> Any:
        if not self.is_saving:
            assert not Path(path).exists()
            names.append(Path(path).name)
        return saving(self, path, **kwargs)

    monkeypatch.setattr(Saves, "saving", noting)
    return names


def trained(*callbacks: Any, **kwargs: Any) -> Trainer:
    model = nn.Linear(2, 1)
    rows = torch.randn(8, 2), torch.randn(8, 1)
    trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=callbacks)
    trainer.train(rows, 1, rows, per_device_batch_size=4, **kwargs)
    return trainer


def face(folder: Path, **arguments: Any) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.inner(x).square().mean()}

    rows = [{"x": torch.ones(2)} for _ in range(4)]
    args = TrainingArguments(str(folder), num_train_epochs=1, report_to="none", use_cpu=True, **arguments)
    return Face(Model(), args, train_dataset=rows)


WAYS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "training states": (lambda to: trained(SaveTrainingStateCallback(to, 1)), ["epoch_1", "final"]),
    "the best model": (lambda to: trained(SaveBestModelCallback(to / "best.pt")), ["best.pt"]),
    "states of a schedule": (
        lambda to: trained(
            WSDCheckpointCallback(to), create_scheduler_fn=WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.5)
        ),
        ["checkpoint_1_wsd_pre_decay", "checkpoint_2_wsd_post_decay.pt"],
    ),
    "in the background": (lambda to: trained(SaveTrainingStateCallback(to, 1, background=True)), ["epoch_1", "final"]),
    "an average": (lambda to: trained(ModelEmaCallback(save_path=to / "average.pt")), ["average.pt"]),
    "save_training_state": (lambda to: trained().save_training_state(to / "state"), ["state"]),
    "save_checkpoint": (lambda to: trained().save_checkpoint(to / "file.pt"), ["file.pt"]),
    "export": (lambda to: trained().export(to / "model.safetensors", torch.ones(2, 2)), ["model.safetensors"]),
    "checkpoints": (lambda to: face(to, save_steps=1).train(), ["checkpoint-1"]),
    "checkpoints without states": (lambda to: face(to, save_steps=1, save_only_model=True).train(), ["checkpoint-1"]),
    "save_model": (lambda to: face(to, save_strategy="no").save_model(str(to / "model")), ["model"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_save_begins_at_one_place_and_only_once(way: str, begun: list[str], tmp_path: Path) -> None:
    save, names = WAYS[way]
    save(tmp_path)
    assert begun == names
