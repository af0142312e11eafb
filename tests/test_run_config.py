"""The facts of a run: readable by name, frozen, and as plain values."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset

from pytorch_accelerated.run_config import TrainerRunConfig
from tests.support.reference import regression_data, tiny_trainer

DATA = regression_data(10)


def config_of(train: Any = DATA, *args: Any, **kwargs: Any) -> TrainerRunConfig:
    trainer = tiny_trainer(seed=7)
    trainer.train(train, *args, **kwargs)
    assert trainer.run_config is not None
    return trainer.run_config


def own_collate(samples: Any) -> Any:
    return torch.utils.data.default_collate(samples)


def test_plain_values_come_from_everything_that_a_loader_can_be_given():
    kwargs = {"sampler": SequentialSampler(range(10)), "collate_fn": own_collate, "generator": torch.Generator()}
    config = config_of(
        DATA, np.int64(2), None, np.int32(5), gradient_clip_norm=np.float32(0.5), train_dataloader_kwargs=kwargs
    )
    before = dict(config.train_dl_kwargs or {})
    plain = config.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert list(plain) == [field.name for field in dataclasses.fields(config)]
    assert plain["train_dl_kwargs"]["sampler"] == "SequentialSampler"
    assert plain["train_dl_kwargs"]["collate_fn"] == "own_collate"
    assert (plain["num_epochs"], plain["train_per_device_batch_size"], plain["gradient_clip_norm"]) == (2, 5, 0.5)
    assert plain["seed"] == 7
    assert plain["eval_dl_kwargs"] is None
    assert config.train_dl_kwargs == before, "the run config was changed"
    assert isinstance(config.train_dl_kwargs["sampler"], SequentialSampler)


def test_fields_are_read_by_name_and_cannot_be_set():
    config = config_of(DATA, 1)
    assert config["num_epochs"] == config.num_epochs == 1
    with pytest.raises(KeyError, match="epochs"):
        config["epochs"]
    with pytest.raises(KeyError, match="to_dict"):
        config["to_dict"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_epochs = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_epochs": 3}, (3, 4, 12)),
        ({"num_epochs": 3, "max_num_train_steps": 5}, (2, 4, 5)),
        ({"num_epochs": None, "max_num_train_steps": 4}, (1, 4, 4)),
        ({"num_epochs": 3, "gradient_accumulation_steps": 3}, (3, 2, 6)),
        ({"num_epochs": 1, "train_dataloader_kwargs": {"drop_last": True}}, (1, 3, 3)),
        ({"num_epochs": 1, "train_dataloader_kwargs": {"batch_size": 10}}, (1, 1, 1)),
    ],
)
def test_epochs_and_updates_are_those_that_will_be(arguments: dict[str, Any], expected: tuple[int, int, int]):
    trainer = tiny_trainer()
    trainer.train(DATA, per_device_batch_size=3, **arguments)
    config = trainer.run_config
    assert (config.num_epochs, config.num_update_steps_per_epoch, config.max_num_train_steps) == expected
    assert (trainer.run_state.epochs, trainer.run_state.updates) == (expected[0], expected[2])


def test_a_stream_without_length_has_no_updates_per_epoch():
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(*DATA, strict=True))

    config = config_of(Stream(), None, max_num_train_steps=2, per_device_batch_size=4)
    assert config.num_update_steps_per_epoch is None
    assert config.train_dataloader_len is None
    assert config.num_epochs is None
    assert config.train_per_device_batch_size == 4


def test_batch_sizes_are_those_of_loaders_that_are_given():
    train, evaluation = (DataLoader(TensorDataset(*DATA), batch_size) for batch_size in (4, 5))
    config = config_of(train, 1, evaluation)
    assert (config.train_per_device_batch_size, config.eval_per_device_batch_size) == (4, 5)


def test_after_evaluate_alone_the_fields_about_training_are_none():
    trainer = tiny_trainer()
    trainer.evaluate(DATA, per_device_batch_size=4)
    config = trainer.run_config
    known = {name for name, value in config.to_dict().items() if value is not None}
    assert {name for name in known if "train" in name or "update" in name or "gradient" in name} == set()
    assert config.num_epochs is None
    assert (config.eval_per_device_batch_size, config.eval_dataloader_len) == (4, 3)
