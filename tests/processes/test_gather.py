"""What ranks tell each other arrives whole and in order, whatever it is, or is an error on all of them."""

from collections import namedtuple

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ArgumentTypeError

Output = namedtuple("Output", ["scores", "labels"])


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(nn.Linear(1, 1), None, None, callbacks=())  # type: ignore[arg-type]


def test_one_process_gathers_what_it_has(trainer: Trainer) -> None:
    data = {"a": (torch.ones(2, 3), [torch.tensor(5)]), "b": Output(torch.ones(1), torch.zeros(0, 2))}
    found = trainer.gather(data)
    assert torch.equal(found["a"][0], torch.ones(2, 3))
    assert torch.equal(found["a"][1][0], torch.tensor([5]))
    assert type(found["b"]) is Output
    assert found["b"].labels.shape == (0, 2)
    assert not trainer.gather(torch.ones(2, requires_grad=True)).requires_grad
    assert torch.equal(trainer.gather(torch.ones(2), padding_value=7), torch.ones(2))


@pytest.mark.parametrize("value", [3.0, "text", None, [torch.ones(1), 2]], ids=str)
def test_a_value_that_is_not_a_tensor_is_rejected(trainer: Trainer, value: object) -> None:
    with pytest.raises(ArgumentTypeError, match="is among the data.*Convert it to a tensor"):
        trainer.gather(value)


def test_rows_of_nothing_but_padding_are_left_out_on_one_process_too(trainer: Trainer) -> None:
    assert trainer.gather(torch.full((7,), -1.0), padding_value=-1).shape == (0,)
    assert trainer.gather(torch.tensor(-1), padding_value=-1).shape == (0,)
    assert trainer.gather(torch.tensor([-1, 4]), padding_value=-1).tolist() == [4]
    assert trainer.gather(torch.full((2, 2, 2), -1.0), padding_value=-1).shape == (0, 2, 2)
    assert trainer.gather(torch.ones(2, 0), padding_value=-1).shape == (2, 0)  # nothing in it could be padding
    nan = float("nan")
    assert trainer.gather(torch.tensor([[nan, nan], [nan, 1.0]]), padding_value=nan)[:, 1].tolist() == [1]
    assert trainer.gather(torch.full((2, 3), -1.0)).shape == (2, 3)  # without a padding value they are rows as any
    boxes = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    found = trainer.gather({"pair": Output(boxes, [torch.tensor([-1, 2, 3])])}, padding_value=-1)
    assert found["pair"].scores.tolist() == [[1.0, -1.0]]
    assert found["pair"].labels[0].tolist() == [2, 3]
