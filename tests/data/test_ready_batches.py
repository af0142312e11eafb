"""Iterables of batches are taken as such."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.reference import assert_same_parameters, regression_data, tiny_trainer

ROWS = TensorDataset(*regression_data(12))
BATCHES = [ROWS[start : start + 5] for start in range(0, 12, 5)]


class OfBatches(IterableDataset[Any]):
    """A stream that makes batches itself."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def web_loader() -> Any:
    """A loader that is an `IterableDataset` by its class."""
    kind = type("WebLoader", (OfBatches,), {"__module__": "webdataset.compat"})
    return kind(BATCHES)


def real_web_loader() -> Any:
    webdataset = pytest.importorskip("webdataset")
    samples = [ROWS[index] for index in range(12)]
    pipeline = webdataset.DataPipeline(lambda: iter(samples), webdataset.filters.batched(5, partial=True))
    return webdataset.WebLoader(pipeline, batch_size=None)


@pytest.mark.parametrize("make_loader", [web_loader, real_web_loader])
def test_a_loader_of_webdataset_has_batches(make_loader: Callable[[], Any]) -> None:
    trainer = tiny_trainer(seed=1)
    trainer.train(make_loader(), 2, per_device_batch_size=3)
    assert (trainer.run_state.updates, trainer.run_state.samples_in_epoch) == (6, 12)
    in_order = tiny_trainer(seed=1)
    in_order.train(DataLoader(ROWS, 5), 2)
    assert_same_parameters(trainer.model, in_order.model)
    expected = in_order.predict(ROWS)  # in batches of another size
    torch.testing.assert_close(trainer.predict(make_loader()), expected, rtol=1e-12, atol=1e-12)
