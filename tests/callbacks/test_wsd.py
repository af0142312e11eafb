"""Checkpoints around the decays of a warmup-stable-decay schedule, and runs that go on from them."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks.saving import SaveBestModelCallback, SaveTrainingStateCallback, WSDCheckpointCallback
from pytorch_accelerated.callbacks.weights import ModelEmaCallback
from pytorch_accelerated.errors import CheckpointError, ConfigurationError
from pytorch_accelerated.schedulers import WSDLrScheduler
from pytorch_accelerated.utils import read_run_history
from tests.callbacks.runs import Die, DieAfter, Record, a_trainer, assert_same_weights, fit, values_of, weights_of
from tests.support.recording import Rates


def schedule(total_steps: int, **kwargs: Any) -> functools.partial[WSDLrScheduler]:
    arguments = {"num_warmup_steps": 2, "decay_phase_ratio": 0.2, "lr_min": 0.1, **kwargs}
    return functools.partial(WSDLrScheduler, total_steps=total_steps, **arguments)


def names_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def test_there_is_a_state_before_and_a_file_after_each_decay() -> None:
    record = Record()
    trainer = a_trainer(record, WSDCheckpointCallback())
    fit(trainer, num_epochs=4, create_scheduler_fn=schedule(20, num_checkpoints=2))
    assert trainer.scheduler.get_checkpoint_steps() == [10, 20]
    assert names_in("checkpoints") == {
        "checkpoint_8_wsd_pre_decay",
        "checkpoint_10_wsd_post_decay.pt",
        "checkpoint_18_wsd_pre_decay",
        "checkpoint_20_wsd_post_decay.pt",
    }
    for step in (8, 18):
        assert read_run_history(f"checkpoints/checkpoint_{step}_wsd_pre_decay").updates_done == step
    for step in (10, 20):
        saved = torch.load(f"checkpoints/checkpoint_{step}_wsd_post_decay.pt")
        assert_same_weights(saved["model_state_dict"], record.weights[step])
        assert (saved["step"], saved["epoch"]) == (step, step // 5)
        assert {"optimizer_state_dict", "scheduler_state_dict"} < saved.keys()


def callbacks(folder: str, **kwargs: Any) -> list[Any]:
    return [
        SaveBestModelCallback(f"{folder}/best.pt"),
        WSDCheckpointCallback(folder, **kwargs),
        ModelEmaCallback(decay=0.5, save_path=f"{folder}/ema.pt"),
    ]


@pytest.mark.parametrize("arguments", [{}, {"is_continuation_from_checkpoint": True}], ids=["plain", "continuation"])
def test_a_short_run_resumed_before_its_decay_equals_a_long_run(arguments: dict[str, Any]) -> None:
    long = a_trainer(*callbacks("long"))
    expected = values_of(fit(long, num_epochs=4, create_scheduler_fn=schedule(20)))
    fit(a_trainer(*callbacks("short")), num_epochs=2, create_scheduler_fn=schedule(10))

    # Only the callbacks with the same paths take over the state of the short run.
    continued = a_trainer(*callbacks("short"))
    place = "short/checkpoint_8_wsd_pre_decay"
    found = values_of(fit(continued, num_epochs=4, create_scheduler_fn=schedule(20, **arguments), resume_from=place))
    assert found["eval_loss_epoch"] == expected["eval_loss_epoch"]
    assert found["ema_model_eval_loss_epoch"] == expected["ema_model_eval_loss_epoch"]
    assert_same_weights(weights_of(continued.model), weights_of(long.model))
    assert "checkpoint_20_wsd_post_decay.pt" in names_in("short")
    assert "checkpoint_16_wsd_pre_decay" in names_in("short")


class RatesAndMomentum(Rates):
    """Also whether there was momentum before the first update."""

    had_momentum = False

    def on_optimizer_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.had_momentum |= not self.used and bool(trainer.optimizer.state)
        super().on_optimizer_step_start(trainer, **kwargs)


@pytest.mark.parametrize("place", ["short/checkpoint_8_wsd_pre_decay", "short/checkpoint_10_wsd_post_decay.pt"])
@pytest.mark.parametrize("num_epochs", [1, 4])
def test_a_continuation_is_a_new_run_with_the_weights_and_its_length_is_that_of_the_new_part(
    place: str, num_epochs: int
) -> None:
    record = Record()
    fit(a_trainer(record, WSDCheckpointCallback("short")), num_epochs=2, create_scheduler_fn=schedule(10))

    rates, begins = RatesAndMomentum(), Record()
    continued = a_trainer(WSDCheckpointCallback("long", initial_checkpoint=place), rates, begins)
    factory = WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.2, is_continuation_from_checkpoint=True)
    history = fit(continued, num_epochs=num_epochs, create_scheduler_fn=factory)
    assert len(history.get_metric_values("eval_loss_epoch")) == num_epochs
    assert continued.run_state.updates == len(rates.used) == 5 * num_epochs
    peak = schedule(10)(a_trainer().optimizer).base_lr_values[0]
    num_decaying = num_epochs
    assert rates.used[: 5 * num_epochs - num_decaying] == [peak] * (4 * num_epochs)
    assert rates.used[4 * num_epochs :] == sorted(rates.used[4 * num_epochs :], reverse=True)
    assert rates.had_momentum
    assert_same_weights(begins.weights[0], record.weights[8 if "pre" in place else 10])


def test_a_run_that_is_resumed_does_not_go_back_to_the_initial_checkpoint() -> None:
    def continued(*others: Any) -> Trainer:
        initial = WSDCheckpointCallback("short", initial_checkpoint="short/checkpoint_8_wsd_pre_decay")
        return a_trainer(initial, SaveTrainingStateCallback(save_every_n_steps=13), *others)

    fit(a_trainer(WSDCheckpointCallback("short")), num_epochs=2, create_scheduler_fn=schedule(10))
    whole = continued()
    part = schedule(20, is_continuation_from_checkpoint=True)
    fit(whole, num_epochs=4, create_scheduler_fn=part)
    with pytest.raises(Die):
        fit(continued(DieAfter(14)), num_epochs=4, create_scheduler_fn=part)
    record = Record()
    resumed = continued(record)
    fit(resumed, num_epochs=4, create_scheduler_fn=part, resume_from="training_states/step_13")
    assert len(record.weights) == 1 + 20 - 13
    assert_same_weights(weights_of(resumed.model), weights_of(whole.model))


def test_another_scheduler_is_refused_before_the_run() -> None:
    for factory in (None, functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)):
        trainer = a_trainer(WSDCheckpointCallback())
        with pytest.raises(ConfigurationError, match="WSDLrScheduler"):
            fit(trainer, create_scheduler_fn=factory)
        assert trainer.run_state.updates == 0


def test_an_initial_checkpoint_that_is_not_there_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        fit(a_trainer(WSDCheckpointCallback(initial_checkpoint="nowhere")), create_scheduler_fn=schedule(15))
