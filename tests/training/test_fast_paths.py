"""Each way to be fast, beside the same run without it: the same bits of weights, drawn numbers and records."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from tests.support.reference import regression_data
from tests.training.test_determinism import Augmented

ROWS, SIZE = 83, 4


class PlainRows(Dataset[Any]):
    """The rows of another dataset, one by one."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class NoisyRows(Augmented):
    """Rows with noise of all generators that augmentations use."""

    def __len__(self) -> int:
        return ROWS


class Drawing(TrainerCallback):
    """Draws from all generators in each step. Of normally distributed numbers, numpy makes two and keeps one.

    Args:
        normal: how many of them a step draws.
    """

    def __init__(self, normal: int) -> None:
        self.normal = normal
        self.drawn: list[Any] = []

    def on_train_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.drawn.append((*np.random.randn(self.normal), np.random.rand(), float(torch.rand(()))))


class StatesInTheMiddle(TrainerCallback):
    """Writes a state after every ninth update."""

    def __init__(self, folder: Path, *, background: bool) -> None:
        self.folder, self.background = folder, background

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_state.updates % 9 == 0:
            trainer.save_training_state(self.folder, background=self.background)


def run(data: Any, *callbacks: Any, normal: int = 1, resume_from: Path | None = None, **arguments: Any) -> list[Any]:
    """Everything that a run computes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=(drawing := Drawing(normal), *callbacks), seed=5)
    arguments = {"num_epochs": 3, "per_device_batch_size": SIZE, "gradient_accumulation_steps": 2, **arguments}
    torch.manual_seed(1), np.random.seed(2)
    history = trainer.train(data, **arguments, resume_from=resume_from)
    weights = [hashlib.sha256(each.detach().numpy().tobytes()).hexdigest() for each in model.parameters()]
    records = [(record.epoch, record.update, record.samples, record.train_loss) for record in history.step_records]
    return [weights, drawing.drawn[-10:], records, history.get_metric_values("train_loss_epoch")]


def hub() -> Any:
    x, y = regression_data(ROWS)
    return datasets.Dataset.from_dict({"x": x.numpy(), "y": y.numpy()}).with_format("torch")


def pairs(samples: list[Any]) -> Any:
    """Columns as a pair. A collate function of the user's own: rows are fetched one by one."""
    batch = default_collate(samples)
    return batch["x"], batch["y"]


def no_workers(workers: int) -> dict[str, Any]:
    return {"train_dataloader_kwargs": {"num_workers": workers}}


ARRAYS, NOISY = regression_data(ROWS), NoisyRows()
# By name: the data and the arguments of the fast run, and of the same one without it.
PATHS: dict[str, tuple[tuple[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]] = {
    # Batches of arrays draw nothing, so nobody puts numpy's generator aside, and it keeps the second number.
    "arrays, many batches with one index": (
        (ARRAYS, {"normal": 2}),
        (PlainRows(TensorDataset(*ARRAYS)), {"normal": 2, **no_workers(0)}),
    ),
    "small batches, several in a row": ((NOISY, {}), (NOISY, no_workers(0))),
    "several in a row; a loader of the user's own": (
        (NOISY, {}),
        (DataLoader(NOISY, SIZE, shuffle=True), {"per_device_batch_size": 1}),
    ),
    "workers": ((NOISY, no_workers(2)), (NOISY, no_workers(0))),
    "one batch per update, as most": (
        (NOISY, {"gradient_accumulation_steps": 1}),
        (NOISY, {"gradient_accumulation_steps": 1, **no_workers(0)}),
    ),
    "a limit within a row of batches": (
        (NOISY, {"num_epochs": None, "max_num_train_steps": 13}),
        (NOISY, {"num_epochs": None, "max_num_train_steps": 13, **no_workers(0)}),
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_fast_way_changes_no_bit(name: str) -> None:
    (fast, of_fast), (slow, of_slow) = PATHS[name]
    assert run(fast, **of_fast) == run(slow, **of_slow)


def test_whole_columns_of_a_table_change_no_bit() -> None:
    class OfColumns(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            pair = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            return super().calculate_train_batch_loss(pair)

    def weights(**arguments: Any) -> list[Any]:
        torch.manual_seed(3)
        model = nn.Linear(3, 2)
        trainer = OfColumns(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=(), seed=5)
        trainer.train(hub(), 2, per_device_batch_size=SIZE, **arguments)
        return [each.tolist() for each in model.parameters()]

    assert weights() == weights(collate_fn=pairs)


@pytest.mark.parametrize("workers", [None, 0])
def test_a_save_in_the_background_and_a_resume_within_a_row_of_batches_change_no_bit(
    workers: int | None, tmp_path: Path
) -> None:
    given = {} if workers is None else no_workers(workers)
    whole = run(NOISY, **given)
    for background in (True, False):
        folder = tmp_path / str(background)
        assert run(NOISY, StatesInTheMiddle(folder, background=background), **given) == whole
        # The state of update 27 stands within a row of batches; other workers than before continue it.
        assert run(NOISY, resume_from=folder, **no_workers(0)) == whole


def test_a_row_that_fails_is_met_when_its_batch_is_due() -> None:
    class Broken(NoisyRows):
        def __getitem__(self, index: int) -> Any:
            if index == 50:
                raise OSError("row 50 can't be read")
            return super().__getitem__(index)

    def updates_before(**arguments: Any) -> Iterator[int]:
        model = nn.Linear(3, 2).double()
        trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
        with pytest.raises(OSError, match="row 50 can't be read"):
            trainer.train(Broken(), 1, per_device_batch_size=SIZE, **arguments)
        yield trainer.run_state.updates

    order = {"shuffle": False}
    kwargs = {"train_dataloader_kwargs": order}
    assert [*updates_before(**kwargs)] == [*updates_before(train_dataloader_kwargs={**order, "num_workers": 0})] == [12]


def test_a_collate_function_may_fill_one_batch_again_and_again() -> None:
    class Filling:
        def __init__(self) -> None:
            self.batch = torch.zeros(SIZE, 3, dtype=torch.float64), torch.zeros(SIZE, 2, dtype=torch.float64)

        def __call__(self, samples: list[Any]) -> Any:
            for part, column in zip(self.batch, zip(*samples, strict=True), strict=True):
                torch.stack(column, out=part[: len(samples)])
            return tuple(part[: len(samples)] for part in self.batch)

    arguments: dict[str, Any] = {"gradient_accumulation_steps": 1}
    assert run(NOISY, collate_fn=Filling(), **arguments) == run(NOISY, **arguments)


def test_rows_are_fetched_ahead_only_where_nobody_said_how() -> None:
    class Counting(NoisyRows):
        fetched = 0

        def __getitem__(self, index: int) -> Any:
            self.fetched += 1
            return super().__getitem__(index)

    class Ahead(TrainerCallback):
        most = 0

        def on_train_step_start(self, trainer: Trainer, **kwargs: Any) -> None:
            done = SIZE * trainer.run_state.batches_in_epoch
            self.most = max(self.most, trainer.train_dataset.fetched - done - min(SIZE, ROWS - done))

    class WithoutFingerprint(TrainerCallback):
        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            trainer.train_dataset.fetched = 0

    for arguments, most in (({}, 7 * SIZE), (no_workers(0), 0)):
        run(Counting(), ahead := Ahead(), WithoutFingerprint(), **arguments)
        assert ahead.most == most
