"""Functions that are called every n-th time that an event is fired."""

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, on
from pytorch_accelerated.errors import ArgumentTypeError, ConfigurationError, StopTrainingError

ROWS = torch.randn(14, 2), torch.randn(14, 1)  # 7 updates an epoch


def make_trainer(*callbacks):
    model = nn.Linear(2, 1)
    return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=callbacks, seed=1)


def test_every_third_update_is_counted_over_epochs_from_the_start_of_each_run():
    seen = []

    @on("on_optimizer_step_end", every=3)
    def look(trainer, **kwargs):
        seen.append(trainer.run_state.updates)

    trainer = make_trainer(look)
    trainer.train(ROWS, 2, per_device_batch_size=2)
    assert seen == [3, 6, 9, 12]
    trainer.train(ROWS, 1, per_device_batch_size=2)
    assert seen[4:] == [3, 6]
    trainer.preflight(ROWS, num_epochs=1)  # restores the count


def test_a_resumed_run_continues_the_count(tmp_path):
    seen = []

    def part(last, **kwargs):
        @on("on_optimizer_step_end", every=3)
        def look(trainer, **kwargs):
            seen.append(trainer.run_state.updates)

        @on("on_optimizer_step_end")
        def stop(trainer, **kwargs):
            if trainer.run_state.updates == last:
                raise StopTrainingError

        trainer = make_trainer(look, stop, SaveTrainingStateCallback(tmp_path))
        trainer.train(ROWS, 2, per_device_batch_size=2, **kwargs)

    part(5)
    part(14, resume_from=tmp_path, must_resume=True)
    assert seen == [3, 6, 9, 12]


def test_a_function_gets_what_a_method_of_that_name_would_get():
    losses = []

    @on("on_train_step_end")
    def look(trainer, *, batch, batch_output, **kwargs):
        losses.append((len(batch[0]), batch_output["loss"].item()))

    history = make_trainer(look).train(ROWS, 1, per_device_batch_size=7)
    assert sum(loss for _, loss in losses) / 2 == pytest.approx(history.get_latest_metric("train_loss_epoch"))
    assert [size for size, _ in losses] == [7, 7]


def test_mistakes_are_errors():
    with pytest.raises(ConfigurationError, match="Did you mean 'on_optimizer_step_end'"):
        on("on_optimiser_step_end")
    with pytest.raises(ConfigurationError, match="begin with 'on_'"):
        on("every update")
    with pytest.raises(ConfigurationError, match="at least 1"):
        on("on_train_epoch_end", every=0)
    with pytest.raises(ArgumentTypeError, match="whole number"):
        on("on_train_epoch_end", every=0.5)  # type: ignore[arg-type]
