"""Logs for MLflow and Weights & Biases, and the callbacks of `report_to`."""

from __future__ import annotations

import numbers
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_accelerated.callbacks.warning import stacklevel_of_user
from pytorch_accelerated.huggingface.arguments.rules import TRACKERS
from pytorch_accelerated.huggingface.events.callbacks import TrainerCallback
from pytorch_accelerated.huggingface.events.reporting import TensorBoardCallback, tag_of
from pytorch_accelerated.huggingface.events.state import ExportableState
from pytorch_accelerated.optional import require
from pytorch_accelerated.tracking.open_records import OpenRecords
from pytorch_accelerated.tracking.trackers import Outcome, Place, Row, make_trackers, new_run_name


class ReportingCallback(TrainerCallback, ExportableState):
    """Logs to trackers, on the first process of all: the arguments, and the numbers among the logs.

    Values have the names that TensorBoard gets, such as ``train/loss``. A trainer logs to one run of each tracker, also
    after a resume. A run is closed when a training ends or fails, and after each log outside of a training. A tracker
    that fails is named in one warning, and not used any more until the next training or evaluation.

    Args:
        trackers: "mlflow" or "wandb", or both.

    Raises:
        MissingDependencyError: if the package of a tracker is not installed.
    """

    ranks_agree_after_each_update = False

    def __init__(self, trackers: Sequence[str]) -> None:
        self._trackers = make_trackers(trackers)
        self._records: OpenRecords | None = None
        self._is_in_run = False
        self.run_name: str | None = None
        self.identities: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Log the arguments; continue the runs of the checkpoint if the training was resumed."""
        if state.is_world_process_zero:
            saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})
            is_resumed = state.global_step > 0
            if is_resumed and saved:
                self.run_name, self.identities = saved["run_name"], saved["identities"]
            self._open(args, state, repeats_from=state.global_step + 1 if is_resumed else None)
            self._is_in_run = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        """Log the numbers, at the current step."""
        if not logs or not state.is_world_process_zero:
            return
        records = self._records or self._open(args, state, repeats_from=None)
        values = {tag_of(name): float(value) for name, value in logs.items() if isinstance(value, numbers.Real)}
        records.add([Row(state.global_step, values)])
        records.write()
        if not self._is_in_run:
            self._finish("finished")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Close the runs. A later log opens them again."""
        self._finish("finished")

    def close(self) -> None:
        """Close the runs after an exception."""
        self._finish("failed")

    def state(self) -> dict[str, Any]:
        """What finds the runs again."""
        return {
            "args": {"trackers": [tracker.name for tracker in self._trackers]},
            "attributes": {"run_name": self.run_name, "identities": self.identities},
        }

    def _open(self, args: Any, state: Any, *, repeats_from: int | None) -> OpenRecords:
        folder = Path(args.logging_dir or os.path.join(args.output_dir, "runs"))
        self.run_name = self.run_name or args.run_name or new_run_name()
        records = OpenRecords(_warn, lambda: state.global_step)
        for tracker in self._trackers:
            place = Place(folder, args.project, self.run_name, {})
            identity = self.identities.get(tracker.name)
            records.start(tracker, place, identity, repeats_from, args.to_sanitized_dict(), [])
        self.identities = {**self.identities, **records.identities}
        self._records = records
        return records

    def _finish(self, outcome: Outcome) -> None:
        self._is_in_run = False
        if self._records is not None:
            records, self._records = self._records, None
            for location in records.finish(outcome):
                print(f"Logged to {location}", flush=True)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=stacklevel_of_user())


def reporting_callbacks(report_to: Sequence[str]) -> list[Any]:
    """The callbacks, or their classes, for ``report_to`` of the arguments.

    Raises:
        MissingDependencyError: if the package of a tracker is not installed, or `transformers` for one that only it has
            a callback for.
    """
    callbacks: list[Any] = [TensorBoardCallback] if "tensorboard" in report_to else []
    ours = [name for name in report_to if name in TRACKERS and name != "tensorboard"]
    callbacks += [ReportingCallback(ours)] if ours else []
    for name in report_to:
        if name not in TRACKERS:
            integrations = require("transformers.integrations", extra="transformers", needed_by=f"report_to={name!r}")
            callbacks += integrations.get_reporting_integration_callbacks([name])
    return callbacks
