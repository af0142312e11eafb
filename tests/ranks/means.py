"""Runs on any number of ranks: each loss is the mean over what torch says it is over, however its items are split."""

import os

from tests.chaos.size import some
from tests.support.means import SIZE, check

RANKS = int(os.environ["WORLD_SIZE"])
assert check(some((3,), (1, 2, 3, SIZE)), (2,), RANKS) >= 10
