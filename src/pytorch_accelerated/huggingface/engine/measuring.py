"""How long something took, and how much memory it left in use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytorch_accelerated.huggingface.trainer import Trainer


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: int | None = None,
    num_steps: int | None = None,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """Seconds since `start_time` and what was done per second, under names that begin with `split`.

    Args:
        split: for example "train".
        start_time: of `time.time`.
        num_samples: gives ``<split>_samples_per_second``.
        num_steps: gives ``<split>_steps_per_second``.
        num_tokens: gives ``<split>_tokens_per_second``.
    """
    seconds = time.time() - start_time
    metrics = {f"{split}_runtime": round(seconds, 4)}
    if seconds > 0:  # a clock that was set back, or has not moved, tells no speed
        for name, count in (("samples", num_samples), ("steps", num_steps), ("tokens", num_tokens)):
            if count is not None:
                metrics[f"{split}_{name}_per_second"] = round(count / seconds, 3)
    return metrics


class MemoryMeter:
    """Measures from now on how much memory this process takes.

    Args:
        stage: what is measured: names begin with it.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._has_gpu = torch.cuda.is_available()
        if self._has_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._bytes_before = self._bytes_now()

    def stop(self) -> dict[str, int]:
        """Bytes that are in use now and were not at the start, which is negative where memory was given back.

        Host memory as ``<stage>_mem_cpu_alloc_delta``; with CUDA also ``_mem_gpu_alloc_delta``, and what the peak
        was above the end as ``_mem_gpu_peaked_delta``.
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


class MemoryTracker:
    """What an overridden `evaluate` of older scripts calls before and after its loop, as ``_memory_tracker``.

    Args:
        trainer: whose arguments say whether memory is measured.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._meter: MemoryMeter | None = None

    def start(self) -> None:
        """Measure from now on, if the arguments say so."""
        self._meter = self._trainer._memory_meter("eval")

    def stop_and_update_metrics(self, metrics: dict[str, float] | None = None) -> None:
        """Add what was measured to `metrics`."""
        if self._meter is not None and metrics is not None:
            metrics.update(self._meter.stop())
        self._meter = None
