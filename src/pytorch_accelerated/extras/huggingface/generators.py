"""The states of random generators in a file of `transformers`, which has arrays of numpy that are never trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class _PlainType:
    """Stands for a dtype of numpy in a file of others: plain numbers only."""

    def __init__(self, code: str, *_: Any) -> None:
        self.dtype = np.dtype(str(code))
        if self.dtype.kind not in "biuf":
            raise ValueError(f"an array of {self.dtype}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _PlainArray:
    """Stands for an array of numpy in a file of others.

    Numpy's own functions trust what they are given: an array of objects made of raw bytes has forged pointers.
    """

    def __init__(self, *_: Any) -> None:
        self.values = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, _, data = state
        self.values = np.frombuffer(data, kind.dtype).reshape(shape)


#: What stands for classes and functions of numpy. Older versions of it had another name for the module.
ARRAYS: list[Any] = [(_PlainArray, "numpy.ndarray"), (_PlainType, "numpy.dtype")]
ARRAYS += [(_PlainArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]


def native(known: dict[str, Any]) -> dict[str, Any]:
    """The states in a file, as `restore_generator_states` takes them."""
    algorithm, keys, *rest = known["numpy"]
    values = keys.values if isinstance(keys, _PlainArray) else keys
    numpy_state = [algorithm, torch.from_numpy(np.array(values, dtype=np.int64)), *rest]
    states = {"torch": known["cpu"], "numpy": numpy_state, "random": known["python"]}
    if "cuda" in known and torch.cuda.is_available():
        states["cuda"] = known["cuda"]
        if isinstance(known["cuda"], torch.Tensor):
            states["cuda"] = torch.cuda.get_rng_state_all()
            states["cuda"][torch.cuda.current_device()] = known["cuda"]
    return states
