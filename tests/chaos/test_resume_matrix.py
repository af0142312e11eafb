"""A run that goes on from any of its updates ends with the same bits, with any number of loader processes."""

import random
from pathlib import Path
from typing import Any

import pytest

from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from tests.chaos.record import record
from tests.chaos.size import IS_RELEASE
from tests.checkpointing.same_state import assert_same_state
from tests.support.resuming import everything, run

OTHER_WORKERS = {0: 2, 1: 0, 2: 4, 4: 1}


class SaveAfterEachUpdate(TrainerCallback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_optimizer_step_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.save_training_state(self.folder / str(trainer.run_state.updates))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
# The last update of an epoch has fewer batches than the others, and its last batch fewer rows.
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("num_workers", OTHER_WORKERS if IS_RELEASE else [0, 2])
def test_a_run_resumed_from_any_update_ends_with_the_same_bits(num_workers: int, accumulation: int, tmp_path: Path):
    states = tmp_path / "states"
    how: dict[str, Any] = {"accumulation": accumulation, "rows": 23}
    whole = everything(*run(tmp_path, SaveAfterEachUpdate(states), num_workers=num_workers, **how))
    saved = sorted(states.iterdir(), key=lambda folder: int(folder.name))
    assert len(saved) == whole["run_state"]["updates"] == 3 * -(-8 // accumulation)
    chosen = saved if IS_RELEASE else random.Random(accumulation).sample(saved, 2)
    for number, state in enumerate(chosen):
        workers = OTHER_WORKERS[num_workers] if number % 2 else num_workers
        resumed = run(tmp_path, process_seed=99, resume_from=state, num_workers=workers, **how)
        assert_same_state(everything(*resumed), whole)
    case = f"resume, {num_workers} workers, {accumulation} batches per update"
    record(case, {"updates gone on from": len(chosen), "with other workers": len(chosen) // 2, "ended differently": 0})
