"""Batches reach the device in order, each once, ahead of their use where that is possible."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from pytorch_accelerated import Trainer
from pytorch_accelerated.data.building import _tensors_in, device_feed
from pytorch_accelerated.data.counting import Counter
from pytorch_accelerated.data.sampling import epoch_order
from pytorch_accelerated.data.stream_loader import StreamLoader
from pytorch_accelerated.facts.accumulation import Accumulation
from tests.data.loaders import OneOf, adapted
from tests.support.reference import regression_data, sgd, tiny_model
from tests.support.streaming import Walk


def test_another_device_gets_each_batch_when_it_is_asked_for() -> None:
    seen: list[int] = []

    def numbered() -> Any:
        for number in range(3):
            seen.append(number)
            yield {"x": [torch.full((2,), number)]}

    fed = device_feed(torch.device("meta"), send_to_device)(numbered())
    assert next(fed)["x"][0].device.type == "meta"
    assert seen == [0]
    assert len(list(fed)) == 2


def test_tensors_are_found_wherever_they_can_be_seen() -> None:
    class Graph:
        """Can be moved, but not looked into."""

        def to(self, device: torch.device) -> "Graph":
            return self

    first, second = torch.ones(1), torch.ones(2)
    assert _tensors_in({"a": [first], "name": "x", "none": None, "b": (second, 3)}) == [first, second]
    assert _tensors_in("x") == []
    assert _tensors_in([first, {"graph": Graph()}]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("size", [1 << 18, 1 << 22], ids=["small", "large"])
def test_batches_come_to_the_gpu_whole_and_in_order_while_it_is_busy(size: int, pinned: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    host = [(torch.full((size,), float(number)), {"y": torch.tensor([number])}) for number in range(20)]
    if pinned:
        host = [(x.pin_memory(), {"y": y["y"].pin_memory()}) for x, y in host]
    sums = []
    busy = torch.randn(2048, 2048, device=device)
    for x, y in device_feed(device, send_to_device)(iter(host)):
        busy = (busy @ busy).tanh()
        sums.append((x.sum() / x.numel() + y["y"] + 0 * busy[0, 0]).reshape(()))
        del x, y  # its memory may be used again as soon as the GPU is done with it
    assert torch.stack(sums).tolist() == [2.0 * number for number in range(20)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["in memory", "samples"])
def test_training_on_a_gpu_equals_training_on_the_cpu(kind: str) -> None:
    data: Any = regression_data(37)
    if kind == "samples":
        data = list(zip(*data, strict=True))
    weights = []
    for _ in range(2):
        model = tiny_model()
        trainer = Trainer(model, torch.nn.MSELoss(), sgd(model), callbacks=(), seed=3)
        trainer.train(data, 2, data, 4, gradient_accumulation_steps=3)
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
    reference = tiny_model()
    bare = sgd(reference)
    inputs, targets = regression_data(37)
    for epoch in range(2):
        for rows in epoch_order(37, seed=3, epoch=epoch).split(12):
            torch.nn.functional.mse_loss(reference(inputs[rows]), targets[rows]).backward()
            bare.step()
            bare.zero_grad()
    for first, second, expected in zip(*weights, reference.parameters(), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_saved_position_is_the_end_of_the_update_although_a_feed_reads_ahead(steps: int) -> None:
    def ahead(batches: Iterator[Any]) -> Iterator[Any]:
        waiting = list(itertools.islice(batches, 1))
        for batch in batches:
            yield waiting.pop()
            waiting.append(batch)
        yield from waiting

    one: Any = OneOf()
    loader = StreamLoader(
        DataLoader(Walk(), 2), one, seed=0, accumulation=Accumulation(steps), feed=ahead, is_sharded=False
    )
    sizes = []
    size = 0
    for micro in loader.batches():
        size += len(micro.batch[1])
        if not micro.is_last:
            continue
        sizes.append(size)
        size = 0
        (of_dataset,) = loader.state_dict()["state"].values()
        assert loader.state_dict()["is_finished"] or of_dataset["samples"] == sum(sizes)
    assert sizes == ([2, 2, 2, 2, 1] if steps == 1 else [6, 3])


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_limit_that_was_reached_is_not_exceeded_with_larger_batches(accumulation_steps: int) -> None:
    """The used samples end within a batch, which is not used again: the pass is over."""
    loader = adapted(DataLoader(Walk(), 4), steps=accumulation_steps)
    counter = Counter(lambda batch, samples: len(batch[1]), are_tokens=True)
    batches = loader.limited(3).batches(start=6, batches_done=3, count_items=counter)
    assert list(batches) == []
