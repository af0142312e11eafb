"""Workers that never deliver: the run says what they do, and the loader's `timeout` ends it with an error."""

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from pytorch_accelerated import Trainer
from pytorch_accelerated.data import worker_watch
from pytorch_accelerated.errors import LoaderTimeoutError
from tests.data.loaders import Numbers, adapted, trained_on
from tests.support.reference import regression_data, sgd, tiny_model

FOR_EVER = 10_000


def _hang(*_: Any) -> None:
    time.sleep(FOR_EVER)


class HangsAt(Dataset[Any]):
    """Rows of which one never comes."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.inputs, self.targets = regression_data(12)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        if index == self.row and get_worker_info() is not None:
            _hang()
        return self.inputs[index], self.targets[index]


class HangingStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.tensor(0)
        _hang()


def consume(loader: Any) -> None:
    run_loader = adapted(loader)
    try:
        for update in run_loader.updates():
            list(update.micro_batches)
    finally:
        run_loader.close()


def train(dataset: Any, **kwargs: Any) -> None:
    trainer = Trainer(model := tiny_model(), nn.MSELoss(), sgd(model), callbacks=())
    trainer.train(dataset, 1, per_device_batch_size=2, train_dataloader_kwargs=kwargs)


HANGING: dict[str, tuple[Callable[[], None], str]] = {
    "dataset": (lambda: train(HangsAt(3), num_workers=2, timeout=1), "has started"),
    "worker_init_fn": (lambda: train(HangsAt(-1), num_workers=1, timeout=1, worker_init_fn=_hang), "is in"),
    "stream": (lambda: consume(DataLoader(HangingStream(), 1, num_workers=1, timeout=1)), "has started"),
    "fork": (lambda: train(HangsAt(-1), num_workers=1, timeout=1), "has not started"),
}


@pytest.mark.parametrize("place", HANGING)
def test_a_worker_that_hangs_is_reported_and_the_timeout_of_the_loader_is_a_clear_error(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(worker_watch, "_TIMES_THE_LONGEST", 0)
    monkeypatch.setattr(worker_watch, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr(worker_watch, "_MAX_SHOWN", 1)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # how long torch asks them to end
    if place == "fork":  # nothing of ours has run in such a worker
        monkeypatch.setattr("pytorch_accelerated.data.workers.WorkerInit.__call__", _hang)
    start, stage = HANGING[place]
    with (
        pytest.warns(
            UserWarning, match=r"No batch of the Hang\w+ has arrived for .* keeps waiting.*`timeout`"
        ) as caught,
        pytest.raises(LoaderTimeoutError, match=r"within the 1 seconds of the loader's `timeout`") as raised,
    ):
        start()
    ours = next(str(warning.message) for warning in caught if warning.category is UserWarning)  # Python has its own
    for said in (ours, str(raised.value)):
        assert re.findall(r"Worker (\d) \(process \d+\) is alive, (is in|has started|has not started)", said) == [
            ("0", stage)
        ]
        assert ("; and 1 more." in said) == (place == "dataset")
        assert ("blocked by a lock" in said and "forkserver" in said) == (place == "fork")
    process = int(re.findall(r"process (\d+)", str(raised.value))[0])
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)  # it was not left behind


@pytest.mark.parametrize("is_persistent", [True, False])
def test_waits_that_end_are_not_reported(is_persistent: bool) -> None:
    loader = adapted(DataLoader(Numbers(9), 2, num_workers=2, timeout=600, persistent_workers=is_persistent))
    try:
        assert trained_on(loader) == trained_on(loader)
    finally:
        loader.close()


def test_torch_still_asks_for_data_where_the_watch_listens() -> None:
    # A private method of torch's: without it nobody would notice that nothing is watched any more.
    batches = iter(DataLoader(Numbers(3), num_workers=1))  # type: ignore[arg-type]
    assert callable(batches._try_get_data)  # type: ignore[attr-defined]
    assert "_try_get_data" in type(batches)._get_data.__code__.co_names  # type: ignore[attr-defined]
    batches._shutdown_workers()  # type: ignore[attr-defined]
