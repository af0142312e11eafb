"""Edges that trainers of this kind are known to be rough at, and where this one must stay smooth.

Each test is named after what must not come back. Those that belong to one part (schedulers, freezing, averages, run
history, resuming, distributed evaluation) are in the tests of that part.
"""

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, get_worker_info

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from pytorch_accelerated.utils import DataLoaderSlice, worker_init_fn
from tests.support.reference import assert_same_parameters, regression_data, tiny_trainer
from tests.support.resuming import SaveAndStop

DATA = regression_data(11)
make = functools.partial(tiny_trainer, seed=3)
PAIRS = [[start, (start + 1) % 11] for start in range(0, 11, 2)]


# How long a run is


def test_worker_init_fn_makes_numpy_and_random_follow_torchs_seed_of_the_worker():
    class Draws(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            assert get_worker_info() is not None
            return torch.tensor([np.random.rand(), random.random()], dtype=torch.float64)

    def draw() -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        loader = DataLoader(Draws(), num_workers=2, worker_init_fn=worker_init_fn, generator=generator)
        return torch.cat(list(loader))

    first = draw()
    assert torch.equal(first, draw())
    assert len(first.unique()) == first.numel(), "no two workers draw the same"


# Data


@pytest.mark.parametrize("settings", [{"shuffle": True}, {"batch_sampler": PAIRS}, {"drop_last": True}], ids=str)
def test_a_loader_that_accelerate_has_prepared_is_the_loader_that_it_was_given(settings: Any, tmp_path: Path):
    class Plain(Trainer):
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            sizes: dict[str, Any] = {} if "batch_sampler" in settings else {"batch_size": 3}
            return DataLoader(TensorDataset(*DATA), **sizes, **settings)

    class Prepared(Plain):
        def create_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
            return self._accelerator.prepare(super().create_train_dataloader(*args, **kwargs))

    plain = make(base=Plain)
    plain.train(DATA, 2)
    make(SaveAndStop(tmp_path / "state", 2), base=Prepared).train(DATA, 2)
    resumed = make(base=Prepared)
    resumed.train(DATA, 2, resume_from=tmp_path / "state")
    assert_same_parameters(resumed.model, plain.model, tolerance=0)


def test_a_slice_reports_no_more_batches_than_there_are():
    class Sliced(Trainer):
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            return DataLoaderSlice(super().create_train_dataloader(batch_size, train_dl_kwargs), 9)

    trainer = make(base=Sliced)
    trainer.train(DATA, 2, per_device_batch_size=2, gradient_accumulation_steps=4)
    assert trainer.run_state.updates == 4, "the last update of an epoch was lost"
    assert type(trainer._train_dataloader.sampler).__name__ == "RandomSampler", (
        "the loader within is not that of the run"
    )
    assert not trainer._train_dataloader.is_sharded, "its samples would not be shared out over several ranks"


# Evaluation


def test_evaluate_keeps_the_record_of_training_and_the_collate_function():
    def double(samples: Any) -> Any:
        inputs, targets = torch.utils.data.default_collate(samples)
        return 2 * inputs, targets

    trainer = make()
    record = trainer.train(DATA, 2, DATA, collate_fn=double)
    metrics = trainer.evaluate()
    expected = nn.functional.mse_loss(trainer.model(2 * DATA[0]), DATA[1]).item()
    assert metrics == dict.fromkeys(["evaluation_loss", "eval_loss_epoch"], pytest.approx(expected, rel=1e-12))
    assert len(record.get_metric_values("train_loss_epoch")) == 2
    assert record.get_latest_metric("eval_loss_epoch") == pytest.approx(expected, rel=1e-12)


# The model and accelerate


def test_a_run_leaves_no_wrapper_and_no_patched_forward_behind():
    trainer = make(mixed_precision="bf16")
    trainer.model.float()
    data = (DATA[0].float(), DATA[1].float())
    bare, accelerator, untouched = trainer.model, trainer._accelerator, set(vars(trainer.model))

    class Dtype(TrainerCallback):
        seen: Any = None

        def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
            self.seen = trainer.model(data[0]).dtype

    trainer.callback_handler.add_callback(dtype := Dtype())
    for _ in range(2):
        trainer.train(data, 1, data)
        trainer.evaluate(data)
        trainer.predict(data[0])
        assert trainer.model is bare
        assert set(vars(bare)) == untouched
        assert trainer._accelerator is accelerator
    assert accelerator._models == accelerator._optimizers == []
    # While training the output is brought back to single precision; what is computed in between is not as exact.
    assert dtype.seen == torch.float32
    assert bare(data[0]).dtype == torch.float32
