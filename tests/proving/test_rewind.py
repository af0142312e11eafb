"""A finished run is at any of its updates again, to the bit, and afterwards as it was."""

from pathlib import Path

import pytest
import torch
from torch import nn

from pytorch_accelerated.callbacks import on
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError
from pytorch_accelerated.extras.proving import rewind
from tests.looking.worlds import everything
from tests.proving.runs import Log, copies, make, train
from tests.support.reference import regression_data
from tests.support.resuming import assert_same


def test_the_trainer_has_the_weights_of_the_update_and_can_evaluate_them(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path, log := Log(), every=4, dataset={"noise": 0.1})
    before = everything(trainer)
    inputs, targets = other = regression_data(11)
    for update in (5, 8, 9, 24):
        with rewind(trainer, tmp_path, update) as state:
            assert_same(copies(trainer.get_model().state_dict()), log.weights_after[update], f"after update {update}")
            assert state is not None
            assert trainer.run_history.step_records[-1].train_loss == log.losses[update][0]
            found = trainer.evaluate(other, per_device_batch_size=11)["evaluation_loss"]
            with torch.no_grad():
                expected = nn.functional.mse_loss(trainer.get_model().eval()(inputs), targets)
            assert found == pytest.approx(expected.item(), rel=1e-12)
    assert_same(everything(trainer), before)


def test_a_new_trainer_reaches_the_first_updates_and_callbacks_see_the_way(tmp_path: Path) -> None:
    _, arguments = train(tmp_path, log := Log(), every=4)
    seen = []
    look = on("on_optimizer_step_end")(lambda trainer: seen.append(copies(trainer.get_model().state_dict())))
    trainer, _ = make()
    with rewind(trainer, tmp_path, 3, look, **arguments) as state:
        assert state is None
        assert trainer.run_state.updates == 3
    assert_same(seen, [log.weights_after[update] for update in (1, 2, 3)])
    with rewind(trainer, tmp_path / "step_12", 14, look, **arguments) as state:
        assert state == tmp_path / "step_12"
    assert_same(seen[3:], [log.weights_after[update] for update in (13, 14)])


def test_what_cannot_be_reached_or_is_decided_is_an_error(tmp_path: Path) -> None:
    trainer, arguments = train(tmp_path)
    before = everything(trainer)
    with (
        pytest.raises(ConfigurationError, match="There is no update 25: .* the run ends after 24"),
        rewind(trainer, tmp_path, 25),
    ):
        pytest.fail("not reached")
    with (
        pytest.raises(ArgumentTypeError, match="`rewind` got `resume_from`"),
        rewind(trainer, tmp_path, 8, **arguments, resume_from=tmp_path),
    ):
        pytest.fail("not reached")
    with pytest.raises(RuntimeError, match="in the block"), rewind(trainer, tmp_path, 8):
        raise RuntimeError("in the block")
    assert_same(everything(trainer), before)
