"""Batches reach the device in order, each once, ahead of their use where that is possible."""

from typing import Any

import pytest
import torch

from pytorch_accelerated import Trainer
from pytorch_accelerated.data.prefetch import _tensors_in, device_feed
from pytorch_accelerated.data.sampling import epoch_order
from pytorch_accelerated.processes.accelerators import send_to_device
from tests.support.reference import regression_data, sgd, tiny_model


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
def test_batches_come_to_the_gpu_whole_and_in_order_while_it_is_busy(pinned: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    host = [(torch.full((1 << 18,), float(number)), {"y": torch.tensor([number])}) for number in range(20)]
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
