"""The callbacks of the Hugging Face trainer that log to TensorBoard, MLflow and Weights & Biases."""

from __future__ import annotations

import numbers
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytorch_accelerated.facts import require
from pytorch_accelerated.huggingface import ExportableState, TrainerCallback
from pytorch_accelerated.huggingface.trainer_utils import output_dir_of, placed, warn
from pytorch_accelerated.record.text import folded, show

if TYPE_CHECKING:
    from pytorch_accelerated.extras.trackers import OpenRecords, Outcome

# The first prefix that fits chooses the section of a value.
_SECTIONS = {"eval_": "eval/", "test_": "test/", "": "train/"}


class Recorder(TrainerCallback, ExportableState):
    """Base of callbacks that log to records, on the first process of all.

    These are open while a training runs, and for each log outside of one.
    """

    run_name: str | None = None
    _is_in_run = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Open the records: for a resumed training, its checkpoint's, which hide what is logged again."""
        if state.is_world_process_zero:
            is_resumed = state.global_step > 0
            if is_resumed:
                saved = state.stateful_callbacks.get(type(self).__name__)
                if isinstance(saved, dict):  # else of several callbacks of the class, which begin new records
                    vars(self).update(saved.get("attributes", {}))
            self._open(args, state, repeats_from=state.global_step + 1 if is_resumed else None)
            self._is_in_run = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        """Log the numbers, at the current step."""
        if logs and state.is_world_process_zero:
            self._open(args, state)
            values = {tag_of(name): float(value) for name, value in logs.items() if isinstance(value, numbers.Real)}
            self._write(state.global_step, values)
            if not self._is_in_run:
                self._finish("finished")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Close the records. A later log opens them again."""
        self._finish("finished")

    def close(self) -> None:
        """Close the records after an exception."""
        self._finish("failed")

    def _open(self, args: Any, state: Any, repeats_from: int | None = None) -> None:
        """Open the records, unless they are open."""

    def _write(self, step: int, values: dict[str, float]) -> None:
        """Log the values of a step."""

    def _finish(self, outcome: Outcome) -> None:
        self._is_in_run = False


class TensorBoardCallback(Recorder):
    """Writes the logs for TensorBoard, on the first process of all.

    The folder is ``logging_dir`` of the arguments, or one in ``runs`` below ``output_dir``, named ``run_name`` if that
    is given. A trainer writes all logs to one folder, and a resumed run continues the folder of its checkpoint. The
    file is closed when a training ends or fails, and after each log outside of a training.

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

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> Any:
        """Write the arguments, and the model's configuration if it has one."""
        super().on_train_begin(args, state, control)
        if self._is_in_run:
            self.tb_writer.add_text("args", args.to_json_string())
            config: Any = getattr(model, "config", None)
            if hasattr(config, "to_json_string"):
                self.tb_writer.add_text("model_config", config.to_json_string())

    def state(self) -> dict[str, Any]:
        """What finds the folder again."""
        return {"args": {}, "attributes": {"run_name": self.run_name}}

    def _open(self, args: Any, state: Any, repeats_from: int | None = None) -> None:
        if self.tb_writer is None:
            tensorboard = require("torch.utils.tensorboard", needed_by="TensorBoardCallback")
            self.tb_writer = tensorboard.SummaryWriter(log_dir=self._folder(args), purge_step=repeats_from)

    def _write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.tb_writer.add_scalar(name, value, step)
        self.tb_writer.flush()

    def _finish(self, outcome: Outcome) -> None:
        super()._finish(outcome)
        if self.tb_writer is not None and self._is_own_writer:
            self.tb_writer.close()  # an open writer is a thread
            self.tb_writer = None

    def _folder(self, args: Any) -> str:
        if args.logging_dir is not None:
            return str(placed(args, args.logging_dir))
        usual = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
        self.run_name = self.run_name or args.run_name or usual
        return str(output_dir_of(args) / "runs" / self.run_name)


def tag_of(name: str) -> str:
    """The name of a logged value in TensorBoard.

    >>> [tag_of(name) for name in ("loss", "eval_loss", "test_accuracy")]
    ['train/loss', 'eval/loss', 'test/accuracy']
    """
    prefix = next(prefix for prefix in _SECTIONS if name.startswith(prefix))
    return _SECTIONS[prefix] + name.removeprefix(prefix)


class ReportingCallback(Recorder):
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
        self._library: Any = require("pytorch_accelerated.extras.trackers", needed_by="`report_to`")
        self._trackers = self._library.make_trackers(trackers)
        self._records: OpenRecords | None = None
        self.identities: dict[str, str] = {}

    def state(self) -> dict[str, Any]:
        """What finds the runs again."""
        return {
            "args": {"trackers": [tracker.name for tracker in self._trackers]},
            "attributes": {"run_name": self.run_name, "identities": self.identities},
        }

    def _open(self, args: Any, state: Any, repeats_from: int | None = None) -> None:
        if self._records is not None:
            return
        folder = placed(args, args.logging_dir or output_dir_of(args) / "runs")
        self.run_name = self.run_name or args.run_name or self._library.new_run_name()
        self._records = records = self._library.OpenRecords(warn, lambda: state.global_step)
        for tracker in self._trackers:
            place = self._library.Place(folder, args.project, self.run_name, {})
            identity = self.identities.get(tracker.name)
            records.start(tracker, place, identity, repeats_from, args.to_sanitized_dict(), [])
        self.identities = {**self.identities, **records.identities}

    def _write(self, step: int, values: dict[str, float]) -> None:
        assert self._records is not None
        self._records.add([self._library.Row(step, values)])

    def _finish(self, outcome: Outcome) -> None:
        super()._finish(outcome)
        if self._records is not None:
            records, self._records = self._records, None
            for location in records.finish(outcome):
                show(folded(f"Logged to {location}"))
