"""Logs for TensorBoard, MLflow and Weights & Biases: the callbacks of `report_to`."""

from __future__ import annotations

import numbers
import os
import socket
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_accelerated.callbacks.trackers import OpenRecords, Outcome, Place, Row, make_trackers, new_run_name
from pytorch_accelerated.callbacks.warning import stacklevel_of_user
from pytorch_accelerated.huggingface.arguments.argument import TRACKERS
from pytorch_accelerated.huggingface.events import ExportableState, TrainerCallback
from pytorch_accelerated.optional import require
from pytorch_accelerated.progress.text import folded, show

# The first prefix that fits chooses the section of a value.
_SECTIONS = {"eval_": "eval/", "test_": "test/", "": "train/"}


class TensorBoardCallback(TrainerCallback, ExportableState):
    """Writes the logs for TensorBoard, on the first process of all.

    The folder is ``logging_dir`` of the arguments, or one in ``runs`` below ``output_dir``, named ``run_name`` if that
    is given. A trainer writes all logs to one folder, and a resumed run goes on in that of its checkpoint. The file is
    closed when a training ends or fails, and after each log outside of a training.

    Args:
        tb_writer: a `SummaryWriter` of your own, which stays open at the end of a run.

    Attributes:
        run_name: the name of the folder below ``runs``, once it is known; None with ``logging_dir``.

    Raises:
        MissingDependencyError: if TensorBoard is not installed.
    """

    ranks_agree_after_each_update = False

    def __init__(self, tb_writer: Any = None) -> None:
        require("tensorboard", needed_by="TensorBoardCallback")
        self.tb_writer = tb_writer
        self._is_own_writer = tb_writer is None
        self.run_name: str | None = None
        self._is_in_run = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> Any:
        """Write the arguments, and the model's configuration if it has one."""
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})
        if state.global_step and self.tb_writer is None:
            self.run_name = saved.get("run_name", self.run_name)
        # A resumed run hides what was logged after its checkpoint.
        if not self._is_ready(args, state, purge_step=state.global_step + 1 if state.global_step else None):
            return
        self._is_in_run = True
        self.tb_writer.add_text("args", args.to_json_string())
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            self.tb_writer.add_text("model_config", config.to_json_string())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        """Write the numbers among the logs, at the current step."""
        if not logs or not self._is_ready(args, state):
            return
        for name, value in logs.items():
            if isinstance(value, numbers.Real):
                self.tb_writer.add_scalar(tag_of(name), value, state.global_step)
        self.tb_writer.flush()
        if not self._is_in_run:
            self.close()  # an open writer is a thread

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Close the file. A later log opens another one in the same folder."""
        self.close()

    def state(self) -> dict[str, Any]:
        """What finds the folder again."""
        return {"args": {}, "attributes": {"run_name": self.run_name}}

    def close(self) -> None:
        """Close the file, at the end of a run or after an exception."""
        self._is_in_run = False
        if self.tb_writer is not None and self._is_own_writer:
            self.tb_writer.close()
            self.tb_writer = None

    def _is_ready(self, args: Any, state: Any, purge_step: int | None = None) -> bool:
        if not state.is_world_process_zero:
            return False
        if self.tb_writer is None:
            tensorboard = require("torch.utils.tensorboard", needed_by="TensorBoardCallback")
            self.tb_writer = tensorboard.SummaryWriter(log_dir=self._folder(args), purge_step=purge_step)
        return True

    def _folder(self, args: Any) -> str:
        if args.logging_dir is not None:
            return str(args.logging_dir)
        usual = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
        self.run_name = self.run_name or args.run_name or usual
        return os.path.join(args.output_dir, "runs", self.run_name)


def tag_of(name: str) -> str:
    """The name of a logged value in TensorBoard.

    >>> [tag_of(name) for name in ("loss", "eval_loss", "test_accuracy")]
    ['train/loss', 'eval/loss', 'test/accuracy']
    """
    prefix = next(prefix for prefix in _SECTIONS if name.startswith(prefix))
    return _SECTIONS[prefix] + name.removeprefix(prefix)


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
                show(folded(f"Logged to {location}"))


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
            integrations = require("transformers.integrations", needed_by=f"report_to={name!r}")
            callbacks += integrations.get_reporting_integration_callbacks([name])
    return callbacks
