"""Removes the padding that made tensors equal in size."""

from __future__ import annotations

import math

import torch


def remove_padding(padded_tensor: torch.Tensor, pad_value: float) -> torch.Tensor:
    """The rows of `padded_tensor` that are not padding.

    A row is padding if all its entries equal `pad_value`, so choose a value that real rows never consist of. A row
    without entries is not padding.

    Args:
        padded_tensor: at least one dimension; the first one counts rows.
        pad_value: the value of padding; may be NaN.

    Returns:
        The remaining rows, in the same order.
    """
    if padded_tensor.shape[1:].numel() == 0:
        return padded_tensor
    is_padding = padded_tensor.isnan() if math.isnan(pad_value) else padded_tensor == pad_value
    if padded_tensor.ndim > 1:
        is_padding = is_padding.flatten(start_dim=1).all(dim=1)
    return padded_tensor[~is_padding]
