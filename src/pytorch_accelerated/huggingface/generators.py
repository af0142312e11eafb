"""The states of random generators in ``rng_state.pth``, laid out as transformers does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytorch_accelerated.checkpointing.portable import load_portable
from pytorch_accelerated.checkpointing.run_parts import check_generators
from pytorch_accelerated.errors import InvalidCheckpointError
from pytorch_accelerated.seeding import generator_states

# transformers keeps the state of numpy's generator in an array. These build it, under the names that numpy has given
# them over time, and run nothing.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_OF_ARRAYS: list[Any] = [
    *((_RECONSTRUCT, f"numpy.{module}.multiarray._reconstruct") for module in ("core", "_core")),
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
]


def known_generator_states(*, is_alone: bool) -> dict[str, Any]:
    """The states of this process's generators as transformers reads them, but of plain values and tensors.

    Args:
        is_alone: whether there is one process: then transformers expects the state of its GPU, else of all GPUs.
    """
    states = generator_states()
    algorithm, keys, *rest = states["numpy"]
    known = {"python": random.getstate(), "numpy": (algorithm, keys.tolist(), *rest), "cpu": states["torch"]}
    if "cuda" in states:
        known["cuda"] = states["cuda"][torch.cuda.current_device()] if is_alone else states["cuda"]
    return known


def read_generator_states(path: Path) -> dict[str, Any] | None:
    """What `seeding.restore_generator_states` takes, of a file of transformers' or of ours; None without one.

    Raises:
        InvalidCheckpointError: if it holds anything else.
    """
    if not path.is_file():
        return None
    try:
        with torch.serialization.safe_globals(_OF_ARRAYS):
            contents = load_portable(path)
        states = contents if "torch" in contents else _native(contents)  # the former is how we once wrote them
        check_generators(states)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidCheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}). It holds the states of random generators; "
            "delete it to go on with other random numbers."
        ) from error
    return states


def _native(known: dict[str, Any]) -> dict[str, Any]:
    algorithm, keys, *rest = known["numpy"]
    numpy_state = [algorithm, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest]
    states = {"torch": known["cpu"], "numpy": numpy_state, "random": known["python"]}
    if "cuda" in known and torch.cuda.is_available():
        states["cuda"] = known["cuda"]
        if isinstance(known["cuda"], torch.Tensor):
            states["cuda"] = torch.cuda.get_rng_state_all()
            states["cuda"][torch.cuda.current_device()] = known["cuda"]
    return states
