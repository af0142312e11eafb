"""Resuming on streams of `datasets`: bit for bit, though the stream would lose its shuffle buffer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pytorch_accelerated.huggingface import Trainer
from tests.data.hub import HUB_STREAMS
from tests.huggingface.runs import StopAt, losses, make_trainer
from tests.support.resuming import assert_same


def run(folder: Path, stream: Any, *callbacks: Any, resume: bool = False, **arguments: Any) -> Trainer:
    """Two epochs over a stream of ten rows, and some of a third."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        x, labels = (torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("inputs", "targets"))
        return {"x": x[:, :2].float(), "labels": labels[:, :1].float()}

    arguments = {"max_steps": 13, "remove_unused_columns": False, **arguments}
    trainer = make_trainer(folder, *callbacks, parts={"train_dataset": stream, "data_collator": collate}, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    ("step", "name", "workers"),
    [
        (3, "rows", 0),
        (7, "a shuffle buffer", 0),
        (3, "a shuffle buffer with noise", 0),
        (7, "a shuffle buffer with noise", 2),
    ],
)
def test_a_run_on_a_stream_of_datasets_resumes_exactly(step: int, name: str, workers: int, tmp_path: Path) -> None:
    stream = HUB_STREAMS[name]()
    arguments: dict[str, Any] = {"dataloader_num_workers": workers}
    whole = run(tmp_path / "whole", stream, **arguments)
    run(tmp_path / "parts", stream, StopAt(step), **arguments)
    resumed = run(tmp_path / "parts", stream, resume=True, **arguments)
    afterwards = run(tmp_path / "after", stream, **arguments)
    for trainer in (resumed, afterwards):
        assert losses(trainer) == losses(whole)
        assert_same(trainer.model.state_dict(), whole.model.state_dict())
