"""One comparison for everything that a checkpoint can hold."""

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import torch


def assert_same_state(found: Any, expected: Any, path: str = "state") -> None:
    """Fail at the first place where kinds, bits, dtypes, shapes or layouts differ."""
    assert type(found) is type(expected), path
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, path
        assert found.shape == expected.shape, path
        assert found.numel() == 0 or found.stride() == expected.stride(), path
        assert bits_of(found) == bits_of(expected), path
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert found.dtype == expected.dtype, path
        assert found.shape == expected.shape, path
        assert found.tobytes() == expected.tobytes(), path
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_same_state(found[key], expected[key], f"{path}[{key!r}]")
        if isinstance(expected, OrderedDict):
            assert_same_state(vars(found), vars(expected), f"{path}.__dict__")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for index, item in enumerate(expected):
            assert_same_state(found[index], item, f"{path}[{index}]")
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found), path
    elif isinstance(expected, int):
        assert found == expected, path
    else:
        assert repr(found) == repr(expected), path  # tells 0.0 from -0.0, as == does not


def bits_of(tensor: torch.Tensor) -> bytes:
    """The elements in their logical order, as bytes."""
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
