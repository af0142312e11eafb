"""A rank that is slower than the others: in its forward pass, in its data, or none. Argument: a folder.

The pauses are long beside a step, so that busy cores do not decide who is slow.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import LogMetricsCallback, ReportCallback, ResultCallback
from pytorch_accelerated.extras.report.contents import data_in
from tests.support.reference import regression_data, tiny_trainer

folder = Path(sys.argv[1])
SECONDS, UPDATES = 0.1, 20  # of a batch on a rank that pauses; of a run
INPUTS, TARGETS = regression_data(6 * UPDATES)
NONE, ALL = (0.0, 0.0, 0.0), (SECONDS, SECONDS, SECONDS)


@dataclasses.dataclass
class Pausing(Dataset[Any]):
    seconds: float

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds / 2)  # of two rows
        return INPUTS[index], TARGETS[index]


class PausingTrainer(Trainer):
    seconds = 0.0

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        time.sleep(self.seconds)
        return super().calculate_train_batch_loss(batch)


def train(
    forward: tuple[float, ...], data: tuple[float, ...], *callbacks: Any, epochs: int = 1, **arguments: Any
) -> Any:
    """Each rank has its pause in the forward pass and in the fetching of a batch."""
    trainer: Any = tiny_trainer(*callbacks, base=PausingTrainer, seed=3)
    rank = trainer._ranks.index
    trainer.seconds = forward[rank]
    settings = {"per_device_batch_size": 2, "train_dataloader_kwargs": {"num_workers": 0}, **arguments}
    history = trainer.train(Pausing(data[rank]), epochs, **settings)
    everyones = trainer._ranks.exchange(list(history.step_records))
    assert everyones[0] == everyones[1] == everyones[2]
    times = np.array([record.ranks for record in history.step_records])
    assert times.shape == (len(everyones[0]), 3, 3)
    assert times.min() >= 0
    assert [record.data_wait_share for record in everyones[0]] == pytest.approx(
        times[:, 0, 1] / times[:, 0].sum(axis=1)
    )
    of_ranks = times.sum(axis=(0, 2))
    assert np.ptp(of_ranks) < 0.2 * of_ranks.max()  # they were in the same updates
    return history


callbacks = LogMetricsCallback(), ResultCallback(folder / "result.json"), ReportCallback(folder / "page.html")
history = train((0.0, SECONDS, 0.0), NONE, *callbacks)
found = history.slow_rank
assert (history.updates_done, found.rank, found.cause) == (UPDATES, 1, "computation")
waited = np.array([record.ranks for record in history.step_records]).sum(axis=0)[:, 2]
assert waited[1] < 0.1 * UPDATES * SECONDS
assert min(waited[0], waited[2]) > 0.7 * UPDATES * SECONDS
print(found.in_words())
if (folder / "result.json").exists():
    alerts = json.loads((folder / "result.json").read_text())["alerts"]
    assert [(alert["kind"], alert["text"]) for alert in alerts] == [("slow rank", found.in_words())]
    (run,) = json.loads(data_in((folder / "page.html").read_text()) or "")["runs"]
    assert ("slow rank", found.in_words()) in [(event["what"], event["text"]) for event in run["events"]]
    assert [times[2] for times in run["steps"]["ranks"]] == pytest.approx(waited.tolist())

history = train(NONE, (0.0, 0.0, SECONDS), gradient_accumulation_steps=2, epochs=2)
assert (history.updates_done, history.slow_rank.rank, history.slow_rank.cause) == (UPDATES, 2, "data")
assert train(ALL, NONE, record_every_n_steps=8).slow_rank is None


class OwnPasses(Trainer):
    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        loss = mse_loss(self.model(batch[0]), batch[1])
        self._update_loss_tracker(loss.detach(), len(batch[0]))
        self.backward_step(loss)


# Passes of the user's own are not looked into: nothing is known of where their ranks meet.
trainer: Any = tiny_trainer(base=OwnPasses, seed=3)
history = trainer.train((INPUTS, TARGETS), 1, per_device_batch_size=2)
assert trainer.current_run.parts.reports.epoch_clock.meeting_seconds == 0
assert all(times.others_wait == 0 for record in history.step_records for times in record.ranks)
