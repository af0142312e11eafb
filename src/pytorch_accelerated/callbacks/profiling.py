"""Profiling of a few updates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.callbacks.base import TrainerCallback
from pytorch_accelerated.facts.settings import check_positive_count

if TYPE_CHECKING:
    from pytorch_accelerated.callbacks.base import Trainer


class ProfilerCallback(TrainerCallback):
    """Profiles a few updates with `torch.profiler`, and writes the results of every rank to a folder.

    Open ``trace_rank_0.json`` at https://ui.perfetto.dev; ``table_rank_0.txt`` lists the operations that took the most
    time. Evaluations and saves between the profiled updates are included. If the run ends early, the files cover the
    updates until then.

    Args:
        output_dir: the folder, created if needed; files from an earlier run are replaced.
        wait: the number of updates before profiling starts, so that the loaders have reached their normal speed.
        warmup: the number of updates after those that are profiled and discarded, because starting a profiler takes
            time.
        active: the number of updates after those, which are in the files.

    Raises:
        ArgumentTypeError, ConfigurationError: if a number is not a whole number of at least 1.
    """

    ranks_agree_after_each_update = False
    takes_part_in_preflight = False

    _profiler: torch.profiler.profile | None = None

    def __init__(
        self, output_dir: str | os.PathLike[str] = "profile", *, wait: int = 5, warmup: int = 2, active: int = 5
    ) -> None:
        for name, value in {"wait": wait, "warmup": warmup, "active": active}.items():
            check_positive_count(name, value)
        self.output_dir = Path(output_dir)
        self.wait, self.warmup, self.active = wait, warmup, active

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Start to count updates."""
        self.on_training_run_end(trainer)

        def write(profiler: torch.profiler.profile) -> None:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            rank = trainer.run_context.ranks.index
            profiler.export_chrome_trace(str(self.output_dir / f"trace_rank_{rank}.json"))
            device = "cpu" if trainer.device.type == "cpu" else "device"
            table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=50)
            (self.output_dir / f"table_rank_{rank}.txt").write_text(table, encoding="utf-8")

        schedule = torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1)
        self._profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
        self._updates_left = self.wait + self.warmup + self.active
        self._profiler.start()

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Count an update."""
        if self._profiler is not None:
            self._profiler.step()
            self._updates_left -= 1
            if self._updates_left == 0:
                self.on_training_run_end(trainer)

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Stop profiling, also if the run ended early."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    on_exception = on_training_run_end
