"""Runs on two ranks: an update of a run of both is replayed by both, to the bit."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.proving.runs import Log, make, train
from tests.support.resuming import assert_same

folder = Path(sys.argv[1])
changes: dict[str, Any] = {"per_device_batch_size": 4, "has_norm": False, "dataset": {"noise": 0.1}}
trainer, _ = train(folder, log := Log(), every=5, **changes)
ranks = trainer.run_context.parts.ranks
assert ranks.count == int(os.environ["WORLD_SIZE"]) == 2
for update in (2, 6, 13, 24):
    new, arguments = make(**changes)
    found = new.replay(folder, update, **arguments)
    for name in ("gradients", "weights", "weights_after"):
        assert_same(getattr(found, name), getattr(log, name)[update], f"{name} of update {update}")
    per_rank = ranks.exchange(log.rows[update])
    assert sorted(found.rows or []) == sorted(row for rows in per_rank for row in rows)
    assert found.loss == found.recorded_loss
    assert_same(ranks.exchange(found.to_json())[0], found.to_json())
    assert found.row_losses is not None
    assert abs(sum(found.row_losses) / 8 - found.loss) < 1e-12 * found.loss
torch.distributed.destroy_process_group()
