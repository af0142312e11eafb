"""Runs that end after a number of samples or tokens."""

import functools
from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import IterableDataset

from pytorch_accelerated import Trainer, TrainerPlaceholderValues
from pytorch_accelerated.errors import ConfigurationError
from tests.support.mixing import check_every_resume, counting
from tests.support.resuming import SaveAndStop
from tests.support.rows import Batches, LoggingData, train, trainer_of

PRODUCT: Any = TrainerPlaceholderValues.NUM_EPOCHS * TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH
SCHEDULE = functools.partial(OneCycleLR, max_lr=0.05, total_steps=PRODUCT)


def samples(number: int, *callbacks: Any, **arguments: Any) -> Trainer:
    return train(*callbacks, num_epochs=None, max_samples=number, **arguments)


@pytest.mark.parametrize(
    ("number", "arguments", "updates", "used"),
    [
        (1, {}, 1, 4),
        (23, {}, 6, 23),  # the last update of an epoch has 3
        (24, {}, 7, 27),
        (40, {}, 11, 43),
        (60, {"gradient_accumulation_steps": 3}, 6, 69),
        (40, {"train_dataloader_kwargs": {"drop_last": True}}, 10, 40),
        (46, {"train_dataloader_kwargs": {"batch_sampler": Batches()}}, 18, 46),  # epochs of 6 and 12 batches
    ],
)
def test_a_run_ends_with_the_update_that_reaches_the_samples(
    number: int, arguments: dict[str, Any], updates: int, used: int
) -> None:
    trainer = samples(number, create_scheduler_fn=SCHEDULE, **arguments)
    assert (trainer.run_state.updates, trainer.run_state.samples) == (updates, used)
    assert trainer.run_config.max_num_train_steps == updates
    assert trainer.scheduler.last_epoch == trainer.scheduler.total_steps == updates
    with pytest.raises(ConfigurationError, match=f"no update {updates + 1}"):
        trainer.rows_of(updates + 1)


def test_samples_and_updates_are_the_same_limit_and_resume_alike(tmp_path: Path) -> None:
    whole = samples(40)
    assert whole.run_state == train(num_epochs=None, max_num_train_steps=11).run_state
    check_every_resume(functools.partial(samples, 40), tmp_path, whole)
    longer = samples(50, resume_from=tmp_path / "10")
    assert longer.run_state == samples(50).run_state


def test_a_run_that_resumes_with_other_batches_ends_after_as_many_samples(tmp_path: Path) -> None:
    samples(40, SaveAndStop(tmp_path / "state", 2))
    resumed = samples(40, resume_from=tmp_path / "state", per_device_batch_size=5)
    assert (resumed.run_state.updates, resumed.run_state.samples) == (2 + 3 + 4, 43)
    assert len(resumed.rows_of(9)) == 5
    with pytest.raises(ConfigurationError, match="no update 10"):
        resumed.rows_of(10)


def test_tokens_end_a_run_at_the_first_update_that_reaches_them(tmp_path: Path) -> None:
    whole = counting()
    state = whole.run_state
    assert state.epochs == 2
    assert 50 <= state.items < 56
    check_every_resume(counting, tmp_path, whole)
    assert whole.run_config.num_epochs is whole.run_config.max_num_train_steps is None
    with pytest.raises(ConfigurationError, match="The end of the run is unknown"):
        whole.updates_of(3)


def test_a_stream_ends_after_samples_too() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([LoggingData()[index] for index in range(23)])

    trainer = trainer_of()
    trainer.train(Stream(), None, per_device_batch_size=4, max_samples=30)
    assert (trainer.run_state.samples, trainer.run_state.updates) == (31, 8)
    with pytest.raises(ConfigurationError, match="whose length is unknown"):
        trainer.train(Stream(), None, max_samples=30, create_scheduler_fn=SCHEDULE)


def test_what_has_no_meaning_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="only one of max_num_train_steps, max_samples, max_tokens"):
        samples(40, max_tokens=3)
    with pytest.raises(ConfigurationError, match="`max_samples` is 0"):
        samples(0)
    with pytest.raises(ConfigurationError, match="nothing counts the tokens .* Override `count_batch_items`"):
        train(max_tokens=40)
    with pytest.raises(ConfigurationError, match="NUM_EPOCHS has no value .* Pass max_num_train_steps"):
        counting(create_scheduler_fn=SCHEDULE)
    train(SaveAndStop(tmp_path / "uncounted", 2), per_device_batch_size=2)
    with pytest.raises(
        ConfigurationError, match="`max_tokens` counts from the beginning .* Give `max_num_train_steps`"
    ):
        counting(resume_from=tmp_path / "uncounted")
