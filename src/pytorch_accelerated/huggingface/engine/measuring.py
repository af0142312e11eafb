"""Measures time and memory."""

from __future__ import annotations

import time

import torch


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: int | None = None,
    num_steps: int | None = None,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """Seconds since `start_time` and rates per second, with names that begin with `split`.

    Args:
        split: for example "train".
        start_time: of `time.time`.
        num_samples: gives ``<split>_samples_per_second``.
        num_steps: gives ``<split>_steps_per_second``.
        num_tokens: gives ``<split>_tokens_per_second``.
    """
    seconds = time.time() - start_time
    metrics = {f"{split}_runtime": round(seconds, 4)}
    if seconds > 0:  # unless the clock was set back, or has not moved
        for name, count in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
            if count is not None:
                metrics[f"{split}_{name}_per_second"] = round(count / seconds, 3)
    return metrics


class MemoryMeter:
    """Measures how much memory this process takes, from now on.

    Args:
        stage: the first word of the metrics' names.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._has_gpu = torch.cuda.is_available()
        if self._has_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._bytes_before = self._bytes_now()

    def stop(self) -> dict[str, int]:
        """The change in bytes since the start: negative if memory was freed.

        Host memory is ``<stage>_mem_cpu_alloc_delta``. With CUDA there are ``_mem_gpu_alloc_delta`` too, and
        ``_mem_gpu_peaked_delta``, by which the peak exceeded the final value.
        """
        before, now = self._bytes_before, self._bytes_now()
        deltas = {f"{self._stage}_mem_{device}_alloc_delta": now[device] - before[device] for device in now}
        if self._has_gpu:
            peaked = torch.cuda.max_memory_allocated() - now["gpu"]
            deltas[f"{self._stage}_mem_gpu_peaked_delta"] = peaked
        return deltas

    def _bytes_now(self) -> dict[str, int]:
        import psutil  # comes with accelerate

        bytes_in_use = {"cpu": int(psutil.Process().memory_info().rss)}
        if self._has_gpu:
            bytes_in_use["gpu"] = torch.cuda.memory_allocated()
        return bytes_in_use
