"""Clipping by norm is that of torch, to the bit."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pytorch_accelerated.ranks.numerics import clip_norm

SHAPES = ((128, 64), (128,), (10, 128), (10,), ())


def parameters(dtypes: tuple[torch.dtype, ...], scale: float, *, seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index, shape in enumerate(SHAPES):
        dtype = dtypes[index % len(dtypes)]
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
        made.append(parameter)
    return [*made, nn.Parameter(torch.zeros(3))]  # the last one has no gradient


def clipped(
    clip: Callable[..., torch.Tensor], dtypes: tuple[torch.dtype, ...], scale: float, seed: int
) -> list[torch.Tensor]:
    """The norm and the gradients."""
    those = parameters(dtypes, scale, seed=seed)
    return [clip(those, 1.0), *(parameter.grad for parameter in those if parameter.grad is not None)]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float64,), (torch.bfloat16,), (torch.float32, torch.half)])
def test_the_norm_and_the_gradients_are_those_of_torch(dtypes: tuple[torch.dtype, ...], scale: float) -> None:
    for seed in range(5):
        ours = clipped(clip_norm, dtypes, scale, seed)
        theirs = clipped(torch.nn.utils.clip_grad_norm_, dtypes, scale, seed)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            assert one.view(torch.uint8).equal(other.view(torch.uint8)) if one.ndim else one.equal(other) or one.isnan()


def test_without_gradients_there_is_nothing_to_clip() -> None:
    assert clip_norm([nn.Parameter(torch.zeros(2))], 1.0) == 0
