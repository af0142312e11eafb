"""Errors of a model tell where in the run they happened, with which batch, and what they usually come from."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.huggingface.runs import Regression, Rows, make_trainer


class FailsWithout(Regression):
    """Cannot take a batch whose first label is the one that is asked for."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.bad = Rows(12).labels[row].item()

    def forward(self, x: Any, labels: Any = None) -> Any:
        return super().forward(x.double() if labels is not None and labels[0].item() == self.bad else x, labels)


def note_of(run: Any) -> list[str]:
    with pytest.raises(RuntimeError, match="must have the same dtype, but got Double and Float") as caught:
        run()
    (note,) = caught.value.__notes__  # type: ignore[attr-defined]
    return str(note).splitlines()


@pytest.mark.fact(
    "Errors: Errors raised by a model have a note with epoch, step, contents of the batch, and the usual cause"
)
def test_errors_of_the_model_tell_where_they_happened(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2}
    parts = {"model": FailsWithout(6), "train_dataset": Rows(12)}
    trainer = make_trainer(tmp_path, parts=parts, per_device_train_batch_size=2, **arguments)
    where, batch, cause, own = note_of(trainer.train)
    assert where == (
        "This happened in the training step: epoch 1, update 2 of the run, batch 3 of the epoch on this rank (counted "
        "from 0)."
    )
    assert batch == "The batch: dict with ('x': float32 [2, 2] on cpu; 'labels': float32 [2, 1] on cpu)."
    assert "float64" in cause
    assert own.startswith('Your code: File "')
    assert own.endswith(", in forward: outputs = self.linear(self.dropout(x))")
    trainer = make_trainer(tmp_path, parts={"model": FailsWithout(4)}, per_device_eval_batch_size=2)
    for run in (trainer.evaluate, trainer.predict):
        where, *_ = note_of(functools.partial(run, Rows(12)))
        assert "evaluation: epoch 1, after 0 updates of the run, the batch that begins with sample 4" in where
