"""Seeds derived from any number of parts, and snapshots of the random generators that user code draws from."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
_64_BITS = 0xFFFFFFFFFFFFFFFF
_KEYS_OF_NUMPY = 624
_numpy_random: Any = np.random  # numpy's type hints lack two of its functions


def mixed_seed(*parts: object) -> int:
    """A 32-bit seed that depends on every part.

    Sums like ``seed + epoch`` would give epoch 1 of seed 0 and epoch 0 of seed 1 the same order, and torch's CPU
    generator keeps only the low 32 bits of a seed.
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


def seeds_of_batches(*parts: object) -> Callable[[int], int]:
    """A function that returns a 32-bit seed for the number of a batch, which depends on every part too.

    Unlike a hash of all that for each batch, its time does not show next to a small step.
    """
    start = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")
    return functools.partial(split_mix, start)


def split_mix(start: int, number: int) -> int:
    """The low 32 bits of the number at position `number` that SplitMix64 gives when it is started with `start`.

    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014 (doi:10.1145/2660193.2660195).
    """
    bits = (start + number * 0x9E3779B97F4A7C15) & _64_BITS
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _64_BITS
    return (bits ^ bits >> 31) & 0xFFFFFFFF


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


def with_seed(seed: int, function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)``, called with the host generators seeded with `seed`; their states are restored."""
    result: T = aside(_seeded, seed, function, *arguments)
    return result


def _seeded(seed: int, function: Callable[..., T], *arguments: Any) -> T:
    seed_host_generators(seed)
    return function(*arguments)


def aside(function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)``, which may seed and draw from the host generators: their states are restored.

    Numpy gets another bit generator for the call, because copying the state of its own takes a hundred times longer.
    What it keeps outside of the bit generator, the second one of a pair of normally distributed numbers, is lost with
    the change; `without_second_numbers` makes that the same wherever batches are fetched.
    """
    of_torch, of_python = torch.default_generator.get_state(), random.getstate()
    of_numpy = _numpy_random.get_bit_generator()
    twister = _spare_twisters.pop() if _spare_twisters else np.random.MT19937()
    _numpy_random.set_bit_generator(twister)
    try:
        return function(*arguments)
    finally:
        _spare_twisters.append(twister)
        _numpy_random.set_bit_generator(of_numpy)
        random.setstate(of_python)
        torch.default_generator.set_state(of_torch)


_spare_twisters: list[np.random.MT19937] = []


def without_second_numbers(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches. With each, numpy forgets what `with_seed` makes it forget."""
    for batch in batches:
        _numpy_random.set_bit_generator(_numpy_random.get_bit_generator())
        yield batch


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


def check_generator_states(states: dict[str, Any]) -> None:
    """Raise any error if `states` are not from `generator_states`, because numpy reads memory wherever they say.

    torch and random check their states when an unused generator loads them.
    """
    torch.Generator().set_state(states["torch"])
    version, internal, gauss_next = states["random"]
    random.Random().setstate((version, tuple(internal), gauss_next))
    algorithm, keys, position, *_ = states["numpy"]
    if algorithm != "MT19937" or keys.shape != (_KEYS_OF_NUMPY,) or not 0 <= position <= _KEYS_OF_NUMPY:
        raise ValueError("the state of numpy's generator is of another kind, or has an invalid position")


def restore_generator_states(states: dict[str, Any]) -> None:
    """The inverse of `generator_states`. Skips CUDA generators if the number of devices differs."""
    torch.default_generator.set_state(states["torch"])
    algorithm, keys, position, has_gauss, cached_gaussian = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, cached_gaussian))
    version, internal, gauss_next = states["random"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
