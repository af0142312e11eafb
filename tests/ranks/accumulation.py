"""Runs under torchrun: accumulation on several ranks equals big batches, for sizes around every remainder."""

import os

from tests.chaos.size import some
from tests.steps.test_accumulation import compare_with_big_batches

RANKS = int(os.environ["WORLD_SIZE"])

for batch_size, steps in some([(1, 1), (2, 3)], [(1, 1), (2, 1), (2, 3)]):
    per_update = batch_size * steps * RANKS
    last = per_update + batch_size * RANKS + 1
    edges = sorted({1, RANKS, RANKS + 1, per_update - 1, per_update, per_update + 1, last} - {0})
    for size in some(edges, range(1, last + 1)):
        compare_with_big_batches(size, batch_size, steps, ranks=RANKS)
compare_with_big_batches(2 * RANKS + 1, 2, 2, ranks=RANKS, clip_norm=0.05)
compare_with_big_batches(2 * RANKS + 1, 2, 2, ranks=RANKS, clip_value=0.01)
