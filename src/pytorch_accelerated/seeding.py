"""Seeds derived from several parts, and snapshots of the random generators that user code draws from."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from pytorch_accelerated.compat.numpy import words_of

_numpy_random: Any = np.random  # numpy's type hints lack two of its functions


def mixed_seed(*parts: object) -> int:
    """A 32-bit seed that depends on every part.

    Sums like ``seed + epoch`` would give epoch 1 of seed 0 and epoch 0 of seed 1 the same order, and torch's CPU
    generator keeps only the low 32 bits of a seed.
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


def set_seed(seed: int) -> None:
    """Seed torch (all devices), numpy and random.

    Call it before a dataset is split, on every rank: an unseeded `random_split` differs from rank to rank.
    """
    torch.manual_seed(seed)
    seed_host_generators(seed)


def seed_host_generators(seed: int) -> None:
    """Seed the generators that fetching and augmenting data draws from: torch's on the CPU, numpy's and random's."""
    # Not torch.manual_seed: it visits every device module, which costs a hundred times more.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def worker_init_fn(worker_id: int) -> None:
    """Seed numpy and random in a `DataLoader` worker from torch's seed for this worker. For your own loaders.

    Loaders that a trainer builds do not need it: every batch has its own seed.
    """
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


class host_generators_seeded:  # noqa: N801  # called like a function
    """Seed the host generators with `seed` within a ``with`` block, and restore their states afterwards.

    For many blocks in a row, `python` keeps the state of Python's generator from one to the next.
    """

    __slots__ = ("_numpy", "_python", "_python_state", "_seed", "_torch")

    def __init__(self, seed: int, python: PythonGenerator | None = None) -> None:
        self._seed = seed
        self._python = python or PythonGenerator()

    def __enter__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._numpy = _numpy_generator.put_aside()
        self._python_state = self._python.read()
        seed_host_generators(self._seed)

    def __exit__(self, *exception_info: object) -> None:
        torch.default_generator.set_state(self._torch)
        _numpy_generator.put_back(self._numpy)
        random.setstate(self._python_state)


class _NumpyGenerator:
    """Numpy's global generator, which another one of the same kind replaces for a while. Nothing is copied.

    Numpy draws normally distributed numbers in pairs, and keeps a second one outside of the bit generator, where it
    is lost. Publicly only copying the whole state tells whether there is one, so this is done only if numbers have been
    drawn since the last block, or there was one before.
    """

    def __init__(self) -> None:
        self._spare: list[Any] = []
        self._known: Any = None  # a bit generator
        self._words: Any = None  # its memory
        self._seen: tuple[int, int] | None = None  # two of its words at the end of the last block

    def put_aside(self) -> tuple[Any, float | None]:
        """Replace the global bit generator.

        Returns:
            It, and the second number of a pair.
        """
        current = _numpy_random.get_bit_generator()
        if current is not self._known:
            self._known, self._words, self._seen = current, words_of(current), None
        words, second = self._words, None
        if words is None or self._seen != (words[0], words[-1]):
            state: Any = np.random.get_state(legacy=False)
            second = state["gauss"] if state["has_gauss"] else None
        _numpy_random.set_bit_generator(self._spare.pop() if self._spare else np.random.MT19937())
        return current, second

    def put_back(self, kept: tuple[Any, float | None]) -> None:
        """The inverse of `put_aside`."""
        current, second = kept
        self._spare.append(_numpy_random.get_bit_generator())
        _numpy_random.set_bit_generator(current)
        self._seen = None
        if second is not None:
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": second})
        elif current is self._known and self._words is not None:
            self._seen = self._words[0], self._words[-1]


class PythonGenerator:
    """Python's global generator. Reading its state takes longer than seeding, so the last one is kept.

    Whether it is still the state shows in the next number, which is drawn in vain: the caller sets or seeds the
    generator afterwards. Once in 2**32 times a changed state would pass for the last one.
    """

    def __init__(self) -> None:
        self._generator: Any = random.random.__self__  # type: ignore[attr-defined]
        self._state: Any = None
        self._next: int | None = None  # the number that is drawn next in `_state`

    def read(self) -> Any:
        """The state, as from ``random.getstate()``. The caller must set or seed the generator before its next use."""
        if self._state is None:
            self._state = random.getstate()
            self._next = random.getrandbits(32)
            return self._state
        drawn = random.getrandbits(32)
        if drawn != self._next or self._generator.gauss_next != self._state[2]:
            version, internal, gauss_next = random.getstate()
            # The position is the last item. A state at position 0 is that at the end of the block of numbers before.
            self._state = (version, (*internal[:-1], internal[-1] - 1), gauss_next)
            self._next = drawn
        return self._state


_numpy_generator = _NumpyGenerator()


def derived_seed(runs: int) -> int:
    """A seed that follows from the state of torch's CPU generator and the number of `runs` so far.

    Nothing is drawn: ``torch.manual_seed`` before a run makes it repeatable, and the run changes no other sequence.
    """
    state = torch.default_generator.get_state().numpy().tobytes()
    return mixed_seed(hashlib.sha256(state).hexdigest(), runs)


def generator_states() -> dict[str, Any]:
    """The state of every generator of this process, as plain values and tensors: torch (all devices), numpy, random."""
    algorithm, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "numpy": [algorithm, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached_gaussian],
        "random": [version, list(internal), gauss_next],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_generator_states(states: dict[str, Any]) -> None:
    """The inverse of `generator_states`. Skips CUDA generators if the number of devices differs."""
    torch.default_generator.set_state(states["torch"])
    algorithm, keys, position, has_gauss, cached_gaussian = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, cached_gaussian))
    version, internal, gauss_next = states["random"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
