"""Runs on two ranks: a look before training finds the same on both, and leaves both as they were."""

import os

import torch
import torch.distributed as dist

from tests.looking.worlds import everything, make, results
from tests.support.resuming import assert_same

for kind in ("mlp", "cnn"):
    found = []
    for is_searched in (False, True):
        trainer, data = make(kind, seed=3)
        assert trainer.run_context.parts.ranks.count == int(os.environ["WORLD_SIZE"]) == 2
        trainer.train(data, 1, per_device_batch_size=4)
        if is_searched:
            before = everything(trainer)
            # 50 rows: the last update of an epoch has rows on one rank only.
            test = trainer.find_lr(data, num_updates=40, per_device_batch_size=7, gradient_accumulation_steps=2)
            tests = trainer.run_context.parts.ranks.exchange([test.rates, test.losses, test.suggestion])
            assert_same(tests[0], tests[1])
            assert_same(everything(trainer), before)
            summary = trainer.summary(data, per_device_batch_size=7, gradient_accumulation_steps=2)
            assert summary.batches == 2
            trainer.preflight(data, 1, data, per_device_batch_size=4)
            assert_same(everything(trainer), before)
            rank = trainer.run_context.parts.ranks.index
            rows = trainer.rows_of(1, data, 1, per_device_batch_size=4)
            shown = trainer.show_batch(data, per_device_batch_size=4)
            assert torch.equal(shown.batch[0], data[0][rows][4 * rank : 4 * rank + 4])
            one_row = data[0][:1], data[1][:1]  # one rank has no batch
            looks = [trainer.show_batch(one_row), trainer.show_predictions(one_row)]
            assert [look.batch is None for look in looks] == [bool(rank)] * 2
            assert_same(everything(trainer), before)
        trainer.train(data, 1, data, per_device_batch_size=4)
        found.append(results(trainer))
    assert_same(found[1], found[0])

# Both see the same loss grow.
trainer, data = make("mlp", seed=3)
before = everything(trainer)
assert trainer.summary(batch=(data[0][:5], data[1][:5])).batches == 1
assert trainer.find_lr(data, max_lr=1e9, num_updates=100).has_diverged
assert_same(everything(trainer), before)
print("all is well")
torch.distributed.destroy_process_group()
assert not dist.is_initialized()
