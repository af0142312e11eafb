"""The callback that keeps the result of a run in a file of JSON, for programs that drive runs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pytorch_accelerated.callbacks import TrainerCallback, never_ends_a_run, watched_metrics
from pytorch_accelerated.errors import CheckpointError
from pytorch_accelerated.extras.report.contents import json_value, plain_notes, spike_in_words
from pytorch_accelerated.record import warn_user
from pytorch_accelerated.record.text import format_duration
from pytorch_accelerated.states.publish import write_whole
from pytorch_accelerated.tracking import greater_is_better, role_and_quantity

if TYPE_CHECKING:
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.tracking import RunHistory

FORMAT = 1
_SECONDS_BETWEEN_WRITES = 10.0
_SHARE_OF_SLOW_DATA = 0.5
_MAX_ALERTS = 100
_RESERVED_BYTES = 2**16  # more than the file grows
_MOST_SECONDS_OF_SILENCE = 3600.0
_UPDATES_BETWEEN_WRITES = 64


@never_ends_a_run
class ResultCallback(TrainerCallback):
    """Keeps the result of a run in a JSON file, which is there from the start of the run and whole at any time.

    ::

        Trainer(..., callbacks=[*DEFAULT_CALLBACKS, ResultCallback("runs/7/result.json", notes={"lr": 0.01})])

    It has the status and the reason for it, the best value with its epoch, the last value of each metric, seconds,
    memory, the error with its notes, alerts, and where other callbacks have saved their files.
    `docs/how_to/programs.md` has the table, and a program that drives runs with it. The time in ``updated`` is the
    heartbeat: the file is written when the run starts and ends, after each epoch, and in between every 10 seconds or 64
    updates, whichever takes longer. A status other than "running" is final.

    Rank 0 writes. A resumed run continues its result. If something fails, there is one warning, and the run continues;
    space for the last status is held back from the start, and a run whose last status cannot be written ends with an
    error. Another live run that writes to the same file is named in a warning.
    Put the callback after those that record metrics and save files.

    Args:
        path: the file, which replaces an existing one. Missing folders are created.
        watch_metric: the metric whose best value is the run's; by default the first one that another callback watches,
            else the loss of evaluations, or of training without any. More of it is better if a callback that watches it
            says so, or else if words in its name do, such as accuracy.
        notes: facts of your own to keep: plain values by name.
    """

    takes_part_in_preflight = False
    ranks_agree_after_each_update = False
    _told_apart_by = "path"
    _ranks: Any = None
    _began: float | None = None
    _started = _seconds_before = _next_write = 0.0
    _skipped_updates = 0
    _reserve: IO[bytes] | None = None  # from the first write to the last
    _has_told = False

    def __init__(
        self,
        path: str | os.PathLike[str] = "result.json",
        watch_metric: str | None = None,
        *,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self.watch_metric = watch_metric
        self.notes = plain_notes(notes)
        self._alerts: list[dict[str, Any]] = []
        self._ending: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin the result, or continue the result of the run that is being resumed."""
        self._begin(trainer)
        self._write(trainer)

    def on_step_records(self, trainer: Trainer, **kwargs: Any) -> None:
        """Note skipped updates, and write the result, if it is time."""
        number = trainer.run_state.skipped_updates - self._skipped_updates
        self._skipped_updates += number
        # Without the policy, the scaler of fp16 has skipped them: it finds its scale by such updates.
        if number > 0 and trainer.run_context.asked.settings.nonfinite_policy is not None:
            text = f"{number} update{'s' if number > 1 else ''} skipped, gradients not finite"
            self._add_alert(trainer, "non-finite loss", text)
        if time.monotonic() >= self._next_write:
            self._write(trainer)

    on_eval_epoch_end = on_step_records

    def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Write the result of the epoch, and note if it waited for data for half of its time, or for a rank.

        Raises:
            UnknownMetricError: if the watched metric has no value, which is shown as a warning.
        """
        for timing in trainer.run_history.timings[-1:]:
            if timing.is_slowed_by_data(_SHARE_OF_SLOW_DATA):
                waited = f"waited for data {timing.data_wait_share:.0%} of the time"
                text = f"{waited}, {timing.data_wait_seconds:.3g} of {timing.seconds:.3g} s"
                self._add_alert(trainer, "slow data", text)
        slow_rank = trainer.run_history.slow_rank
        if slow_rank is not None:
            self._add_alert(trainer, "slow rank", slow_rank.in_words())
        self._write(trainer)
        if self.watch_metric is not None:
            trainer.run_history.get_latest_metric(self.watch_metric)

    def on_non_finite_loss(self, trainer: Trainer, metric_name: str, epoch: int, step: int, **kwargs: Any) -> None:
        """Note the loss."""
        self._add_alert(trainer, "non-finite loss", f"{metric_name}, in batch {step} of epoch {epoch}")

    def on_loss_spike(self, trainer: Trainer, **spike: Any) -> None:
        """Note the spike that a `LossSpikeCallback` has found, with its samples."""
        self._add_alert(trainer, "loss spike", spike_in_words(**spike), update=spike["last_update"])

    def on_stop_training_error(self, trainer: Trainer, reason: str = "", **kwargs: Any) -> None:
        """Note why the run stops. The result is written when it has."""
        self._ending |= {"status": "stopped", "reason": reason}

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Write the result, with the error if a loss or parameter that is not finite has ended the run."""
        failure = trainer.run_context.control.stopping.failure
        if failure is not None:
            self._fail(failure)
            noted = {(alert["kind"], alert["epoch"]) for alert in self._alerts}
            # A callback that ends the run keeps `on_non_finite_loss` from those behind it.
            if ("non-finite loss", trainer.run_history.current_epoch) not in noted:
                self._add_alert(trainer, "non-finite loss", str(failure))
        elif self._ending["status"] == "running":
            self._ending["status"] = "finished"
        says_running = self._reserve is not None
        try:
            self._write(trainer)
        except CheckpointError as error:
            if says_running:
                trainer.run_context.control.saves.failures[self._absolute(self.path)] = error
            raise

    def on_exception(self, trainer: Trainer, exception: BaseException, **kwargs: Any) -> None:
        """Write the result with the error, also of a run that has failed before its first update."""
        if trainer.run_context.control.training is not None:
            self._begin(trainer)
            self._fail(exception)
            self._write(trainer)

    def saved_places(self) -> dict[str, str]:
        """The file; for the summary of a run."""
        return {"result": str(self.path)}

    def state_dict(self) -> dict[str, Any]:
        """When the run started, its seconds and its alerts. Must be called by all ranks."""
        state = {"started": self._started, "seconds": self._seconds, "alerts": self._alerts}
        return state if self._ranks is None else self._ranks.from_first(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the result of the run that is being resumed."""
        self._loaded = state

    @property
    def _seconds(self) -> float:
        return self._seconds_before + (0.0 if self._began is None else time.monotonic() - self._began)

    def _begin(self, trainer: Trainer) -> None:
        """Begin the result of the call, unless this has been done."""
        context = trainer.run_context
        if self._began == context.control.stopping.began:
            return
        before = self._loaded if context.asked.resumed_from is not None else {}
        self._loaded, self._ranks, self._began = {}, context.parts.ranks, context.control.stopping.began
        self._started = before.get("started", time.time() - time.monotonic() + context.control.stopping.began)
        self._seconds_before, self._alerts = before.get("seconds", 0.0), before.get("alerts", [])
        self._skipped_updates = context.parts.state.skipped_updates
        self._has_told = False
        self._ending = {"status": "running", "reason": "", "error": None}

    def _fail(self, error: BaseException) -> None:
        facts = {"type": type(error).__name__, "message": str(error), "notes": getattr(error, "__notes__", [])}
        reason = f"{type(error).__name__}: {error}".strip(": ")
        self._ending = {"status": "failed", "reason": reason, "error": facts}

    def _add_alert(self, trainer: Trainer, kind: str, text: str, **at: Any) -> None:
        if trainer.run_context.control.training is not None:
            place = {"epoch": trainer.run_history.current_epoch, "update": trainer.run_history.updates_done}
            alert = {"kind": kind, "text": text, "time": time.time(), **place, **at}
            self._alerts = [*self._alerts, alert][-_MAX_ALERTS:]

    def _write(self, trainer: Trainer) -> None:
        """Write the result, on rank 0, if the call is one of `train`."""
        context, history = trainer.run_context, trainer.run_history
        if context.control.training is None or not context.parts.ranks.is_first:
            return
        self._next_write = time.monotonic() + _SECONDS_BETWEEN_WRITES
        config = {} if context.parts.config is None else context.parts.config.to_dict()
        if context.asked.given.seed is None:  # not what somebody chose, so no seed to pair runs by
            config.pop("seed", None)
        latest = [history.latest_record(name) for name in history.get_metric_names()]
        result = {
            "format": FORMAT,
            **self._ending,
            "started": self._started,
            "updated": time.time(),
            "pid": os.getpid(),
            "host": platform.node(),
            "epoch": context.parts.state.epoch_of_progress(history.current_epoch),
            "updates": history.updates_done,
            "seconds": self._seconds,
            "startup_seconds": context.control.stopping.startup_seconds,
            "peak_memory": next((record.peak_memory for record in history.step_records[-1:]), None),
            "best": self._best(history, watched_metrics(trainer.callback_handler), trainer.eval_dataset is not None),
            "metrics": {record.name: record.value for record in latest if record and record.is_scalar},
            "alerts": self._alerts,
            "files": _files_of(trainer.callback_handler),
            "config": config,
            "notes": self.notes,
        }
        path = self._absolute(self.path)
        if not self._has_told and (other := self._other_run(path)):
            self._has_told = True
            warn_user(
                context.parts.ranks, f"{path} is written by two live runs: this one, and {other}. Give each a folder."
            )
        self._publish(json.dumps(json_value(result), indent=2, allow_nan=False) + "\n", path)

    def _other_run(self, path: Path) -> str:
        """The process of another run that is writing the file; "" if none is known."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            found = json.loads(path.read_text(encoding="utf-8"))
            who = f"process {found['pid']} on {found['host']}"
            is_own = (found["pid"], found["host"]) == (os.getpid(), platform.node())
            is_here = found["host"] == platform.node() and found["status"] == "running"
            if not is_own and (self._reserve is not None or is_here and not has_ended(found)):
                return who
        return ""

    def _publish(self, text: str, path: Path) -> None:
        """Write the file, on a full disk with the space that was held back for it."""
        is_last, reserve = self._ending["status"] != "running", self._reserve
        try:
            write_whole(path, [text.encode()])
        except CheckpointError:
            if reserve is None:
                raise
            reserve.truncate(0)
            write_whole(path, [text.encode()])
        finally:
            if is_last and reserve is not None:
                reserve.close()
                self._reserve = None
        if not is_last:  # a file without a name, which goes with the process
            self._reserve = reserve or tempfile.TemporaryFile(buffering=0, dir=path.parent)  # noqa: SIM115
            self._reserve.seek(0)
            self._reserve.write(bytes(len(text) + _RESERVED_BYTES))

    def _best(self, history: RunHistory, watched: Mapping[str, bool], is_evaluated: bool) -> dict[str, Any] | None:
        """The best value with its place; None before the first one."""
        usual = "eval_loss_epoch" if is_evaluated else "train_loss_epoch"
        name = self.watch_metric or next(iter(watched), usual)
        greater = watched.get(name, bool(greater_is_better(role_and_quantity(name)[1])))
        record = history.best_record(name, greater)
        return record and {**record._asdict(), "greater_is_better": greater}


def why_lost(state: Mapping[str, Any]) -> str:
    """Why a run whose record says "running" is over, in words; "" if it is not known to be.

    Args:
        state: `pid` and `host` of its process, if they are known; `updated`, `updates` and `seconds`.
    """
    if state.get("host") == platform.node():
        return f"its process {state['pid']} has ended without a word" if has_ended(state) else ""
    silence = time.time() - state.get("updated", time.time())
    usual = _UPDATES_BETWEEN_WRITES * (state.get("seconds") or 0.0) / (state.get("updates") or 1)
    return (
        f"no sign of life for {format_duration(silence)}" if silence > max(_MOST_SECONDS_OF_SILENCE, 10 * usual) else ""
    )


def has_ended(state: Mapping[str, Any]) -> bool:
    """Whether the process `pid` of this machine has ended, or its number belongs to a later one."""
    import psutil  # which accelerate needs

    try:
        process = psutil.Process(state["pid"])
        return bool(process.status() == psutil.STATUS_ZOMBIE or process.create_time() > state["updated"])
    except psutil.NoSuchProcess:
        return True


def _files_of(callbacks: Iterable[Any]) -> dict[str, str]:
    """What callbacks have saved, each with its absolute path; two of one kind are told apart by their paths."""
    files: dict[str, str] = {}
    for callback in callbacks:
        for what, path in callback.saved_places().items() if hasattr(callback, "saved_places") else ():
            place = path if "://" in path else os.path.join(getattr(callback, "_made_in", ""), path)
            files[f"{what} {path}" if what in files else what] = place
    return files
