"""Seeds derived from several parts, and snapshots of the random generators that user code draws from."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pytorch_accelerated.compat.numpy import memory_of
from pytorch_accelerated.compat.python import memory_of_random

_64_BITS = 0xFFFFFFFFFFFFFFFF
_numpy_random: Any = np.random  # numpy's type hints lack two of its functions


def mixed_seed(*parts: object) -> int:
    """A 32-bit seed that depends on every part.

    Sums like ``seed + epoch`` would give epoch 1 of seed 0 and epoch 0 of seed 1 the same order, and torch's CPU
    generator keeps only the low 32 bits of a seed.
    """
    return int.from_bytes(_digest(parts)[:4], "little")


def seeds_of_batches(*parts: object) -> Callable[[int], int]:
    """A function that returns a 32-bit seed for the number of a batch, which depends on every part too.

    Unlike a hash of all that for each batch, it takes no time that shows beside a small step.
    """
    start = int.from_bytes(_digest(parts)[:8], "little")
    return lambda number: split_mix(start, number) & 0xFFFFFFFF


def split_mix(start: int, number: int) -> int:
    """The number at position `number` that the generator SplitMix64 gives when it is started with `start`: 64 bits.

    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014 (doi:10.1145/2660193.2660195).
    """
    bits = (start + number * 0x9E3779B97F4A7C15) & _64_BITS
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _64_BITS
    return bits ^ bits >> 31


def _digest(parts: tuple[object, ...]) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


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

    Args:
        seed: the seed of all three.
        seeds_numpy: whether numpy's is seeded. If not, it is another one all the same, and `has_used_numpy` tells
            whether the block should have had the seed.
    """

    __slots__ = ("_kept_numpy", "_numpy", "_python", "_seed", "_seeds_numpy", "_torch", "_unused")

    def __init__(self, seed: int, *, seeds_numpy: bool = True) -> None:
        self._seed = seed
        self._seeds_numpy = seeds_numpy

    def __enter__(self) -> host_generators_seeded:
        self._torch = torch.default_generator.get_state()
        self._python = _python_generator.state()
        self._kept_numpy, self._numpy = _numpy_generator.put_aside()
        torch.default_generator.manual_seed(self._seed)
        _python_generator.seed(self._seed)
        if self._seeds_numpy:
            np.random.seed(self._seed)
        self._unused = self._numpy.mark()
        return self

    def __exit__(self, *exception_info: object) -> None:
        torch.default_generator.set_state(self._torch)
        _python_generator.restore(self._python)
        _numpy_generator.put_back(self._kept_numpy, self._numpy)

    def has_used_numpy(self) -> bool:
        """Whether the block has drawn from numpy's generator, seeded it, or read its state."""
        return self._unused is None or self._numpy.mark() != self._unused


class KeyedCalls:
    """Calls a function under the key of each call: what it draws depends on nothing else.

    Most rows draw nothing from numpy, whose seeding alone takes as long as all the rest. If the first call did not use
    its generator, later ones are made without seeding it. One that uses it all the same is made again under its key,
    and numpy's generator is seeded from then on. So the function may be called twice for one argument, once at most.

    Args:
        function: of one argument.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._seeds_numpy: bool | None = None  # not known before the first call

    def __call__(self, key: int, argument: Any) -> Any:
        """The function's result under `key`."""
        if self._seeds_numpy is False:
            with host_generators_seeded(key, seeds_numpy=False) as block:
                try:
                    result = self._function(argument)
                except Exception:
                    if not block.has_used_numpy():
                        raise
                else:
                    if not block.has_used_numpy():
                        return result
            self._seeds_numpy = True
        with host_generators_seeded(key) as block:
            result = self._function(argument)
            if self._seeds_numpy is None:
                self._seeds_numpy = block.has_used_numpy()
        return result


class _OwnTwister(np.random.MT19937):
    """A bit generator of numpy that shows whether it has been used."""

    def __init__(self) -> None:
        super().__init__()
        self._readings = 0
        self._memory = memory_of(self)

    @property
    def state(self) -> Any:
        self._readings += 1
        return super().state

    @state.setter
    def state(self, value: Any) -> None:
        np.random.MT19937.state.__set__(self, value)  # type: ignore[attr-defined]

    def mark(self) -> tuple[bytes, int] | None:
        """A mark that is another one after each use; None if that is not known."""
        return None if self._memory is None else (_mark_of(self._memory), self._readings)


def _mark_of(memory: memoryview) -> bytes:
    """Some words and the position of a Mersenne Twister.

    Drawing changes the position; after 624 numbers all words are others, these eight too but once in 2**256 times.
    """
    return bytes(memory[-36:])


_OwnTwister.__name__ = np.random.MT19937.__name__  # numpy compares the names of classes


class _NumpyGenerator:
    """Numpy's global generator, which another one of the same kind replaces for a while. Nothing is copied.

    Numpy draws normally distributed numbers in pairs, and keeps a second one outside of the bit generator, where it
    is lost. Publicly only copying the whole state tells whether there is one, so this is done only if numbers have been
    drawn since the last block, or there was one before.
    """

    def __init__(self) -> None:
        self._spare: list[_OwnTwister] = []
        self._known: Any = None  # a bit generator
        self._memory: memoryview | None = None  # its memory
        self._seen: bytes | None = None  # its mark at the end of the last block, if no second number was kept

    def put_aside(self) -> tuple[tuple[Any, float | None], _OwnTwister]:
        """Replace the global bit generator.

        Returns:
            It and the second number of a pair, and what replaces it.
        """
        current = _numpy_random.get_bit_generator()
        if current is not self._known:
            self._known, self._memory, self._seen = current, memory_of(current), None
        second = None
        if self._memory is None or self._seen is None or _mark_of(self._memory) != self._seen:
            state: Any = np.random.get_state(legacy=False)
            second = state["gauss"] if state["has_gauss"] else None
        own = self._spare.pop() if self._spare else _OwnTwister()
        _numpy_random.set_bit_generator(own)
        return (current, second), own

    def put_back(self, kept: tuple[Any, float | None], own: _OwnTwister) -> None:
        """The inverse of `put_aside`."""
        current, second = kept
        self._spare.append(own)
        _numpy_random.set_bit_generator(current)
        self._seen = None
        if second is not None:
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": second})
        elif current is self._known and self._memory is not None:
            self._seen = _mark_of(self._memory)


class _PythonGenerator:
    """Python's global generator. Its memory is copied, if its layout is known, and else its state."""

    def __init__(self) -> None:
        self._generator: Any = random.random.__self__  # type: ignore[attr-defined]
        self._seed: Callable[[int], None] = super(random.Random, self._generator).seed  # type: ignore[misc]
        self._memory = memory_of_random()

    def seed(self, number: int) -> None:
        """What ``random.seed(number)`` does with an integer, without looking for what else it may be."""
        self._seed(number)
        self._generator.gauss_next = None

    def state(self) -> Any:
        """The state, for `restore`."""
        return random.getstate() if self._memory is None else (bytes(self._memory), self._generator.gauss_next)

    def restore(self, state: Any) -> None:
        """Return to `state`."""
        if self._memory is None:
            random.setstate(state)
        else:
            self._memory[:], self._generator.gauss_next = state


_numpy_generator = _NumpyGenerator()
_python_generator = _PythonGenerator()


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
