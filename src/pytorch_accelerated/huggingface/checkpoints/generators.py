"""The states of random generators in ``rng_state.pth``, in the format of transformers."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import torch

from pytorch_accelerated.checkpointing.portable import load_portable
from pytorch_accelerated.checkpointing.reading import kind_of
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.seeding import check_generator_states, generator_states

_KEYS = struct.Struct("<624I")  # of numpy's generator


def known_generator_states(*, is_alone: bool) -> dict[str, Any]:
    """The states of this process's generators for transformers, made of plain values and tensors.

    If the process is alone, transformers expects the state of its GPU, else of all GPUs.
    """
    states = generator_states()
    algorithm, keys, *rest = states["numpy"]
    known = {"python": random.getstate(), "numpy": (algorithm, keys.tolist(), *rest), "cpu": states["torch"]}
    if "cuda" in states:
        known["cuda"] = states["cuda"][torch.cuda.current_device()] if is_alone else states["cuda"]
    return known


def read_generator_states(path: Path) -> dict[str, Any] | None:
    """Read a file of transformers or of this library for `seeding.restore_generator_states`; None without a file."""
    if kind_of(path) is None:
        return None
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            contents = load_portable(path)
        states = contents if "torch" in contents else _native(contents)  # of an earlier version of this library
        check_generator_states(states)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}). It holds the states of random generators; "
            "delete it to resume with other random numbers."
        ) from error
    return states


class _OfNumpy:
    """Stands for an array in a file, or for its dtype, and keeps what numpy's own functions would be called with.

    Those make an array of objects at any address that a file names.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


_NAMES = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype")
_STAND_INS: list[Any] = [_OfNumpy, *((_OfNumpy, name) for name in _NAMES)]


def _keys_in(array: _OfNumpy) -> list[int]:
    _, shape, kind, _, octets = array.state
    is_known = isinstance(kind, _OfNumpy) and (kind.arguments[0], kind.state[1], shape) == ("u4", "<", (624,))
    if not is_known or len(octets) != _KEYS.size:
        raise ValueError("numpy's generator has keys of another kind")
    return list(_KEYS.unpack(octets))


def _native(known: dict[str, Any]) -> dict[str, Any]:
    algorithm, keys, *rest = known["numpy"]
    keys = _keys_in(keys) if isinstance(keys, _OfNumpy) else keys
    numpy_state = [algorithm, torch.tensor(keys, dtype=torch.int64, device="cpu"), *rest]
    states = {"torch": known["cpu"], "numpy": numpy_state, "random": known["python"]}
    if "cuda" in known and torch.cuda.is_available():
        states["cuda"] = known["cuda"]
        if isinstance(known["cuda"], torch.Tensor):
            states["cuda"] = torch.cuda.get_rng_state_all()
            states["cuda"][torch.cuda.current_device()] = known["cuda"]
    return states
