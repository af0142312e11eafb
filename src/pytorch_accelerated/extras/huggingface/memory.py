"""How much memory a stage of a run has added: `skip_memory_metrics=False`."""

from __future__ import annotations

from collections.abc import Callable

import torch


def meter(stage: str, *, is_nested: bool) -> Callable[[], dict[str, int]]:
    """A function for the bytes that this process has more than now, by name.

    They are ``<stage>_mem_cpu_alloc_delta``, with CUDA also ``<stage>_mem_gpu_alloc_delta`` and
    ``<stage>_mem_gpu_peaked_delta``, by which the peak exceeds the end; of a stage within another, not the peak.
    """
    import psutil  # comes with accelerate

    has_gpu = torch.cuda.is_available()
    if has_gpu and not is_nested:
        torch.cuda.reset_peak_memory_stats()

    def bytes_now() -> dict[str, int]:
        in_use = {f"{stage}_mem_cpu_alloc_delta": psutil.Process().memory_info().rss}
        return {**in_use, f"{stage}_mem_gpu_alloc_delta": torch.cuda.memory_allocated()} if has_gpu else in_use

    def added() -> dict[str, int]:
        deltas = {name: int(now - before[name]) for name, now in bytes_now().items()}
        if has_gpu and not is_nested:
            peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            deltas[f"{stage}_mem_gpu_peaked_delta"] = peak
        return deltas

    before = bytes_now()
    return added
