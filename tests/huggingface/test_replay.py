"""A step of a training is gone back to, and is the very step of the training."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.huggingface import Trainer, TrainerCallback
from tests.huggingface.runs import losses, noisy_trainer
from tests.support.resuming import assert_same


class WeightsLog(TrainerCallback):
    """The weights before each step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append({name: value.clone() for name, value in model.state_dict().items()})


def make(folder: Path, *callbacks: Any, **arguments: Any) -> Trainer:
    return noisy_trainer(
        folder,
        *callbacks,
        **{"num_train_epochs": 3, "logging_steps": 1, "save_strategy": "steps", "save_steps": 4, **arguments},
    )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_step_of_a_training_is_replayed(accumulation: int, tmp_path: Path) -> None:
    log = WeightsLog()
    trained = make(tmp_path, log, gradient_accumulation_steps=accumulation)
    trained.train()
    files = sorted(tmp_path.rglob("*"))
    logged = losses(trained)
    assert len(logged) == len(log.weights) >= 6
    for step, (weights, loss) in enumerate(zip(log.weights, logged, strict=True), start=1):
        trainer = make(tmp_path, gradient_accumulation_steps=accumulation)
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        replay = trainer.replay(tmp_path, step)
        assert_same(replay.weights, weights)
        assert replay.loss == loss == replay.recorded_loss
        assert replay.updates_before < 4
        assert len(replay.row_losses or ()) == len(replay.rows or ()) > 0
        assert trained.rows_of(step) == replay.rows
        assert step in trained.updates_of((replay.rows or [0])[0])
        if step < len(log.weights):
            assert_same(replay.weights_after, log.weights[step])
        assert_same(dict(trainer.model.state_dict()), before)
        assert trainer.optimizer is None
        assert trainer.state.global_step == 0
    assert sorted(tmp_path.rglob("*")) == files


def test_the_trainer_of_the_training_itself_may_go_back(tmp_path: Path) -> None:
    log = WeightsLog()
    trainer = make(tmp_path, log)
    trainer.train()
    after = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    history, strategy, seen = list(trainer.state.log_history), trainer.args.save_strategy, list(log.weights)
    replay = trainer.replay(str(tmp_path), 6)
    assert_same(replay.weights, log.weights[5])
    assert_same(dict(trainer.model.state_dict()), after)
    assert trainer.state.log_history == history
    assert trainer.args.save_strategy == strategy
    assert len(log.weights) == len(seen)
    with pytest.raises(ConfigurationError, match="Make it again"):
        trainer.replay(str(tmp_path), 2)
