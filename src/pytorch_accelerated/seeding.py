"""Seeds derived from several parts, and snapshots of the random generators that user code draws from."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


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


@contextlib.contextmanager
def host_generators_seeded(seed: int) -> Iterator[None]:
    """Seed the host generators within the block, and restore their states afterwards."""
    torch_state = torch.default_generator.get_state()
    numpy_state = np.random.get_state()
    random_state = random.getstate()
    seed_host_generators(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(random_state)


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
