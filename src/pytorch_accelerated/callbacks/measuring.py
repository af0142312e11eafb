"""Callbacks that measure: means of what models return, learning rates, and where the time of an update goes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytorch_accelerated.errors import HookOutputError
from pytorch_accelerated.facts.settings import check_positive_count
from pytorch_accelerated.loop.callback import TrainerCallback
from pytorch_accelerated.record.loss import LossTracker, widest_float

if TYPE_CHECKING:
    from pytorch_accelerated.loop.callback import Trainer


class RecordMeansCallback(TrainerCallback):
    """Records the means of numbers that the model or a hook returns, such as the parts of a loss.

    ::

        RecordMeansCallback("generator_loss", "discriminator_loss")

    A name is an entry of the model's outputs, if they are a dict, or of what `calculate_train_batch_loss` and
    `calculate_eval_batch_loss` return: a number for the batch, or a tensor, whose mean is taken. They are recorded as
    ``train_<name>`` and ``eval_<name>``, and as ``intermediate_eval_<name>`` for evaluations within an epoch: means
    over what the loss is a mean of, samples or counted items of all ranks, so that parts of a loss add up to it. They
    are read from the device every 256 batches, and a resumed epoch has the same means. An entry of training may be
    absent in evaluations. Put this callback before those that log.

    Args:
        names: of the entries, also in a list.

    Raises:
        HookOutputError: in a run, if there is no such entry.
    """

    ranks_agree_after_each_update = False
    _told_apart_by = "names"

    def __init__(self, *names: str | Iterable[str]) -> None:
        self.names = tuple(name for each in names for name in ([each] if isinstance(each, str) else each))
        self._trackers: defaultdict[str, LossTracker] = defaultdict(LossTracker)
        self._restored: dict[str, list[float]] = {}  # sums and counts over all ranks, by name
        self._ranks: Any = None
        self._has_trained = False

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin new means, unless the epoch is resumed."""
        self._ranks, self._has_trained = trainer.run_context.parts.ranks, True
        if trainer.run_state.updates_in_epoch == 0:
            self._begin("train_")

    def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin new means."""
        self._begin(trainer.run_history.metric_name_prefix + "eval_")

    def on_train_step_end(self, trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """Note the numbers of a batch."""
        self._add("train_", batch_output, trainer.run_context.parts.reports.batch_weight, self.names)

    def on_eval_step_end(self, trainer: Trainer, batch_output: dict[str, Any], **kwargs: Any) -> None:
        """Note the numbers of a batch; where the run has trained, those that are there."""
        needed = () if self._has_trained or trainer.run_context.parts.loaders.train is not None else self.names
        prefix = trainer.run_history.metric_name_prefix + "eval_"
        self._add(prefix, batch_output, trainer.run_context.parts.reports.batch_weight, needed)

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the means of the epoch."""
        self._record(trainer, "train_", "train_")

    def on_eval_epoch_end(self, trainer: Trainer, is_intermediate: bool = False, **kwargs: Any) -> None:
        """Record the means of the evaluation."""
        prefix = trainer.run_history.metric_name_prefix + "eval_"
        self._record(trainer, prefix, "intermediate_eval_" if is_intermediate else "eval_")

    def state_dict(self) -> dict[str, Any]:
        """Sums and counts of an unfinished epoch, over all ranks. Must be called by all ranks."""
        return {} if self._ranks is None else {name: list(self._total(f"train_{name}")) for name in self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the means of the epoch that is being resumed."""
        self._begin("train_")
        self._restored = {f"train_{name}": value for name, value in state.items()}

    def _begin(self, prefix: str) -> None:
        for name in self.names:
            self._trackers[prefix + name].reset()
            self._restored.pop(prefix + name, None)

    def _add(self, prefix: str, batch_output: dict[str, Any], weight: Any, needed: Iterable[str]) -> None:
        outputs = batch_output.get("model_outputs")
        found = {**(outputs if isinstance(outputs, Mapping) else {}), **batch_output}
        for name in self.names:
            if name not in found:
                if name not in needed:
                    continue
                raise HookOutputError(
                    f"RecordMeansCallback finds no {name!r} among {list(found)}. Return it, or name it."
                )
            value = found[name]
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                value = value.detach().mean(dtype=widest_float(value.device))
            self._trackers[prefix + name].update(value, batch_output["batch_size"] if weight is None else weight)
            self._trackers[prefix + name].read_if_long()

    def _total(self, key: str) -> tuple[float, float]:
        tracker = self._trackers[key].copy()  # a save adds nothing to the sums, whose last bit depends on their cuts
        total, count = self._ranks.sum([tracker.total_loss, tracker.running_count])
        earlier = self._restored.get(key, (0.0, 0.0))
        return earlier[0] + total, earlier[1] + count

    def _record(self, trainer: Trainer, key_prefix: str, prefix: str) -> None:
        self._ranks = trainer.run_context.parts.ranks
        for name in self.names:
            total, count = self._total(key_prefix + name)
            if count:
                trainer.run_context.parts.reports.record(prefix + name, total / count)


class LearningRateMonitorCallback(TrainerCallback):
    """Records the learning rate after the last update of each training epoch.

    The rate of the first parameter group is `learning_rate`; other groups have `learning_rate_1` and so on.

    >>> callbacks = [LearningRateMonitorCallback, ...]  # in front, so that the table has the rate
    """

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Record the learning rates."""
        for index, group in enumerate(trainer.optimizer.param_groups):
            trainer.run_history.update_metric(f"learning_rate_{index}" if index else "learning_rate", group["lr"])


class ProfilerCallback(TrainerCallback):
    """Profiles a few updates with `torch.profiler`, and writes the results of every rank to a folder.

    Open ``trace_rank_0.json`` at https://ui.perfetto.dev; ``table_rank_0.txt`` lists the operations that took the most
    time. Evaluations and saves between the profiled updates are included. If the run ends early, the files cover the
    updates until then.

    >>> callbacks = [..., ProfilerCallback("profile", wait=20, active=3)]

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
        self.output_dir = self._absolute(output_dir)
        self.wait, self.warmup, self.active = wait, warmup, active

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Start to count updates."""
        self.on_training_run_end(trainer)

        def write(profiler: torch.profiler.profile) -> None:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            rank = trainer.run_context.parts.ranks.index
            profiler.export_chrome_trace(str(self.output_dir / f"trace_rank_{rank}.json"))
            device = "cpu" if trainer.device.type == "cpu" else "device"
            table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=50)
            (self.output_dir / f"table_rank_{rank}.txt").write_text(table, encoding="utf-8")

        schedule = torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1)
        self._profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
        self._profiler.start()

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Count an update."""
        if self._profiler is not None:
            self._profiler.step()

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Stop profiling, also if the run ended early."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    on_exception = on_training_run_end
