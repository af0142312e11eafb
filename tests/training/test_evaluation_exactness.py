"""Evaluation and prediction on any number of ranks equal those of one process, and no rank ever waits for ever."""

from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated.callbacks import SaveBestModelCallback, TrainerCallback
from tests.support import batch_shapes
from tests.support.batch_shapes import SHAPES, Samples
from tests.support.processes import run_forked
from tests.support.reference import TOLERANCE

RANKS = Path(__file__).parents[1] / "ranks"


def test_one_process_gives_the_plain_sums_for_every_size(tmp_path: Path) -> None:
    assert run_forked(RANKS / "evaluation.py", tmp_path).stdout == "done\n"


class MeansByHand(TrainerCallback):
    """Keeps the mean over samples, each computed alone, after every epoch."""

    def __init__(self, kind: str) -> None:
        self.kind, self.means = kind, list[float]()

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self.means.append(batch_shapes.mean_loss(trainer, self.kind))


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 0) for kind in SHAPES), ("time first", 2)])
def test_recorded_losses_are_means_over_samples_whatever_the_shapes_of_a_batch(
    kind: str, workers: int, tmp_path: Path
) -> None:
    loaders: Any = {"num_workers": workers}
    by_hand, best = MeansByHand(kind), SaveBestModelCallback(tmp_path / "best.pt")
    trainer = batch_shapes.trainer_of(kind, by_hand, best)
    arguments: Any = {"train_dataloader_kwargs": loaders, "eval_dataloader_kwargs": loaders}
    history = trainer.train(
        Samples(), 4, Samples(), per_device_batch_size=4, collate_fn=SHAPES[kind].collate, **arguments
    )
    found = list(history.get_metric_values("eval_loss_epoch"))
    assert found == pytest.approx(by_hand.means, rel=TOLERANCE)
    trainer.load_checkpoint(tmp_path / "best.pt")
    assert batch_shapes.mean_loss(trainer, kind) == pytest.approx(min(by_hand.means), rel=TOLERANCE)

    still = batch_shapes.trainer_of(kind, learning_rate=0.0)
    mean = batch_shapes.mean_loss(still, kind)
    history = still.train(
        Samples(), 1, per_device_batch_size=4, collate_fn=SHAPES[kind].collate, gradient_accumulation_steps=2
    )
    assert history.get_metric_values("train_loss_epoch") == pytest.approx([mean], rel=TOLERANCE)
    assert still.run_state.samples_in_epoch == len(Samples())
