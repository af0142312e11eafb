"""Progress bars of a run, with its logs above them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytorch_accelerated.huggingface.events.callbacks import TrainerCallback
from pytorch_accelerated.progress.display import Display, above_bars, display_factory
from pytorch_accelerated.progress.formats import format_number
from pytorch_accelerated.progress.progress import Progress, length_of
from pytorch_accelerated.progress.table import block, screen_columns


class ProgressCallback(TrainerCallback):
    """Shows the progress of training, evaluations and predictions, and the logs, once on each machine.

    Terminals and notebooks have a bar, other outputs an occasional line.
    """

    ranks_agree_after_each_update = False

    def __init__(self) -> None:
        self._new_display: Callable[[], Display] | None = None
        self._training: Progress | None = None
        self._evaluation: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Start the bar of the updates."""
        self.close()
        self._new_display = None  # the output may have been redirected
        options = {"done": state.global_step, "unit": "steps", "read_facts": lambda: _facts(state)}
        self._training = self._begin(state, "training", state.max_steps, **options)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Count an update."""
        if self._training is not None:
            self._training.advance()

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> Any:
        """Count a batch, the first one of an evaluation or prediction included."""
        if self._evaluation is None:
            self._evaluation = self._begin(state, "evaluation", length_of(eval_dataloader))
        if self._evaluation is not None:
            self._evaluation.advance()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Remove the bar of the evaluation."""
        self._close_evaluation()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> Any:
        """Remove the bar of the prediction."""
        self._close_evaluation()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        """Print the logs above the bars, without the number of operations."""
        if state.is_local_process_zero and logs:
            cells = {name: _text(value) for name, value in logs.items() if name != "total_flos"}
            _print("\n".join(block(cells, columns=screen_columns())))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Remove all bars."""
        self.close()

    def close(self) -> None:
        """Remove all bars, also after an exception, for which there is no event."""
        self._close_evaluation()
        if self._training is not None:
            self._training.close()
            self._training = None

    def _close_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    def _begin(self, state: Any, label: str, total: int | None, **options: Any) -> Progress | None:
        if not state.is_local_process_zero:
            return None
        if self._new_display is None:
            self._new_display = display_factory(_print)
        return Progress(label, total, self._new_display(), **options)


def _print(text: str) -> None:
    with above_bars():
        print(text, flush=True)


def _facts(state: Any) -> dict[str, str]:
    """The epoch, and the loss that was logged last."""
    loss = next((entry["loss"] for entry in reversed(state.log_history) if "loss" in entry), None)
    facts = {"epoch": f"{state.epoch:.2f}"}
    return facts if loss is None else {**facts, "loss": _text(loss)}


def _text(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)
