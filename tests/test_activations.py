"""Activation checkpointing changes memory, and nothing else."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pytorch_accelerated import Trainer
from pytorch_accelerated.errors import ConfigurationError
from pytorch_accelerated.extras.activations import checkpoint_activations

INPUTS = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
ROWS = (INPUTS, INPUTS.sum(1, keepdim=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + nn.functional.dropout(self.norm(self.linear(inputs)).relu(), 0.3, self.training)


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 1))


def trained(
    model: nn.Module, backend: str | None = None, **arguments: object
) -> tuple[dict[str, torch.Tensor], Sequence[float]]:
    as_run: Any = model if backend is None else torch.compile(model, backend=backend)
    trainer = Trainer(as_run, nn.MSELoss(), torch.optim.AdamW(model.parameters(), 0.01), callbacks=(), seed=1)
    history = trainer.train(ROWS, 3, ROWS, gradient_accumulation_steps=2, **arguments)  # type: ignore[arg-type]
    return copy.deepcopy(model.state_dict()), history.get_metric_values("eval_loss_epoch")


@pytest.mark.parametrize(("kind", "backend"), [("Block", None), (Block, None), (Block, "aot_eager")])
def test_a_run_is_the_same_to_the_bit_with_dropout_and_batch_norm(
    kind: str | type[nn.Module], backend: str | None
) -> None:
    plain, losses = trained(new_model(), backend)
    model = new_model()
    assert checkpoint_activations(model, kind) == 3
    weights, others = trained(model, backend)
    assert others == losses
    assert weights.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(weights[name], value), name


def test_the_backward_pass_keeps_less() -> None:
    def bytes_kept(model: nn.Module) -> int:
        sizes = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(INPUTS)
        return sum(sizes.values())

    plain, model = new_model(), new_model()
    checkpoint_activations(model, Block)
    assert bytes_kept(model) < 0.5 * bytes_kept(plain)


def test_copies_have_forward_passes_of_their_own_and_a_second_call_changes_nothing() -> None:
    model = new_model()
    checkpoint_activations(model, Block)
    checkpoint_activations(model, Block)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert copied.eval()(INPUTS).abs().sum() == 0
    assert model.eval()(INPUTS).abs().sum() > 0
    with torch.no_grad():
        torch.testing.assert_close(model(INPUTS), new_model().eval()(INPUTS))


def test_a_kind_that_the_model_lacks_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="It has 'BatchNorm1d', 'Block'"):
        checkpoint_activations(new_model(), "Layer")
